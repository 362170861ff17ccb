"""`reserve-gpu status` and `--status`."""
