"""Interfaces to the operating system and Jupyter, such as processes, containers, and kernels."""
