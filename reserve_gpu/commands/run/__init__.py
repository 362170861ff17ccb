"""The `reserve-gpu run` command, and helpers for all commands that start another program."""
