"""`python -m reserve_gpu`: the command line, where `reserve-gpu` is not on the PATH."""

import os
import sys

# Python puts the working directory first. A file there that is called like a module of Python's
# own (json.py) must not be imported in its place.
if not getattr(sys.flags, "safe_path", False) and sys.path[:1] in ([""], [os.getcwd()]):
    del sys.path[0]

from reserve_gpu.cli import main

if __name__ == "__main__":
    sys.exit(main())
