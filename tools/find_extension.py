"""Check whether IPython loads reserve_gpu, and find any setting that prevents this.

install.sh runs this file with the Python into which it installs reserve_gpu. That Python might have
no packages except IPython and its dependencies.
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
LIMIT_S = 120  # seconds until SIGALRM ends this process


def answer(kind: str, connection_file: str) -> str:
    """Return LOADED, NO_KERNELS, or advice about a setting that conflicts with reserve_gpu.

    If the extension is not loaded and no setting conflicts with it, the result is empty.

    Args:
        kind: The check to perform. `kernel` initializes a Jupyter kernel. `terminal` reads the
            configuration of IPython in a terminal. `appends` looks in both configurations for an
            `append` call that conflicts with the one that install.sh writes.
        connection_file: The path to which the kernel writes its connection file.
    """
    if kind != "terminal" and find_spec("ipykernel"):
        from ipykernel.kernelapp import IPKernelApp

        app: Any = IPKernelApp.instance()
        if kind == "kernel":
            app.initialize(["-f", connection_file])
            is_loaded = app.shell.find_line_magic("reserve_gpu")
            return LOADED if is_loaded else replacing_setting(app)
        if setting := appending_setting(app):
            return setting
    elif kind == "kernel":
        return NO_KERNELS
    from IPython.terminal.ipapp import TerminalIPythonApp

    terminal = cast("Any", TerminalIPythonApp)()
    return replacing_setting(terminal) if kind == "terminal" else appending_setting(terminal)


def appending_setting(app: Any) -> str:
    """Return advice about `append` calls in configuration sections other than InteractiveShellApp.

    If two sections append to the extensions, traitlets makes them share one list, and doubles the
    list with each file that it merges (LazyConfigValue.merge_into). IPython then takes minutes and
    gigabytes of memory to start.
    """
    from traitlets.config.loader import LazyConfigValue

    for section, setting, extensions in settings(app):
        if section != "InteractiveShellApp" and isinstance(extensions, LazyConfigValue):
            return f"{setting} also appends; use c.InteractiveShellApp.extensions there instead"
    return ""


def replacing_setting(app: Any) -> str:
    """Return advice about an assignment that replaces the list of extensions.

    The result is empty if there is no such assignment.
    """
    from traitlets.config.loader import LazyConfigValue

    replacing = ""
    for _, setting, extensions in settings(app):
        if not isinstance(extensions, LazyConfigValue):
            replacing = "" if "reserve_gpu" in extensions else setting
    return (
        replacing and f'the extensions are replaced by {replacing}; add "reserve_gpu" to that list'
    )


def settings(app: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield the section, description and value of each setting that loads extensions.

    The settings are sorted by section, and by file within each section. Later settings override
    earlier ones.
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
    """Return a configuration file's sections, or an empty dict if the file can't be loaded."""
    loaders = app.python_config_loader_class, app.json_config_loader_class
    try:
        loaded: dict[str, Any] = loaders[file.suffix == ".json"](
            file.name, path=str(file.parent)
        ).load_config()
    except Exception:  # noqa: BLE001 - IPython has already reported the error
        return {}
    return loaded


def main() -> None:
    """Write the answer to the file that is named on the command line."""
    signal.alarm(LIMIT_S)
    kind, output = sys.argv[1:]
    del sys.path[0]  # this folder is not on a kernel's sys.path
    text = answer(kind, f"{output}.json")
    Path(output).write_text(text, encoding="utf-8", errors="surrogateescape")
    sys.stderr.flush()
    os._exit(0)  # a kernel's threads would keep the process alive


if __name__ == "__main__":
    main()
