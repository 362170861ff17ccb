"""Warn users whose process uses more of a GPU's memory than it has reserved."""
