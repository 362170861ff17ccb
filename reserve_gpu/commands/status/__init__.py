"""The `reserve-gpu status` command and the magic's `--status` option."""
