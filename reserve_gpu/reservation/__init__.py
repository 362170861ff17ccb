"""The reservation of a process: acquiring, keeping, sharing, handing over and releasing it."""
