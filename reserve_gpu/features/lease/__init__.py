"""A reservation ends by itself, at a moment or by idleness."""
