"""The IPython frontend: the magic, its hooks around cells, and Tab completion."""
