"""The `reserve-gpu top` command."""
