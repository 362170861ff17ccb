"""Messages, tables and live displays for users. The functions take values and return text."""
