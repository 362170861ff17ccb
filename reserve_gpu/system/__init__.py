"""The operating system: processes, threads, containers, kernels of Jupyter, settings."""
