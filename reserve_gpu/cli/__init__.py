"""The `reserve-gpu` command line."""
