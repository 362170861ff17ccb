"""`python -m reserve_gpu`: the command line, where `reserve-gpu` is not on the PATH."""

import os
import sys

# A file in the working directory must not stand in for a module that the command line imports.
if not getattr(sys.flags, "safe_path", False) and sys.path[:1] in ([""], [os.getcwd()]):
    del sys.path[0]

from reserve_gpu.cli import main

if __name__ == "__main__":
    sys.exit(main())
