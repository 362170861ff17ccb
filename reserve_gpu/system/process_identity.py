"""What this process is called: its notebook, its command, or the name that it was given."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from reserve_gpu.model.untrusted import sanitize
from reserve_gpu.system import settings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

NAME_LIMIT = 200  # characters of a command, or of what a process is called in its place
TEXTS_LIMIT = 1 << 20  # bytes of a command, or of an environment
RAY = b"ray::"  # what Ray has in front of the titles of its processes
KERNEL_MODULE = "ipykernel_launcher"  # what Jupyter starts a kernel with: python -m ...
_name: str | None = None  # what this process is called in place of its own command


def title() -> str | None:
    """Return what this process is called in place of its command, None if nothing is set."""
    return _name or _engine()


def own_command() -> str | None:
    """Return the command that this process runs, in short; of a Ray worker what Ray calls it."""
    words = sys.orig_argv
    with suppress(OSError), open("/proc/self/cmdline", "rb") as file:
        if (title := file.read(NAME_LIMIT).rstrip(b"\0 ")).startswith(RAY):
            words = [title.decode(errors="replace")]
    return command(words, working_directory())


def call_it(name: str) -> None:
    """Let others read that name of this process in place of its own command."""
    global _name
    _name = sanitize(name, NAME_LIMIT)


def command(words: Sequence[str], directory: str | None = None) -> str | None:
    """Shorten a command: base names of the program and its script, and the arguments.

    `python train.py --epochs 3`; `ipython` where Python only runs a program; `kernel in ~/thesis`,
    as the arguments of a Jupyter kernel tell nobody anything. None without words.
    directory: in which it runs, where that is known.
    """
    if KERNEL_MODULE in words:
        return sanitize(
            f"kernel in {_below_home(directory)}" if directory else "kernel", NAME_LIMIT
        )
    # What is no path is a title that the process has given itself, as `ray::train /data`.
    short = [word if " " in word else os.path.basename(word) for word in words[:1]] + [*words[1:]]
    for place, word in enumerate(words[1:], 1):
        if word == "-c":
            break
        if not word.startswith("-"):
            short[place] = os.path.basename(word)
            is_program = short[0].startswith("python") and place == 1 and "." not in short[1]
            short = short[1:] if is_program else short
            break
    return sanitize(" ".join(" ".join(short).split()), NAME_LIMIT) or None


def notebook() -> str | None:
    """Return the name of this kernel's notebook, None if it is not known (yet).

    VS Code sets a variable in the user's namespace after the kernel has started; jupyter_server
    sets an environment variable. So it is asked for when it is needed, and not kept.
    """
    main = sys.modules.get("__main__")
    path = getattr(main, "__vsc_ipynb_file__", None) or session_name(os.environ)
    return os.path.basename(str(path)) if path else None


def session_name(environ: Mapping[str, str]) -> str:
    """Return the path of the notebook that Jupyter's server has started a kernel for.

    Programs that a notebook starts, such as nbconvert and papermill, inherit the variable and pass
    it on to their own kernels. So it does not count if the process that started the kernel was
    itself started with the same value.

    Args:
        environ: The environment of the kernel.

    Returns:
        The path, or "" if the kernel has no notebook of its own.
    """
    path, starter = environ.get("JPY_SESSION_NAME", ""), environ.get("JPY_PARENT_PID", "")
    if starter.isdecimal() and environ_of(int(starter)).get("JPY_SESSION_NAME") == path:
        return ""
    return path


def environ_of(pid: int) -> dict[str, str]:
    """Return the variables that a process was started with; empty if they can't be read."""
    return dict(text.partition("=")[::2] for text in texts(pid, "environ"))


def texts(pid: int, name: str) -> list[str]:
    """Return the words that a process was started with; empty if they can't be read.

    Args:
        pid: The process.
        name: `cmdline` for its command, `environ` for its variables.
    """
    with suppress(OSError), open(f"/proc/{pid}/{name}", "rb") as file:
        return os.fsdecode(file.read(TEXTS_LIMIT)).removesuffix("\0").split("\0")
    return []


def job() -> str | None:
    """Return the number of Slurm's job that this process is a part of, None if it is of none.

    That of an array has the number of its task: `4711_3`, as `squeue` and `scancel` have it.
    https://slurm.schedmd.com/job_array.html
    """
    array, task = map(os.environ.get, ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"))
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID") or None


def application(module: str, name: str) -> Any:
    """Return the application of that module which this process is, None if it is none."""
    kind = getattr(sys.modules.get(module), name, None)
    return kind.instance() if kind and kind.initialized() else None


def _engine() -> str | None:
    """Return the number and cluster of this engine of ipyparallel's, None if it is none."""
    engine = application("ipyparallel.engine.app", "IPEngine")
    if engine is None:
        return None
    cluster = f" of cluster {engine.cluster_id}" if engine.cluster_id else ""
    return sanitize(f"engine {'?' if engine.id is None else engine.id}{cluster}", NAME_LIMIT)


def working_directory() -> str | None:
    """Return the working directory, None if it is gone."""
    with suppress(OSError):
        return os.getcwd()
    return None


def _below_home(path: str) -> str:
    """Shorten a path in this user's home to `~/thesis`."""
    home = settings.home()
    return f"~{path[len(home) :]}" if f"{path}/".startswith(f"{home}/") else path
