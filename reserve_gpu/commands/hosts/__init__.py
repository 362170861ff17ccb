"""The `--hosts` option: the status of other machines, and kernels that run on them."""
