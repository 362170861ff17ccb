"""Capabilities of a reservation that can be deleted, one folder each."""
