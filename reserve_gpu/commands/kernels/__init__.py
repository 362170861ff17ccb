"""The command `kernel install`, and the commands that start the installed kernels."""
