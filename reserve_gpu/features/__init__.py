"""Optional features of reservations. Each feature is a folder, which can be deleted."""
