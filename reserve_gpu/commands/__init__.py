"""The commands: a folder each, and a row in registry.py."""
