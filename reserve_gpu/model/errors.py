"""This package's errors and warnings, with the exit codes of `reserve-gpu`.

If a process that holds no GPU gets a `NoFreeDeviceError`, `CUDA_VISIBLE_DEVICES` is set to an empty
string, so that later code can't use another user's GPU. All other errors, including the subclass
`ReservedAboveError`, leave the environment variables unchanged. Exit codes of 64 and above follow
sysexits.h.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from reserve_gpu.model.untrusted import sanitize

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from reserve_gpu.model.holders import DeviceStatus

    class Reason(Protocol):
        """Explains why no reservation was made. `render/notices.py` defines these reasons."""

        def error(self, frontend: Any, /) -> ReserveGPUError:
            """Return the error, with hints in the frontend's syntax."""

    class Showable(Protocol):
        """A picture to display in a notebook. `str()` returns it as text."""

        @property
        def brief(self) -> str:
            """Return a one-line summary of the picture."""

        @property
        def is_watched(self) -> bool:
            """Return whether a person is reading this process's output."""

        def show(self, *, values: Mapping[str, Any] | None = None) -> None:
            """Display the picture in the current cell."""

        def to_text(self, stream: TextIO | None = None) -> str:
            """Return the picture as text for a terminal."""


VERSION = 1  # version of the JSON format for reservations and errors; fields are only added
CANNOT_RUN, NOT_FOUND, INTERRUPTED = 126, 127, 130  # the exit codes that shells use
REASON_LIMIT = 300  # maximum length of a reported reason, in characters
TOO_MANY_FILES = (
    "This process has almost no file descriptors left, so nothing was changed. Close some files, "
    "or raise the limit with ulimit -n."
)


class ReserveGPUError(Exception):
    """Base class for this package's errors. Each message also says what to do next.

    Attributes:
        exit_code: The exit code that `reserve-gpu` returns for this error.
        retry_after_s: The number of seconds to wait before retrying, or None if a retry is unlikely
            to succeed.
    """

    exit_code = 70  # EX_SOFTWARE
    retry_after_s: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the error as JSON-compatible data, in the format of docs/formats.md."""
        name = type(self).__name__.removesuffix("Error")
        return {
            "version": VERSION,
            "reason": "".join(f"_{c.lower()}" if c.isupper() else c for c in name)[1:],
            "exit_code": self.exit_code,
            "message": self.picture.brief if self.picture else str(self),
            "retry_after_s": self.retry_after_s,
            "next": [],
        }

    @property
    def picture(self) -> Showable | None:
        """Return the table that illustrates the error, or None if the error has only text."""
        return None

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows: the message, without a traceback."""
        return str(self).splitlines()


class RequestError(ReserveGPUError, ValueError):
    """The request is invalid or makes no sense on this machine."""

    exit_code = 2  # argparse's


class ImpossibleError(RequestError):
    """This machine could not satisfy the request even if every GPU were free."""


class NoVisibleDeviceError(ImpossibleError):
    """CUDA_VISIBLE_DEVICES was set outside this package and hides all of the machine's GPUs."""


class TooLateError(ReserveGPUError):
    """CUDA has already started in this process, so it ignores changes to environment variables."""


class NoFreeDeviceError(ReserveGPUError):
    """Every device that matches the request is reserved, is in use, or can't be read.

    The picture is drawn only when it is displayed, because programs that retry in a loop discard
    the error.

    Attributes:
        rows: The status of each device that was considered.
        picture: The table of the devices, or None if the error has only text.
    """

    exit_code = 75  # EX_TEMPFAIL

    def __init__(
        self,
        draw: Callable[[], Showable | str] | Showable | str,
        rows: Sequence[DeviceStatus] = (),
        values: Callable[[], dict[str, Any]] | dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self._values = values
        self.rows = tuple(rows)
        self._draw = draw
        self._is_shown = False

    def to_dict(self) -> dict[str, Any]:
        """Return the error as JSON-compatible data, with the devices and suggested commands."""
        return {**super().to_dict(), **self._seen}

    @cached_property
    def _seen(self) -> dict[str, Any]:
        return self._values() if callable(self._values) else self._values or {}

    @cached_property
    def _drawn(self) -> Showable | str:
        return self._draw() if callable(self._draw) else self._draw

    @property
    def picture(self) -> Showable | None:
        """Return the table of the devices, or None if the error has only text."""
        return None if isinstance(self._drawn, str) else self._drawn

    @property
    def args(self) -> tuple[Any, ...]:  # type: ignore[override]
        """Return a tuple that contains the message, as for other exceptions."""
        return (str(self),)

    def __str__(self) -> str:
        return str(self._drawn)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        notes = {name: value for name, value in vars(self).items() if name == "__notes__"}
        # The picture and the values describe this machine's current state, so compute them before
        # pickling.
        return type(self), (self._drawn, self.rows, self._seen), notes

    def _render_traceback_(self) -> list[str]:
        """Display the picture and return its one-line summary.

        A program that runs a notebook unattended only logs the returned lines. If no person is
        reading the output, the full text is therefore returned instead.
        """
        if self.picture is None or not self.picture.is_watched:
            return super()._render_traceback_()
        if not self._is_shown:  # IPython calls this a second time for its history
            self._is_shown = True
            self.picture.show(values=self.to_dict())
        return [self.picture.brief]


class WaitTimeoutError(NoFreeDeviceError):
    """The wait timed out before enough devices became available."""


class ReservedAboveError(NoFreeDeviceError):
    """A parent process has already reserved every GPU that this process can use."""


class DriverError(ReserveGPUError):
    """The NVIDIA driver or its Python bindings failed or did not respond."""

    exit_code = 69  # EX_UNAVAILABLE


class NoDriverError(DriverError):
    """The NVIDIA driver is missing, not running, or hidden from this process."""


class NoDeviceError(DriverError):
    """The NVIDIA driver is running, but this process can't see any GPUs."""


class LockError(ReserveGPUError):
    """The lock directory or one of its lock files can't be used."""

    exit_code = 78  # EX_CONFIG


class MutexHeldError(LockError):
    """Other processes have held the mutex for longer than a reservation should take."""

    exit_code = 75  # EX_TEMPFAIL
    retry_after_s = 5


class HistoryError(ReserveGPUError):
    """The reservation history can't be read or written."""

    exit_code = 78  # EX_CONFIG


class PackageError(ReserveGPUError):
    """The installed package was updated or removed while this process was running."""


class NoThreadError(ReserveGPUError):
    """This process can't start the thread that it needs to change a reservation safely."""

    exit_code = 71  # EX_OSERR


class CommandError(ReserveGPUError):
    """A command can't be found or can't be run, or its output can't be written."""

    def __init__(self, text: str, exit_code: int = CANNOT_RUN) -> None:
        super().__init__(text)
        self.exit_code = exit_code


class WaitInterrupted(KeyboardInterrupt):
    """Ctrl-C interrupted a wait or a check. The message describes the resulting state."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


# With --optional, the program continues without a GPU after any of these errors.
EXCUSED = (NoFreeDeviceError, ImpossibleError, DriverError, LockError)


class ReserveGPUWarning(UserWarning):
    """A reserved device is faulty or in use, or a rule limits the reservation."""


PROGRAM = "reserve-gpu"
# `runs_this_python` reads at most SCRIPT_HEAD bytes of a script. The second line
# of a script that `sh` starts begins with EXEC.
SCRIPT_HEAD, EXEC = 4096, "'''exec' "
COMMAND_LIMIT = 10_000  # maximum command length in characters: two long paths plus options
# Whether messages appear next to notebook cells even though this process does not run IPython. This
# applies to the Jupyter server and to a Jupyter kernel that is still starting.
shows_cell_syntax = False


def shell_line(line: str) -> str:
    """Return a shell command as the user would type it here, with a leading `!` in a cell."""
    ipython = sys.modules.get("IPython.core.getipython")
    is_in_cell = shows_cell_syntax or (ipython and ipython.get_ipython() is not None)
    return f"!{line}" if is_in_cell else line


def command_line(words: str, at: str = "") -> str:
    """Return a `reserve-gpu` command as the user would type it here.

    Args:
        words: The arguments after `reserve-gpu`.
        at: A prefix that runs the command on another machine, such as `ssh lab1 `. The other
            machine looks up `reserve-gpu` on its own PATH.
    """
    return shell_line(f"{at}{PROGRAM if at else program_command()} {words}")


def program_command() -> str:
    """Return the shell command that starts `reserve-gpu` with this Python.

    The name alone works only if the first `reserve-gpu` on PATH belongs to this Python. Jupyter
    also starts kernels from environments whose scripts are not on PATH, or come after another
    environment's scripts.
    """
    from shlex import quote
    from shutil import which

    # Skip relative PATH entries, because they depend on the shell's working directory.
    folders = [folder for folder in os.get_exec_path() if os.path.isabs(folder)]
    on_path = which(PROGRAM, path=os.pathsep.join(folders))
    if on_path and runs_this_python(on_path):
        return PROGRAM
    for path in (os.path.join(folder, PROGRAM) for folder in _script_folders()):
        if os.access(path, os.X_OK) and runs_this_python(path):
            return sanitize(quote(path), COMMAND_LIMIT)
    import sysconfig

    command = f"{quote(sys.executable or 'python3')} -m reserve_gpu"
    # A new Python process does not have the directories that a notebook added to its sys.path.
    home = os.path.abspath(f"{__file__}/../../..")
    importable = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), os.getcwd()}
    importable |= {sysconfig.get_path("purelib", "posix_user")} if os.name == "posix" else set()
    importable.update(os.environ.get("PYTHONPATH", "").split(os.pathsep))
    if os.path.realpath(home) not in map(os.path.realpath, filter(None, importable)):
        command = f"env PYTHONPATH={quote(home)} {command}"
    return sanitize(command, COMMAND_LIMIT)


def _script_folders() -> Iterator[str]:
    """Yield the directories in which installers place this Python's scripts."""
    yield os.path.dirname(sys.executable)
    import sysconfig  # slow to import, and not needed in a virtual environment

    yield sysconfig.get_path("scripts")
    if os.name == "posix":
        yield sysconfig.get_path("scripts", "posix_user")


def runs_this_python(script: str) -> bool:
    """Return whether a script runs with this Python, and not with another environment's.

    pip and uv normally write the interpreter's path into the first line of a script. If the path is
    long or contains a space, they write it into the second line, and `sh` runs that line.
    """
    with suppress(OSError, ValueError), open(script, "rb", opener=_open_at_once) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return False
        first, second, *_ = [*os.fsdecode(file.read(SCRIPT_HEAD)).splitlines(), "", ""]
        python = first.removeprefix("#!").strip().partition(" ")[0]
        if python == "/bin/sh" and second.startswith(EXEC):
            python = second.removeprefix(EXEC).rpartition(' "$0"')[0].strip("'\" ")
        folders = os.path.dirname(python), os.path.dirname(sys.executable)
        # The interpreters of different environments can be links to the same file, so also compare
        # their directories.
        return os.path.samefile(python, sys.executable) and os.path.samefile(*folders)
    return False


def _open_at_once(path: str, flags: int) -> int:
    """Open a file without blocking, even if it is a FIFO that has no writer."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def install_command(package: str, instead_of: str = "") -> str:
    """Return the pip or uv command that installs a package for this Python.

    uv creates environments without pip (https://docs.astral.sh/uv/pip/). `uv tool install --with`
    is not suggested, because it removes packages that were added by an earlier `--with`, possibly
    including this one.

    Args:
        package: The requirement specifier to install.
        instead_of: Packages to uninstall first, separated by spaces.
    """
    from importlib.util import find_spec
    from shlex import quote

    python = quote(sys.executable or "python3")
    if find_spec("pip") is None and _is_made_by_uv():
        install, uninstall = (
            f"uv pip {verb} --python {python}" for verb in ("install", "uninstall")
        )
    else:
        install, uninstall = f"{python} -m pip install", f"{python} -m pip uninstall -y"
    before = f"{uninstall} {instead_of} && " if instead_of else ""
    return sanitize(shell_line(f"{before}{install} {package}"), COMMAND_LIMIT)


def _is_made_by_uv() -> bool:
    path = os.path.join(sys.prefix, "pyvenv.cfg")
    with suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
        return any(line.partition("=")[0].strip() == "uv" for line in file)
    return False


def is_out_of_files(error: BaseException) -> bool:
    """Return whether this process or the machine has reached its limit on open files."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)


class Failure(Exception):  # noqa: N818 - `reason` creates the error
    """No reservation was made or changed. `reason` creates the error to show the user."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason = reason
