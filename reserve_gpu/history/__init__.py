"""Who used what: what processes note of their reservations, and what it sums up to."""
