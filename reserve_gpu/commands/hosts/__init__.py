"""The option `--hosts`: the status of other machines, and kernels that run on them."""
