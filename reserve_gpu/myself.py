"""This process: where it runs, and what it says of itself to those who find a device reserved."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from reserve_gpu.settings import HELD

if TYPE_CHECKING:
    from collections.abc import Mapping

INITIAL_PID_NAMESPACE = 0xEFFFFFFC  # PROC_PID_INIT_INO of the kernel's include/linux/proc_ns.h
TEXT_LIMIT = 300  # characters of each text


def held_by() -> int:
    """The process that was given what $RESERVE_GPU_HELD describes, 0 if there is none.

    With another pid than that one a process has only inherited the variable.
    """
    pid = os.environ.get(HELD, "")[:20].partition(" ")[0]
    return int(pid) if pid.isascii() and pid.isdecimal() else 0


def pid_namespace() -> int | None:
    """The inode of this process's PID namespace, None where there are none."""
    with suppress(OSError):
        return os.stat("/proc/self/ns/pid").st_ino
    return None


def sees_all_locks() -> bool:
    """Whether the kernel's list shows the locks of all PID namespaces, not of one alone."""
    return pid_namespace() == INITIAL_PID_NAMESPACE and os.access("/proc/locks", os.R_OK)


def is_private(path: str) -> bool:
    """Whether this is a container and the directory is in it alone, not mounted from outside.

    A container's own mounts are its root, and temporary file systems such as /dev/shm.
    """
    if pid_namespace() in (None, INITIAL_PID_NAMESPACE):
        return False
    path = os.path.realpath(path)
    point, kind = "", ""
    with suppress(OSError, ValueError, IndexError), open("/proc/self/mountinfo") as mounts:
        for line in mounts:
            fields, rest = (part.split() for part in line.split(" - ", 1))
            if len(fields[4]) >= len(point) and _is_below(path, fields[4]):
                point, kind = fields[4], rest[0]
    return point != path and (point in ("", "/") or kind in ("tmpfs", "overlay"))


def user_of(pid: int) -> str | None:
    """The user that runs a process, by the system's word, None if it can't be seen from here."""
    with suppress(OSError):
        uid = os.stat(f"/proc/{pid}").st_uid
        try:
            import pwd

            return pwd.getpwuid(uid).pw_name
        except (ImportError, KeyError):
            return f"uid {uid}"
    return None


def bounded(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record with its texts cut to what a reader takes."""
    return {
        name: value[:TEXT_LIMIT] if isinstance(value, str) else value
        for name, value in record.items()
    }


def me(note: str | None = None) -> dict[str, str | None]:
    """What this process says of itself to those who find a device reserved.

    Who can see the process goes by the system's word for the user; so what a login has set will do.
    """
    user = os.environ.get("LOGNAME") or user_of(os.getpid())
    return {"user": user, "notebook": notebook(), "note": note}


def notebook_path() -> str | None:
    """The path of this kernel's notebook, None if it is not known (yet).

    VS Code sets a variable in the user's namespace once the kernel has started, jupyter_server sets
    an environment variable to the notebook's path; so this is asked when it is needed, not kept.
    """
    main = sys.modules.get("__main__")
    path = getattr(main, "__vsc_ipynb_file__", None) or os.environ.get("JPY_SESSION_NAME")
    return str(path) if path else None


def notebook() -> str:
    """The name of this kernel's notebook, else the working directory."""
    if path := notebook_path():
        return os.path.basename(path)
    try:
        directory = os.getcwd()
    except OSError:
        return "?"
    home = os.path.expanduser("~")
    return f"~{directory[len(home) :]}" if f"{directory}/".startswith(f"{home}/") else directory


def _is_below(path: str, point: str) -> bool:
    return f"{path}/".startswith(f"{point.rstrip('/')}/")
