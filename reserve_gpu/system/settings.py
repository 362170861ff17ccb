"""Names of environment variables, except those of features, and paths of configuration files."""

import os
import stat
import sys

from reserve_gpu.system import accounts

# The pid and start time of the process that set the variable and, before an exec, its reservation
# (reservation/exec_handover.py). Child processes inherit the variable, but not the reservation.
HELD = "RESERVE_GPU_HELD"
# Variables that users may set.
LOCK_DIRECTORY = "RESERVE_GPU_LOCK_DIR"
IDLE_MEMORY = "RESERVE_GPU_IDLE_MEMORY"
CONTEXT_MEMORY = "RESERVE_GPU_CONTEXT_MEMORY"
CONFIG = "RESERVE_GPU_CONFIG"
HISTORY = "RESERVE_GPU_HISTORY"
AGENT = "RESERVE_GPU_AGENT"  # name of a program that requests GPUs on behalf of its user
# The description of a kernel that was started over ssh (`jupyter_kernel.remote_description`). It is
# JSON, encoded in hexadecimal digits, because shells do not change these.
STARTED = "RESERVE_GPU_STARTED"
# The pid and start time (`procfs.stamp`) of a kernel that runs in a job of its own. Child processes
# inherit the variable. Before the kernel sets it, the variable contains STARTED_BY, followed by the
# pid and start time of the process that starts the kernel.
JOB_KERNEL = "RESERVE_GPU_JOB_KERNEL"
STARTED_BY = "started by "
STARTED_BY_OLDER = "1"  # the previous version's value instead of STARTED_BY
SENT = "sent:"  # prefix of an argument that contains a command line, in the encoding of STARTED
KERNEL_NAME = "python3-gpu"  # kernel that reserves its GPU before it runs any code
CONFIG_FILE = "/etc/reserve_gpu.toml"
HISTORY_DIRECTORY = "/var/lib/reserve_gpu/history"


def home() -> str:
    """Return this user's home directory, or `~` if it is unknown, like `os.path.expanduser`.

    A service may run without $HOME. `expanduser` would then look up the user at each call, whereas
    this function caches the result.
    """
    if "HOME" in os.environ or sys.platform == "win32":
        return os.path.expanduser("~")
    entry = accounts.find_user(os.getuid())
    return entry.pw_dir if entry else "~"


def user_file() -> str:
    """Return the path of this user's configuration file."""
    folder = os.environ.get("XDG_CONFIG_HOME") or os.path.join(home(), ".config")
    return os.path.join(folder, "reserve_gpu.toml")


def state_directory() -> str:
    """Return the path of this user's directory for persistent state."""
    folder = os.environ.get("XDG_STATE_HOME") or os.path.join(home(), ".local/state")
    return os.path.join(folder, "reserve_gpu")


def history_directory() -> str:
    """Return the directory that contains the histories of all users."""
    return os.environ.get(HISTORY) or HISTORY_DIRECTORY


def may_have_history() -> bool:
    """Return whether a history may be enabled: a configuration or history file exists.

    Every reservation calls this, and usually there is no such file. So this function imports no
    module that would parse the files.
    """
    paths = history_directory(), state_directory(), user_file()
    return config_file() is not None or any(map(os.path.lexists, paths))


def config_file() -> str | None:
    """Return the path of the administrator's configuration file, or None if there are no rules.

    A missing or empty file contains no rules, but a missing file that RESERVE_GPU_CONFIG names is
    an error that the reader reports. Every reservation calls this, so it makes only one stat call.
    """
    configured = os.environ.get(CONFIG)
    file = configured or CONFIG_FILE
    try:
        status = os.stat(file)
    except FileNotFoundError:
        return configured or None
    except OSError as error:
        if error.errno is None:  # a TimeoutError from the caller's signal handler
            raise
        return file  # reading the file fails with the same error, and reports it
    return file if status.st_size or not stat.S_ISREG(status.st_mode) else None
