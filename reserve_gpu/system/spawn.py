"""Command lines and environment variables of the programs that this package starts.

Programs and modules are never loaded from the working directory, because another user might have
placed a `json.py` or an `ssh` there. `python -m` and `python -c` put that directory first in
sys.path, and an empty or relative entry of PATH or PYTHONPATH also refers to it. Absolute entries
are used, because the user has chosen them. `reserve-gpu run` does not use this module for the
user's command. It finds the command as a shell would.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys

# The folder that contains this package.
HOME = os.path.abspath(f"{__file__}/../../..")
# https://docs.python.org/3/using/cmdline.html#cmdoption-P
HAS_SAFE_PATH = sys.version_info >= (3, 11)
WITHOUT_FIRST = "import sys; del sys.path[0]; "


def python(*words: str) -> list[str]:
    """Return a command line for this Python interpreter that is safe in any working directory.

    Args:
        words: `-m` with a module and its arguments, `-c` with code and its arguments, or a file of
            this package with its arguments. `-I` can precede the file.
    """
    kind, *rest = words
    if kind.startswith("-I"):  # -I implies -P; the lock keeper and the watchdog use it
        return [sys.executable, *words]
    if HAS_SAFE_PATH:
        return [sys.executable, "-P", *words]
    if kind == "-m":  # python -m would import runpy from the working directory
        run = f"import runpy; runpy.run_module({rest[0]!r}, run_name='__main__', alter_sys=True)"
        return [sys.executable, "-c", WITHOUT_FIRST + run, *rest[1:]]
    if kind == "-c":
        return [sys.executable, "-c", WITHOUT_FIRST + rest[0], *rest[1:]]
    return [sys.executable, *words]  # Python puts the file's folder first in sys.path


def program(name: str) -> str:
    """Find a program on PATH, and return its absolute path.

    A name that contains a slash is already a path, and is returned unchanged.

    Raises:
        FileNotFoundError: No absolute entry of PATH contains the program.
    """
    if os.path.dirname(name):
        return name
    folders = filter(os.path.isabs, os.get_exec_path())
    if path := shutil.which(name, path=os.pathsep.join(folders)):
        return path
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)


def environment() -> dict[str, str]:
    """Return environment variables that let a new Python process import this package.

    The new process does not inherit the folders that this process has added to sys.path. Empty and
    relative entries of PYTHONPATH are removed.
    """
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    folders = [folder for folder in entries if os.path.isabs(folder)]
    if os.path.basename(HOME) not in ("site-packages", "dist-packages") and HOME not in folders:
        folders.append(HOME)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
