"""Optional reservation features. To remove a feature, delete its folder."""
