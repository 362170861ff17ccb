"""The name under which a process is displayed: its notebook, its command, or an assigned name."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from reserve_gpu.model.untrusted import sanitize
from reserve_gpu.system import settings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

NAME_LIMIT = 200  # maximum length of a displayed name, in characters
TEXTS_LIMIT = 1 << 20  # maximum number of bytes to read of a command line or environment
RAY = b"ray::"  # prefix of the process titles that Ray sets
KERNEL_MODULE = "ipykernel_launcher"  # module that Jupyter runs to start a kernel
_name: str | None = None  # name that is displayed instead of this process's command


def title() -> str | None:
    """Return the name to display instead of this process's command, or None if there is none."""
    return _name or _engine()


def own_command() -> str | None:
    """Return this process's shortened command, or its process title if it is a Ray worker."""
    words = sys.orig_argv
    with suppress(OSError), open("/proc/self/cmdline", "rb") as file:
        if (title := file.read(NAME_LIMIT).rstrip(b"\0 ")).startswith(RAY):
            words = [title.decode(errors="replace")]
    return command(words, working_directory())


def set_name(name: str) -> None:
    """Set the name that is displayed for this process instead of its command."""
    global _name
    _name = sanitize(name, NAME_LIMIT)


def command(words: Sequence[str], directory: str | None = None) -> str | None:
    """Shorten a command line, mainly by removing folders from the paths of programs and scripts.

    For example, `/usr/bin/python /home/me/train.py` becomes `python train.py`, and `/usr/bin/python
    /usr/bin/ipython` becomes `ipython`. A Jupyter kernel's arguments are not
    informative, so the kernel is displayed as `kernel in ~/thesis`.

    Args:
        words: The command line.
        directory: The working directory, if it is known.

    Returns:
        The shortened command, or None for an empty command line.
    """
    if KERNEL_MODULE in words:
        return sanitize(
            f"kernel in {_below_home(directory)}" if directory else "kernel", NAME_LIMIT
        )
    # If the first word contains spaces, it is a process title such as `ray::train /data`, not a
    # path.
    short = [word if " " in word else os.path.basename(word) for word in words[:1]] + [*words[1:]]
    for index, word in enumerate(words[1:], 1):
        if word == "-c":
            break
        if not word.startswith("-"):
            short[index] = os.path.basename(word)
            is_program = short[0].startswith("python") and index == 1 and "." not in short[1]
            short = short[1:] if is_program else short
            break
    return sanitize(" ".join(" ".join(short).split()), NAME_LIMIT) or None


def notebook() -> str | None:
    """Return the name of this kernel's notebook, or None if it is unknown.

    jupyter_server passes the path in an environment variable. VS Code sets a variable in the user's
    namespace, but only after the kernel has started, so the name is not cached.
    """
    main = sys.modules.get("__main__")
    path = getattr(main, "__vsc_ipynb_file__", None) or session_name(os.environ)
    return os.path.basename(str(path)) if path else None


def session_name(environ: Mapping[str, str]) -> str:
    """Return the path of the notebook for which a Jupyter server started a kernel.

    Programs that are started from a notebook, such as nbconvert and papermill, inherit
    JPY_SESSION_NAME and pass it on to their own kernels. So the variable is ignored if the process
    that started the kernel has the same value in its own environment.

    Args:
        environ: The kernel's environment variables.

    Returns:
        The path, or an empty string if the kernel was not started for a notebook.
    """
    path, starter = environ.get("JPY_SESSION_NAME", ""), environ.get("JPY_PARENT_PID", "")
    if path and starter.isdecimal() and environ_of(int(starter)).get("JPY_SESSION_NAME") == path:
        return ""
    return path


def environ_of(pid: int) -> dict[str, str]:
    """Return a process's initial environment variables, or an empty dict if they can't be read."""
    return dict(text.partition("=")[::2] for text in read_texts(pid, "environ"))


def read_texts(pid: int, name: str) -> list[str]:
    """Return the command line or environment with which a process was started.

    Args:
        pid: The process id.
        name: `cmdline` for the command line, or `environ` for the environment variables.

    Returns:
        The arguments or variables, or an empty list if they can't be read.
    """
    with suppress(OSError), open(f"/proc/{pid}/{name}", "rb") as file:
        return os.fsdecode(file.read(TEXTS_LIMIT)).removesuffix("\0").split("\0")
    return []


def job() -> str | None:
    """Return the id of the Slurm job that this process belongs to, or None outside of Slurm.

    The id of an array task has the form `4711_3`, as in `squeue` and `scancel`:
    https://slurm.schedmd.com/job_array.html
    """
    array, task = map(os.environ.get, ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"))
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID") or None


def application(module: str, name: str) -> Any:
    """Return the running instance of a traitlets application class, or None if there is none.

    Args:
        module: The name of the module that defines the class.
        name: The name of the class.
    """
    app_class = getattr(sys.modules.get(module), name, None)
    return app_class.instance() if app_class and app_class.initialized() else None


def _engine() -> str | None:
    """Return the display name of this ipyparallel engine, or None if this is not an engine."""
    engine = application("ipyparallel.engine.app", "IPEngine")
    if engine is None:
        return None
    cluster = f" of cluster {engine.cluster_id}" if engine.cluster_id else ""
    return sanitize(f"engine {'?' if engine.id is None else engine.id}{cluster}", NAME_LIMIT)


def working_directory() -> str | None:
    """Return the working directory, or None if it has been deleted."""
    with suppress(OSError):
        return os.getcwd()
    return None


def _below_home(path: str) -> str:
    """Abbreviate this user's home directory in a path, as in `~/thesis`."""
    home = settings.home()
    return f"~{path[len(home) :]}" if f"{path}/".startswith(f"{home}/") else path
