"""Which person and which notebook a process belongs to: this one, and those on the devices.

The only module that imports `psutil`, and only when another process has to be named.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from reserve_gpu import records

if TYPE_CHECKING:
    from reserve_gpu.device import Process


def me(note: str | None = None) -> dict[str, str | None]:
    """What this process says of itself to those who find a device reserved."""
    return {"user": records.user_of(os.getpid()), "notebook": notebook(), "note": note}


def notebook() -> str:
    """The name of this kernel's notebook, else the working directory.

    VS Code sets a variable in the user's namespace once the kernel has started, jupyter_server sets
    an environment variable to the notebook's path; so this is asked when it is needed, not kept.
    """
    main = sys.modules.get("__main__")
    path = getattr(main, "__vsc_ipynb_file__", None) or os.environ.get("JPY_SESSION_NAME")
    if path:
        return os.path.basename(str(path))
    try:
        directory = os.getcwd()
    except OSError:
        return "?"
    home = os.path.expanduser("~")
    return f"~{directory[len(home) :]}" if f"{directory}/".startswith(f"{home}/") else directory


def identified(process: Process) -> Process:
    """The process with its user and command, as far as they can be seen from here."""
    import psutil

    try:
        found = psutil.Process(process.pid)
        return process.replace(user=records.user_of(process.pid), command=found.name())
    except (psutil.Error, OSError, ValueError):
        return process
