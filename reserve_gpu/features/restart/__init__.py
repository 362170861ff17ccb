"""Keep the GPU of a kernel over its restart, by means of `reservation/restart_handover.py`."""
