"""`reserve-gpu check`, `--check` and `reserve_gpu.check()`."""
