"""The operating system and Jupyter: processes, threads, containers, kernels, and settings."""
