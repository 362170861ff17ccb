"""Names of environment variables, but those of features; where configuration and state stand."""

import os
import stat
import sys

from reserve_gpu.system import accounts

# The pid of this process, and a description of its reservation from before exec, with its start
# time (reservation/exec_handover.py). Another process has only inherited the variable.
HELD = "RESERVE_GPU_HELD"
# What people may set.
LOCK_DIRECTORY = "RESERVE_GPU_LOCK_DIR"
IDLE_MEMORY = "RESERVE_GPU_IDLE_MEMORY"
CONTEXT_MEMORY = "RESERVE_GPU_CONTEXT_MEMORY"
CONFIG = "RESERVE_GPU_CONFIG"
HISTORY = "RESERVE_GPU_HISTORY"
AGENT = "RESERVE_GPU_AGENT"  # the name of a program that asks for GPUs in place of its user
# Of a kernel that was started by ssh: what `started` returns, as JSON in hexadecimal digits, which
# no shell changes.
STARTED = "RESERVE_GPU_STARTED"
# The pid and start time (`procfs.stamp`) of a kernel whose job was started for it; other processes
# only inherit the variable. Until the kernel sets it, it names the process that starts the kernel.
JOB_KERNEL = "RESERVE_GPU_JOB_KERNEL"
STARTED_BY = "started by "
STARTED_BY_OLDER = "1"  # as the version before wrote it
SENT = "sent:"  # what begins a word that stands for a whole command line, in the same form
KERNEL_NAME = "python3-gpu"  # of a kernel that has its GPU before its first line runs
CONFIG_FILE = "/etc/reserve_gpu.toml"
HISTORY_DIRECTORY = "/var/lib/reserve_gpu/history"


def home() -> str:
    """Return this user's home directory, `~` if it is unknown, as `os.path.expanduser` does.

    A service may run without $HOME; `expanduser` then looks up the user each time.
    """
    if "HOME" in os.environ or sys.platform == "win32":
        return os.path.expanduser("~")
    entry = accounts.find_user(os.getuid())
    return entry.pw_dir if entry else "~"


def user_file() -> str:
    """Return the path of the user's own configuration file."""
    folder = os.environ.get("XDG_CONFIG_HOME") or os.path.join(home(), ".config")
    return os.path.join(folder, "reserve_gpu.toml")


def state_directory() -> str:
    """Return where what is to last is kept for this user, in the home."""
    folder = os.environ.get("XDG_STATE_HOME") or os.path.join(home(), ".local/state")
    return os.path.join(folder, "reserve_gpu")


def history_directory() -> str:
    """Return the directory with the histories of all users."""
    return os.environ.get(HISTORY) or HISTORY_DIRECTORY


def may_keep_history() -> bool:
    """Tell whether there is anything that may say that a history is kept.

    Asked at each reservation, and mostly there is nothing: so no module is imported for it.
    """
    places = history_directory(), state_directory(), user_file()
    return config_file() is not None or any(map(os.path.lexists, places))


def config_file() -> str | None:
    """Return the path of the administrator's file, or None if it is missing or empty.

    Every reservation calls this, so it is a single stat.
    """
    named = os.environ.get(CONFIG)
    file = named or CONFIG_FILE
    try:
        status = os.stat(file)
    except FileNotFoundError:
        return named or None
    except OSError as error:
        if error.errno is None:  # a TimeoutError of the caller's signal handler
            raise
        return file  # reading it fails in the same way, and reports the reason
    return file if status.st_size or not stat.S_ISREG(status.st_mode) else None
