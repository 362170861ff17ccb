"""What this process holds: how it is acquired, kept, shared, handed over and released."""
