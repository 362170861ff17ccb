"""The `reserve-gpu report` command."""
