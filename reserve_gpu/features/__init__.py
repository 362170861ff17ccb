"""Optional reservation features. To remove one, delete its folder and its row in `FEATURES`."""
