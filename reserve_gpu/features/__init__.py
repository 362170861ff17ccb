"""What a capability adds to what a process holds: a folder each, and a row in core/features.py."""
