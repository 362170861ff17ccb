"""Report whether a kernel loads reserve_gpu, or which line of the configuration prevents it.

install.sh runs this file with the Python that it installs into, which may lack everything but the
standard library, IPython and ipykernel.
"""

from __future__ import annotations

import os
import signal
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Iterator

NO_KERNELS = "no kernels"
LOADED = "loaded"
LIMIT_S = 120


def answer(kind: str, connection_file: str) -> str:
    """Return LOADED, NO_KERNELS, or the setting at fault; empty if it finds none.

    Args:
        kind: `kernel` starts one. `terminal` reads the configuration of a terminal's IPython.
            `appends` reads both for an append that does not go together with that of install.sh.
        connection_file: Path of the kernel's connection file, which it writes.
    """
    if kind != "terminal" and find_spec("ipykernel"):
        from ipykernel.kernelapp import IPKernelApp

        app: Any = IPKernelApp.instance()
        if kind == "kernel":
            app.initialize(["-f", connection_file])
            is_loaded = app.shell.find_line_magic("reserve_gpu")
            return LOADED if is_loaded else replacing_setting(app)
        if found := appending_setting(app):
            return found
    elif kind == "kernel":
        return NO_KERNELS
    from IPython.terminal.ipapp import TerminalIPythonApp

    terminal = cast("Any", TerminalIPythonApp)()
    return replacing_setting(terminal) if kind == "terminal" else appending_setting(terminal)


def appending_setting(app: Any) -> str:
    """Return an append outside of InteractiveShellApp and its replacement; empty if it finds none.

    If there is one in each, traitlets makes both share one list and doubles it with each file that
    it merges (LazyConfigValue.merge_into): the program takes minutes and gigabytes to start.
    """
    from traitlets.config.loader import LazyConfigValue

    for section, setting, extensions in settings(app):
        if section != "InteractiveShellApp" and isinstance(extensions, LazyConfigValue):
            return f"{setting} appends too; write c.InteractiveShellApp.extensions there instead"
    return ""


def replacing_setting(app: Any) -> str:
    """Return an assignment that replaces the extensions, and the fix; empty if it finds none."""
    from traitlets.config.loader import LazyConfigValue

    found = ""
    for _, setting, extensions in settings(app):
        if not isinstance(extensions, LazyConfigValue):
            found = "" if "reserve_gpu" in extensions else setting
    return found and f'the extensions are replaced by {found}; add "reserve_gpu" to that list'


def settings(app: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield the section, the name with its file, and the value of each list of extensions.

    A later section overrides an earlier one, in whatever file; a later file an earlier one.
    """
    app.init_profile_dir()
    app.init_config_files()
    names = dict.fromkeys(["ipython_config", *(Path(name).stem for name in app.config_files)])
    folders = [*map(Path, reversed(app.config_file_paths))]
    files = [
        folder / f"{name}{suffix}"
        for name in names
        for folder in folders
        for suffix in (".py", ".json")
    ]
    loaded = [(file, read(app, file)) for file in files if file.exists()]
    for section in app.section_names():
        for file, values in loaded:
            if "extensions" in values.get(section, {}):
                start = "c." if file.suffix == ".py" else ""
                name = f"{start}{section}.extensions in {file}"
                yield section, name, values[section]["extensions"]


def read(app: Any, file: Path) -> dict[str, Any]:
    """Return the sections of one configuration file; none if it fails."""
    loaders = app.python_config_loader_class, app.json_config_loader_class
    try:
        loaded: dict[str, Any] = loaders[file.suffix == ".json"](
            file.name, path=str(file.parent)
        ).load_config()
    except Exception:  # noqa: BLE001 - IPython has reported it
        return {}
    return loaded


def main() -> None:
    """Write the answer to the file that the command line names."""
    signal.alarm(LIMIT_S)
    kind, output = sys.argv[1:]
    del sys.path[0]  # this folder is not a kernel's
    text = answer(kind, f"{output}.json")
    Path(output).write_text(text, encoding="utf-8", errors="surrogateescape")
    sys.stderr.flush()
    os._exit(0)  # a kernel's threads go on otherwise


if __name__ == "__main__":
    main()
