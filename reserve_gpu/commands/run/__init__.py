"""The command `reserve-gpu run`, and helpers for all commands that start another program."""
