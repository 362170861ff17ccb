"""Benchmarks of %reserve_gpu against its alternatives; see `benchmarks.__main__`."""
