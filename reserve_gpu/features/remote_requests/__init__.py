"""Release the devices of this process when its user requests it from another process."""
