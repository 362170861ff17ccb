"""`reserve-gpu join`, `list` and `release`; `--join` and `--release`."""
