"""Keep a Jupyter kernel's devices across a restart (see `reservation/restart_handover.py`)."""
