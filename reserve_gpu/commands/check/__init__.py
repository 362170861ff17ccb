"""The `reserve-gpu check` command, the magic's `--check`, and `reserve_gpu.check()`."""
