"""IPython's configuration file: where it is, whether it can be written, adding and taking back."""

from __future__ import annotations

import itertools
import os
import shutil
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

from reserve_gpu import autoload

if TYPE_CHECKING:
    from collections.abc import Iterator


class InstallError(Exception):
    """install.sh can't go on; the text says why, and what to do."""


def config_path() -> str:
    """Return where IPython looks, existing or not.

    The rules are those of IPython.paths.get_ipython_dir, which makes folders when it is asked.
    """
    folder = os.environ.get("IPYTHONDIR")
    if folder is None:
        home = os.path.realpath(os.path.expanduser("~"))
        folder = os.path.join(home, ".ipython")
        xdg = os.environ.get("XDG_CONFIG_HOME") or os.path.join(home, ".config")
        old = os.path.join(xdg, "ipython")
        is_usable = _can_write_in(xdg) and _can_write_in(old) and not os.path.islink(old)
        if is_usable and not os.path.exists(folder):
            folder = old
    folder = os.path.expanduser(folder)
    return os.path.abspath(os.path.join(folder, "profile_default", "ipython_config.py"))


def check_add(path: str) -> None:
    """Raise InstallError where the lines are missing and can't be added."""
    if os.path.isfile(path):
        if not os.access(path, os.R_OK) or not autoload.loading_line(_read(path)):
            _check_change(path)
    elif os.path.lexists(path):
        _check_link(path)
    else:
        _check_folders(path)


def check_remove(path: str) -> None:
    """Raise InstallError where the lines are in the file and can't be taken out."""
    if os.path.isfile(path):
        data = _read(path) if os.access(path, os.R_OK) else None
        if data is None or autoload.without(data).data != data:
            _check_change(path)


def add(path: str) -> str:
    """Let IPython load the extension at every start; return a line that says where."""
    said = "Loaded at every start of IPython by"
    if not os.path.exists(path):
        _create(path)
        return f"{said} {path} (a new file)"
    data = _read(path)
    if line := autoload.loading_line(data):
        return f"{said} line {line} of {path}, as before"
    copy = _append(path, data)
    return f"{said} the end of {path} (backup: {os.path.basename(copy)})"


def remove(path: str) -> None:
    """Take back what was added, and say so.

    Raises:
        InstallError: The lines have been edited since, and stay.
    """
    if not os.path.isfile(path):
        print(f"Nothing to take out: there is no file {path}")
        return
    data = _read(path)
    rest = autoload.without(data)
    if rest.data == data:
        print(f"Nothing to take out of {path}")
    elif rest.is_all_ours:
        _delete(path, rest.folders)
        print(f"Removed {path}, which held nothing else")
    else:
        _write_rest(path, rest.data)
        print(f"Taken out of {path}; the rest of it is as it was")
    if line := autoload.marked_line(rest.data):
        raise InstallError(
            f"the lines added at line {line} of {path} have been edited since and stay; "
            f"remove them by hand"
        )
    if line := autoload.loading_line(rest.data):
        print(f"Left as it is: line {line} of {path}, which loads reserve_gpu and is your own")


def _check_change(path: str) -> None:
    # In the folder, as a copy goes beside the file.
    folder = os.path.dirname(path)
    for place, access in ((path, os.R_OK | os.W_OK), (folder, os.W_OK | os.X_OK)):
        if not os.access(place, access):
            raise InstallError(f"no permission to change {place}")


def _check_link(path: str) -> None:
    """Let pass only a link to a file that does not exist yet, but can be made."""
    if os.path.exists(path):
        raise InstallError(f"{path} is not a file, so nothing can be added to it")
    target = os.path.realpath(path)
    if os.path.lexists(target) or not os.path.isdir(os.path.dirname(target)):
        raise InstallError(f"{path} is a symbolic link that leads nowhere; remove it or mend it")
    if not _can_write_in(os.path.dirname(target)):
        raise InstallError(f"no permission to change {os.path.dirname(target)}")


def _check_folders(path: str) -> None:
    ipython, profile = _folders_of(path)
    other = "IPYTHONDIR names another place"
    for folder in (profile, ipython, os.path.dirname(ipython)):
        if os.path.isdir(folder):
            if not _can_write_in(folder):
                raise InstallError(
                    f"no permission to write in {folder}, where {path} belongs; {other}"
                )
            return
        if os.path.lexists(folder):
            raise InstallError(f"{folder} is not a folder, so {path} cannot be made")
    raise InstallError(
        f"there is no folder {os.path.dirname(ipython)}, where {path} belongs; {other}"
    )


def _create(path: str) -> None:
    with ExitStack() as undo:
        missing = [folder for folder in _folders_of(path) if not os.path.isdir(folder)]
        for folder in missing:
            os.mkdir(folder)
            undo.callback(os.rmdir, folder)
        target = os.path.realpath(path)
        with open(target, "xb") as file:
            undo.callback(os.remove, target)
            file.write(autoload.new_file(len(missing)))
        undo.pop_all()


def _append(path: str, data: bytes) -> str:
    """Write behind what is there, through links, and touch nothing of it; return the backup."""
    lines = autoload.behind(data)
    with open(path, "r+b", buffering=0) as file, ExitStack() as undo:
        copy = _back_up(path, data, undo)
        undo.callback(file.truncate, file.seek(0, os.SEEK_END))
        if file.write(lines) < len(lines):
            raise InstallError(f"no room for {len(lines)} bytes more in {path}")
        undo.pop_all()
    return copy


def _back_up(path: str, data: bytes, undo: ExitStack) -> str:
    """Keep a copy beside the file, in a place where nothing else is; return where."""
    copy = next(c for c in _backups(path) if not os.path.lexists(c) or _holds(c, data))
    if not os.path.lexists(copy):
        with open(copy, "xb", opener=_private) as file:
            undo.callback(os.remove, copy)
            file.write(data)
        shutil.copystat(path, copy)
    return copy


def _delete(path: str, folders: int) -> None:
    """Remove the file and the folders that were made for it, where nothing else is in them."""
    os.remove(os.path.realpath(path))
    for folder in _folders_of(path)[::-1][:folders]:
        with suppress(OSError):
            os.rmdir(folder)


def _write_rest(path: str, rest: bytes) -> None:
    with open(path, "r+b") as file:
        file.write(rest)
        file.truncate()
    for copy in itertools.takewhile(os.path.lexists, _backups(path)):
        if _holds(copy, rest):
            os.remove(copy)


def _backups(path: str) -> Iterator[str]:
    yield f"{path}.before-reserve_gpu"
    for number in itertools.count(2):
        yield f"{path}.before-reserve_gpu.{number}"


def _holds(path: str, data: bytes) -> bool:
    """Tell whether this is a file with just these bytes, and one that can be read."""
    try:
        return os.path.isfile(path) and _read(path) == data
    except OSError:
        return False


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _folders_of(path: str) -> tuple[str, str]:
    """Return IPython's folder, and the profile's in it."""
    profile = os.path.dirname(path)
    return os.path.dirname(profile), profile


def _can_write_in(folder: str) -> bool:
    return os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)
