"""Explain why NVML's Python bindings can't be imported, and how to fix it.

To install them helps only if Python would look at the place of installed packages first. A file of
the same name in the notebook's folder, or in a folder of PYTHONPATH, comes before that.
"""

from __future__ import annotations

import os
import site
import sys
import sysconfig
from contextlib import suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING

from reserve_gpu.model import errors
from reserve_gpu.model.errors import COMMAND_LIMIT, REASON_LIMIT, DriverError
from reserve_gpu.model.untrusted import sanitize

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

NAME = "pynvml"
PACKAGES = "pynvml nvidia-ml-py3 nvidia-ml-py"  # each has a module of this name


def not_imported(error: BaseException) -> DriverError:
    """Return the error of bindings that can't be imported.

    Args:
        error: The exception that the import raised.
    """
    if path := _in_the_way(_file_of(None)):
        return _taken(path)
    if isinstance(error, SyntaxError):  # written for Python 2
        return _wrong()
    why = sanitize(str(error) or type(error).__name__, REASON_LIMIT)
    if path := next(filter(None, map(_in_the_way, _files(error))), None):
        where = sanitize(path, COMMAND_LIMIT)
        return DriverError(
            f"The module {NAME} can't be imported because of {where} ({why}). {_ways_out(path)}"
        )
    command = errors.install_command("nvidia-ml-py")
    return DriverError(f"The module {NAME} can't be imported ({why}). Run: {command}")


def not_official(module: ModuleType, *, is_new: bool) -> DriverError:
    """Return the error of a module of that name that is not nvidia-ml-py's.

    Args:
        module: The imported module.
        is_new: Whether nothing had imported it before. Then it is forgotten, so that the next
            import finds nvidia-ml-py's module once the file is out of the way.
    """
    if path := _in_the_way(_file_of(module)):
        if is_new:
            sys.modules.pop(NAME, None)
        return _taken(path, is_imported=not is_new)
    return _wrong()


def _taken(path: str, *, is_imported: bool = False) -> DriverError:
    then = " Then restart this process, which has imported it." if is_imported else ""
    return DriverError(
        f"{sanitize(path, COMMAND_LIMIT)} takes the place of the module {NAME} of nvidia-ml-py. "
        f"{_ways_out(path)}{then}"
    )


def _ways_out(path: str) -> str:
    """Return how to get a file out of the way."""
    listed = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    is_listed = os.path.dirname(path) in map(os.path.realpath, listed)
    return f"Rename it, or {'take its folder off PYTHONPATH' if is_listed else 'leave its folder'}."


def _wrong() -> DriverError:
    command = errors.install_command("nvidia-ml-py", instead_of=PACKAGES)
    return DriverError(f"The module {NAME} here is not the one of nvidia-ml-py. Run: {command}")


def _file_of(module: ModuleType | None) -> str | None:
    """Return the file or folder of a module, by default of the one that an import would find."""
    path = getattr(module, "__file__", None)
    if not isinstance(path, str):
        spec = getattr(module, "__spec__", None)
        with suppress(ImportError, ValueError, AttributeError):
            spec = spec or find_spec(NAME)
        places = list(spec.submodule_search_locations or ()) if spec else []
        path = places[0] if places else spec.origin if spec else None
    if not isinstance(path, str):
        return None
    folder, name = os.path.split(path)
    return folder if name.startswith("__init__.") else path


def _files(error: BaseException) -> Iterator[str]:
    """Yield the files whose code was running when an import failed, the innermost first."""
    if isinstance(error, SyntaxError) and error.filename:
        yield error.filename
    frames, trace = [], error.__traceback__
    while trace:
        frames.append(trace.tb_frame.f_code.co_filename)
        trace = trace.tb_next
    yield from (name for name in reversed(frames) if os.path.isabs(name))


def _in_the_way(file: str | None) -> str | None:
    """Return the path of a file that Python finds before installed packages, else None."""
    with suppress(OSError):  # the current folder was deleted
        return _before_installed(file) if file else None
    return None


def _before_installed(file: str) -> str | None:
    # A file in an environment may be a link to one elsewhere; its folder decides.
    folder, name = os.path.split(os.path.abspath(file))
    folder = os.path.realpath(folder)
    path = os.path.join(folder, name)
    installed = [*map(os.path.realpath, _installed())]
    standard = (os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))
    ours = os.path.realpath(os.path.dirname(os.path.dirname(__file__)))
    if any(path.startswith(f"{each}{os.sep}") for each in (*installed, *standard, ours)):
        return None
    searched = [os.path.realpath(entry) for entry in sys.path]  # '' is the current folder
    before = [searched.index(place) for place in installed if place in searched]
    if folder in searched and before and searched.index(folder) > min(before):
        return None
    return path


def _installed() -> list[str]:
    """Return the folders into which packages of this Python are installed."""
    folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    if site.ENABLE_USER_SITE:
        folders.append(site.getusersitepackages())
    return [*folders, *getattr(site, "getsitepackages", list)()]
