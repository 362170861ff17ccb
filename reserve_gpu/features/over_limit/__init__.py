"""A user is warned when the process uses more of a GPU than the part that it reserved."""
