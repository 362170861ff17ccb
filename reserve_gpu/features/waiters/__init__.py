"""Tell the holder about waiters for its idle devices, and about other users of its devices."""
