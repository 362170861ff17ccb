"""The `join`, `list` and `release` commands, and the magic's `--join` and `--release` options."""
