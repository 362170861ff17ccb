"""Warn the user if a process is using more GPU memory than it has reserved."""
