"""The history: the logged use of devices, and its files on disk."""
