"""The `kernel install` command, and the commands that start the installed kernels."""
