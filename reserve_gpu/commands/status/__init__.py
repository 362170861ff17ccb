"""The `reserve-gpu status` command and the magic's option `--status`."""
