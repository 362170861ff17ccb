"""Optional reservation features. To remove one, delete its folder."""
