"""Who used what: what processes log of their reservations, and what it sums up to."""
