"""Warn the user if a process uses more GPU memory than it has reserved."""
