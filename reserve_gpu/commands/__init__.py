"""What people can type besides a request: a folder each, and a row in table.py."""
