"""Does PyTorch, or another framework, see exactly what was reserved? check.py asks each of them."""
