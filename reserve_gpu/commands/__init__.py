"""The `reserve-gpu` commands, grouped into folders and listed in `registry.py`."""
