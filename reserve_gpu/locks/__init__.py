"""Who has a device: a file lock for each, the records in them, and the queue."""
