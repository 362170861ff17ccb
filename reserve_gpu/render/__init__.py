"""Messages, tables and live displays for users."""
