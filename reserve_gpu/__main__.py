"""`python -m reserve_gpu`: the command line, where `reserve-gpu` is not on the PATH."""

import sys

from reserve_gpu.cli import main

if __name__ == "__main__":
    sys.exit(main())
