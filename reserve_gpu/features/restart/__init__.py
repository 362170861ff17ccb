"""A restart of a kernel keeps its GPU, by what core/kept.py has for all kernels."""
