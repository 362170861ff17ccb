"""Names of environment variables, and paths of configuration files.

The features define the names of their own variables.
"""

import os
import stat
import sys

from reserve_gpu.system import accounts

# The pid and start time of the process that set the variable. Before an exec, the variable also
# contains the reservation (reservation/exec_handover.py). Child processes inherit the variable, but
# not the reservation.
HELD = "RESERVE_GPU_HELD"
# Variables that users can set.
LOCK_DIRECTORY = "RESERVE_GPU_LOCK_DIR"
IDLE_MEMORY = "RESERVE_GPU_IDLE_MEMORY"
CONTEXT_MEMORY = "RESERVE_GPU_CONTEXT_MEMORY"
CONFIG = "RESERVE_GPU_CONFIG"
HISTORY = "RESERVE_GPU_HISTORY"
AGENT = "RESERVE_GPU_AGENT"  # name of a coding agent or other program that requests GPUs
# The description of a kernel that was started over ssh (`jupyter_kernel.remote_description`). It is
# JSON, encoded as hexadecimal digits, which shells do not alter.
STARTED = "RESERVE_GPU_STARTED"
# The pid and start time (`procfs.stamp`) of a kernel that runs in a Slurm job of its own. They
# distinguish the kernel from its child processes, which inherit the variable. Until the kernel sets
# the variable, it contains STARTED_BY, followed by the pid and start time of the process that is
# starting the kernel.
JOB_KERNEL = "RESERVE_GPU_JOB_KERNEL"
STARTED_BY = "started by "
STARTED_BY_OLDER = "1"  # value that the previous version used instead of STARTED_BY
SENT = "sent:"  # prefix of an argument that contains a command line, encoded like STARTED
KERNEL_NAME = "python3-gpu"  # the Jupyter kernel that reserves a GPU at startup
CONFIG_FILE = "/etc/reserve_gpu.toml"
HISTORY_DIRECTORY = "/var/lib/reserve_gpu/history"


def home() -> str:
    """Return this user's home directory, or `~` if it is unknown, like `os.path.expanduser`.

    Without $HOME, which a service might lack, `expanduser` would look up the user on every call.
    This function caches the lookup.
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
    """Return whether a history might be enabled, because a configuration or history file exists.

    Every reservation calls this function, and usually no such file exists. So the function does not
    import any modules that parse the files.
    """
    paths = history_directory(), state_directory(), user_file()
    return config_file() is not None or any(map(os.path.lexists, paths))


def config_file() -> str | None:
    """Return the path of the administrator's configuration file, or None if there are no rules.

    A missing or empty file contains no rules. If RESERVE_GPU_CONFIG names a missing file, the
    result is still its path, so that reading the file reports an error. Every reservation calls
    this function, so it makes only one stat call.
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
        return file  # reading the file will report the same error
    return file if status.st_size or not stat.S_ISREG(status.st_mode) else None
