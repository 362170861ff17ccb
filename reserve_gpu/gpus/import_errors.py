"""Error messages that explain why NVML's Python bindings can't be imported, and how to fix this.

A file with the bindings' name in the notebook's folder, or in a folder on PYTHONPATH, takes
precedence over installed packages. In that case, installing the bindings does not help.
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
PACKAGES = "pynvml nvidia-ml-py3 nvidia-ml-py"  # packages that contain a module with this name


def not_imported(error: BaseException) -> DriverError:
    """Return the error for bindings that can't be imported.

    Args:
        error: The exception that the import raised.
    """
    if path := _shadowing_file(_file_of(None)):
        return _shadowed(path)
    if isinstance(error, SyntaxError):  # the module is written for Python 2
        return _wrong_module()
    reason = sanitize(str(error) or type(error).__name__, REASON_LIMIT)
    if path := next(filter(None, map(_shadowing_file, _files(error))), None):
        file = sanitize(path, COMMAND_LIMIT)
        return DriverError(
            f"The module {NAME} can't be imported because of {file} ({reason}). {_remedy(path)}"
        )
    command = errors.install_command("nvidia-ml-py")
    return DriverError(f"The module {NAME} can't be imported ({reason}). Run: {command}")


def not_official(module: ModuleType, *, is_new: bool) -> DriverError:
    """Return the error for a `pynvml` module that does not come from nvidia-ml-py.

    Args:
        module: The imported module.
        is_new: Whether this package was the first to import the module. If it was, and the module's
            file shadows the bindings, the module is removed from `sys.modules`. A later import can
            then find the bindings.
    """
    if path := _shadowing_file(_file_of(module)):
        if is_new:
            sys.modules.pop(NAME, None)
        return _shadowed(path, is_imported=not is_new)
    return _wrong_module()


def _shadowed(path: str, *, is_imported: bool = False) -> DriverError:
    restart = " Then restart this process, which has already imported it." if is_imported else ""
    return DriverError(
        f"{sanitize(path, COMMAND_LIMIT)} shadows the module {NAME} of nvidia-ml-py. "
        f"{_remedy(path)}{restart}"
    )


def _remedy(path: str) -> str:
    """Return advice on how to stop this file from shadowing the bindings."""
    listed = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    is_listed = os.path.dirname(path) in map(os.path.realpath, listed)
    alternative = "remove its folder from PYTHONPATH" if is_listed else "work in another folder"
    return f"Rename it, or {alternative}."


def _wrong_module() -> DriverError:
    command = errors.install_command("nvidia-ml-py", instead_of=PACKAGES)
    return DriverError(f"The installed module {NAME} is not nvidia-ml-py's. Run: {command}")


def _file_of(module: ModuleType | None) -> str | None:
    """Return a module's path. For None, return the path of the `pynvml` that would be imported."""
    path = getattr(module, "__file__", None)
    if not isinstance(path, str):
        spec = getattr(module, "__spec__", None)
        with suppress(ImportError, ValueError, AttributeError):
            spec = spec or find_spec(NAME)
        locations = list(spec.submodule_search_locations or ()) if spec else []
        path = locations[0] if locations else spec.origin if spec else None
    if not isinstance(path, str):
        return None
    folder, name = os.path.split(path)
    return folder if name.startswith("__init__.") else path


def _files(error: BaseException) -> Iterator[str]:
    """Yield the files whose code was running when an import failed, innermost first."""
    if isinstance(error, SyntaxError) and error.filename:
        yield error.filename
    frames, trace = [], error.__traceback__
    while trace:
        frames.append(trace.tb_frame.f_code.co_filename)
        trace = trace.tb_next
    yield from (name for name in reversed(frames) if os.path.isabs(name))


def _shadowing_file(file: str | None) -> str | None:
    """Return the file's path if it takes precedence over installed packages, else None."""
    with suppress(OSError):  # the current folder has been deleted
        return _before_installed(file) if file else None
    return None


def _before_installed(file: str) -> str | None:
    # Resolve only the folder, because an installed file might be a link to another location.
    folder, name = os.path.split(os.path.abspath(file))
    folder = os.path.realpath(folder)
    path = os.path.join(folder, name)
    installed = [*map(os.path.realpath, _installed())]
    standard = (os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))
    package = os.path.realpath(os.path.dirname(os.path.dirname(__file__)))
    if any(path.startswith(f"{each}{os.sep}") for each in (*installed, *standard, package)):
        return None
    searched = [os.path.realpath(entry) for entry in sys.path]  # '' is the current folder
    positions = [searched.index(each) for each in installed if each in searched]
    if folder in searched and positions and searched.index(folder) > min(positions):
        return None
    return path


def _installed() -> list[str]:
    """Return the folders where this Python's packages are installed."""
    folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    if site.ENABLE_USER_SITE:
        folders.append(site.getusersitepackages())
    return [*folders, *getattr(site, "getsitepackages", list)()]
