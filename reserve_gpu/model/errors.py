"""The errors and warnings of this package, with their exit codes.

Only `NoFreeDeviceError` changes a variable: it leaves `CUDA_VISIBLE_DEVICES` empty, so that
later code can't use another user's device. `ReservedAboveError` is one, and changes nothing.
Exit codes are those of `reserve-gpu`; from 64 on they have the meaning of sysexits.h.
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
    from collections.abc import Callable, Mapping, Sequence

    from reserve_gpu.model.holders import DeviceStatus

    class Reason(Protocol):
        """Why nothing was reserved: a class of `render/notices.py`."""

        def error(self, frontend: Any, /) -> ReserveGPUError:
            """Return the error, with hints as they are typed in this frontend."""

    class Showable(Protocol):
        """What can be shown in a notebook; its text is the whole of it."""

        @property
        def brief(self) -> str:
            """Return what happened, in one line."""

        @property
        def is_watched(self) -> bool:
            """Tell whether somebody looks at this IPython."""

        def show(self, *, has_head: bool = True, values: Mapping[str, Any] | None = None) -> None:
            """Show it as what a cell displays."""

        def to_text(self, stream: TextIO | None = None) -> str:
            """Return how it looks in a terminal."""


VERSION = 1  # of what programs read of a reservation, or of an error; names are only ever added
REASON_LIMIT = 300  # characters of what the driver or the system says
TOO_MANY_FILES = (
    "This process has hardly a file descriptor left, so nothing was changed. Close files, or raise "
    "its limit: ulimit -n."
)


class ReserveGPUError(Exception):
    """A reservation that could not be made; its text says what happened and what to do next."""

    exit_code = 70  # EX_SOFTWARE
    retry_after_s: int | None = None  # None: to ask again is no use, for all that is known

    def to_dict(self) -> dict[str, Any]:
        """Return what programs read, in the shape that docs/formats.md describes."""
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
        """Return all of that, to be shown, where it is more than a text."""
        return None

    def _render_traceback_(self) -> list[str]:
        """Let IPython show the text alone: where in our code it was raised helps nobody."""
        return str(self).splitlines()


class RequestError(ReserveGPUError, ValueError):
    """The request can't be understood, or means nothing on this machine."""

    exit_code = 2  # argparse's


class ImpossibleError(RequestError):
    """The request asks for more than this machine has, whoever uses it."""


class NoVisibleDeviceError(ImpossibleError):
    """CUDA_VISIBLE_DEVICES was set outside of this package, and hides every GPU of the machine."""


class TooLateError(ReserveGPUError):
    """CUDA has started in this process and will not read the variables again."""


class NoFreeDeviceError(ReserveGPUError):
    """Every device that would do is reserved, in use or unreadable.

    rows: one for each device that was looked at. The picture is drawn when somebody wants to see
    it: a program that asks again and again only catches the error.
    """

    exit_code = 75  # EX_TEMPFAIL

    def __init__(
        self,
        draw: Callable[[], Showable] | Showable | str,
        rows: Sequence[DeviceStatus] = (),
        values: Callable[[], dict[str, Any]] | dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self._values = values
        self.rows = tuple(rows)
        self._draw = draw
        self._is_shown = False

    def to_dict(self) -> dict[str, Any]:
        """Return what the picture says, device by device, and what may be typed next."""
        return {**super().to_dict(), **self._seen}

    @cached_property
    def _seen(self) -> dict[str, Any]:
        return self._values() if callable(self._values) else self._values or {}

    @cached_property
    def picture(self) -> Showable | None:
        """Return all of it, to be shown, None where there is only a text."""
        drawn = self._draw() if callable(self._draw) else self._draw
        return None if isinstance(drawn, str) else drawn

    @property
    def args(self) -> tuple[Any, ...]:  # type: ignore[override]
        """Return the text, as other exceptions have it there."""
        return (str(self),)

    def __str__(self) -> str:
        return str(self.picture or self._draw)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        notes = {name: value for name, value in vars(self).items() if name == "__notes__"}
        # On this machine, at this moment.
        return type(self), (self.picture or str(self), self.rows, self._seen), notes

    def _render_traceback_(self) -> list[str]:
        """Let IPython show the picture, and as the error itself what happened, in one line.

        What runs a notebook unattended logs nothing but the error, so there it has all of it.
        """
        if self.picture is None:
            return super()._render_traceback_()
        if not self.picture.is_watched:
            return [*str(self).splitlines()[1:], self.picture.brief]
        if not self._is_shown:  # IPython asks twice, the second time for its history
            self._is_shown = True
            self.picture.show(has_head=False, values=self.to_dict())
        return [self.picture.brief]


class WaitTimeoutError(NoFreeDeviceError):
    """The time that was allowed for waiting has passed."""


class ReservedAboveError(NoFreeDeviceError):
    """A process above this one has reserved all that this one may use."""


class DriverError(ReserveGPUError):
    """The NVIDIA driver, or the Python module that talks to it, does not answer."""

    exit_code = 69  # EX_UNAVAILABLE


class NoDriverError(DriverError):
    """This machine has no NVIDIA driver, it is not running, or it is hidden."""


class NoDeviceError(DriverError):
    """The NVIDIA driver is here, but it shows no GPU to this process."""


class LockError(ReserveGPUError):
    """The directory of the locks, or a lock in it, can't be used."""

    exit_code = 78  # EX_CONFIG


class MutexHeldError(LockError):
    """Other processes have been reserving for longer than that can take."""

    exit_code = 75  # EX_TEMPFAIL
    retry_after_s = 5


class HistoryError(ReserveGPUError):
    """The history can't be written or read."""

    exit_code = 78  # EX_CONFIG


class PackageError(ReserveGPUError):
    """The installed package was updated or removed under this process."""


class NoThreadError(ReserveGPUError):
    """This process may start no thread, without which nothing can be changed safely."""

    exit_code = 71  # EX_OSERR


class WaitInterrupted(KeyboardInterrupt):
    """Ctrl-C during a wait or a check of the magic. Its text describes the state after that."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


# What --optional lets pass.
EXCUSED = (NoFreeDeviceError, ImpossibleError, DriverError, LockError)


class ReserveGPUWarning(UserWarning):
    """A reserved device has a fault, or others use it."""


PROGRAM = "reserve-gpu"
SCRIPT_HEAD, EXEC = 4096, "'''exec' "  # bytes to read of a script; the start of its second line
COMMAND_LIMIT = 10_000  # characters: two paths of the greatest length, and some words
is_beside_cells = False  # in JupyterLab's server, and until a kernel has started


def shell_line(line: str) -> str:
    """Return a line for a shell as it is typed where it is read: behind `!` in a cell."""
    ipython = sys.modules.get("IPython.core.getipython")
    is_in_cell = is_beside_cells or (ipython and ipython.get_ipython() is not None)
    return f"!{line}" if is_in_cell else line


def own_line(words: str, at: str = "") -> str:
    """Return a line of `reserve-gpu` as it is typed where it is read.

    Args:
        words: What follows `reserve-gpu`.
        at: The text before it that runs it on another machine, such as `ssh lab1 `. That
            machine finds it on its own PATH.
    """
    return shell_line(f"{at}{PROGRAM if at else own_command()} {words}")


def own_command() -> str:
    """Return the command that starts the `reserve-gpu` of this Python in a shell.

    The name alone works only if PATH leads to the script of this Python. Jupyter also starts
    kernels of environments whose scripts are not on PATH, or are hidden by another environment.
    """
    import sysconfig
    from shlex import quote
    from shutil import which

    # A shell that reaches a relative entry would run a file of the working directory.
    folders = [folder for folder in os.get_exec_path() if os.path.isabs(folder)]
    on_path = which(PROGRAM, path=os.pathsep.join(folders))
    if on_path and _runs_this_python(on_path):
        return PROGRAM
    folders = [os.path.dirname(sys.executable), sysconfig.get_path("scripts")]
    folders += [sysconfig.get_path("scripts", "posix_user")] if os.name == "posix" else []
    for path in (os.path.join(folder, PROGRAM) for folder in folders):
        if os.access(path, os.X_OK) and _runs_this_python(path):
            return sanitize(quote(path), COMMAND_LIMIT)
    command = f"{quote(sys.executable or 'python3')} -m reserve_gpu"
    # A new Python does not know the folders that a notebook has added to its sys.path.
    home = os.path.abspath(f"{__file__}/../../..")
    known = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), os.getcwd()}
    known |= {sysconfig.get_path("purelib", "posix_user")} if os.name == "posix" else set()
    known.update(os.environ.get("PYTHONPATH", "").split(os.pathsep))
    if os.path.realpath(home) not in map(os.path.realpath, filter(None, known)):
        command = f"env PYTHONPATH={quote(home)} {command}"
    return sanitize(command, COMMAND_LIMIT)


def _runs_this_python(script: str) -> bool:
    """Return whether a script that pip or uv has written starts this very Python.

    Other environments have a script of the same name. Installers write a long path, or one with
    a space, into the second line, for `sh`.
    """
    with suppress(OSError, ValueError), open(script, "rb", opener=_open_at_once) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return False
        first, second, *_ = [*os.fsdecode(file.read(SCRIPT_HEAD)).splitlines(), "", ""]
        python = first.removeprefix("#!").strip().partition(" ")[0]
        if python == "/bin/sh" and second.startswith(EXEC):
            python = second.removeprefix(EXEC).rpartition(' "$0"')[0].strip("'\" ")
        folders = os.path.dirname(python), os.path.dirname(sys.executable)
        # The Pythons of several environments are links to one file.
        return os.path.samefile(python, sys.executable) and os.path.samefile(*folders)
    return False


def _open_at_once(path: str, flags: int) -> int:
    """Open a file, and do not wait for the writer of a FIFO. Raises OSError."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def install_command(package: str, instead_of: str = "") -> str:
    """Return the command that installs a package for this Python, whatever made its environment.

    instead_of: packages to uninstall before.

    uv (https://docs.astral.sh/uv/pip/) makes environments without pip. In one of `uv tool`, `uv
    tool install --with` would drop what was added by an earlier --with, which may be this package.
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
    """Return whether an error says that no more files can be opened, here or on this machine."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)


class Failure(Exception):  # noqa: N818 - its reason makes the error
    """Nothing was reserved or changed; the reason makes the error for a frontend."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason = reason
