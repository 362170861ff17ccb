"""The commands `join`, `list` and `release`, and the magic's options `--join` and `--release`."""
