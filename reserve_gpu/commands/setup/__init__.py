"""The `setup` command: make IPython and Jupyter kernels load the extension when they start."""
