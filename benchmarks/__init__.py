"""Measurements, each a ratio within one run: `python -m benchmarks`."""
