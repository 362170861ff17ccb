"""Write and read the history, a log of each user's device use."""
