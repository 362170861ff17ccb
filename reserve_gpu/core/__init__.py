"""Reserving and letting go. Read api.py first: it is the road of one reservation."""
