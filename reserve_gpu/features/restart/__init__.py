"""A restart of a kernel keeps its GPU."""
