"""`--hosts`: other machines, and kernels on them."""
