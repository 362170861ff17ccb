"""Benchmarks that compare %reserve_gpu with its alternatives; see `benchmarks.__main__`."""
