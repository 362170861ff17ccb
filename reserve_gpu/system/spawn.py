"""The command lines and the environment of the programs that this package starts.

No program and no module is taken from the working directory, where another user may have left a
`json.py` or an `ssh`. `python -m` and `python -c` put that directory first in sys.path. An empty or
relative entry of PATH or PYTHONPATH also names it. An absolute entry is the user's wish.
A command behind `reserve-gpu run --` is found as a shell finds it, not here.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys

# The folder that this package was imported from.
HOME = os.path.abspath(f"{__file__}/../../..")
# https://docs.python.org/3/using/cmdline.html#cmdoption-P
HAS_SAFE_PATH = sys.version_info >= (3, 11)
WITHOUT_FIRST = "import sys; del sys.path[0]; "


def python(*words: str) -> list[str]:
    """Return the command of this Python with these words, safe in any working directory.

    words: `-m`, a module and its arguments; `-c`, code and its arguments; or a file of this
        package, perhaps behind `-I`.
    """
    kind, *rest = words
    if kind.startswith("-I"):  # -I implies -P; the words of a lock keeper start so
        return [sys.executable, *words]
    if HAS_SAFE_PATH:
        return [sys.executable, "-P", *words]
    if kind == "-m":  # Python would import runpy from the working directory
        run = f"import runpy; runpy.run_module({rest[0]!r}, run_name='__main__', alter_sys=True)"
        return [sys.executable, "-c", WITHOUT_FIRST + run, *rest[1:]]
    if kind == "-c":
        return [sys.executable, "-c", WITHOUT_FIRST + rest[0], *rest[1:]]
    return [sys.executable, *words]  # first in sys.path is the file's own folder


def program(name: str) -> str:
    """Return the path of a program on PATH. A path stays as it is.

    Raises FileNotFoundError.
    """
    if os.path.dirname(name):
        return name
    folders = filter(os.path.isabs, os.get_exec_path())
    if found := shutil.which(name, path=os.pathsep.join(folders)):
        return found
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)


def environment() -> dict[str, str]:
    """Return this process's environment for a Python that imports this package.

    A new Python does not know the folders that this process has added to its sys.path.
    """
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    kept = [folder for folder in folders if os.path.isabs(folder)]
    if os.path.basename(HOME) not in ("site-packages", "dist-packages") and HOME not in kept:
        kept.append(HOME)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(kept)}
