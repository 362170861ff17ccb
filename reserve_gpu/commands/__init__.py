"""The commands of `reserve-gpu`: one folder and one entry in `registry.py` for each."""
