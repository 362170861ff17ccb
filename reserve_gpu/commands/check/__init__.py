"""The `reserve-gpu check` command, the magic's `--check` option, and `reserve_gpu.check()`."""
