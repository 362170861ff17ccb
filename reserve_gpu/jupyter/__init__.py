"""What IPython and Jupyter need besides the magic: completion, and kernels with a GPU."""
