"""Keep a kernel's devices over its restart (see `reservation/restart_handover.py`)."""
