"""Tests on a machine with a real GPU: `python -m tests.hardware`, or `pytest -m gpu`."""
