"""Optional features of reservations, in one folder each, which can be deleted."""
