"""The front end in IPython: the magic, its hooks around cells, and Tab completion."""
