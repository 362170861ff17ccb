"""Check whether IPython loads reserve_gpu, and find any setting that prevents this.

`reserve-gpu setup` runs this file as a program, because a process can contain only one IPython. The
file imports nothing from this package, so the package is found as in any other IPython.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

NO_KERNELS = "no kernels"
LOADED = "loaded"


def answer(check: str, connection_file: str) -> str:
    """Run one check, and return its result.

    Args:
        check: `terminal` starts IPython as in a terminal, and `kernel` starts a Jupyter kernel.
            `conflict` starts neither, and looks for a reason not to add the lines.
        connection_file: The path to which the kernel writes its connection file.

    Returns:
        For `conflict`, the reason, or an empty string. Otherwise LOADED, NO_KERNELS, the setting
        that replaces the extensions, or an empty string if the extension is not loaded and no such
        setting exists.
    """
    if check == "conflict":
        return missing_package() or next(filter(None, map(appending_setting, new_apps())), "")
    if check == "kernel" and not find_spec("ipykernel"):
        return NO_KERNELS
    if check == "kernel":
        app, options = kernel_class().instance(), ["-f", connection_file]
    else:
        app, options = terminal_class().instance(), ["--no-banner", "--colors=NoColor"]
    app.initialize(options)
    return LOADED if app.shell.find_line_magic("reserve_gpu") else replacing_setting(app)


def missing_package() -> str:
    """Return a message if a new process can't import IPython or this package."""
    for package in ("IPython", "reserve_gpu"):
        if not getattr(find_spec(package), "origin", None):  # a namespace package has none
            return f"{package} is not installed for {sys.executable}"
    return ""


def terminal_class() -> Any:
    """Return the class of the application that runs IPython in a terminal."""
    from IPython.terminal.ipapp import TerminalIPythonApp

    return TerminalIPythonApp


def kernel_class() -> Any:
    """Return the class of the application that runs a Jupyter kernel."""
    from ipykernel.kernelapp import IPKernelApp

    return IPKernelApp


def new_apps() -> Iterator[Any]:
    """Yield an application of each kind that is installed."""
    yield terminal_class()()
    if find_spec("ipykernel"):
        yield kernel_class()()


def appending_setting(app: Any) -> str:
    """Return advice about `append` calls in configuration sections other than InteractiveShellApp.

    If two sections append to the extensions, traitlets makes them share one list, and doubles the
    list with each file that it merges (LazyConfigValue.merge_into). IPython then takes minutes and
    gigabytes of memory to start.
    """
    from traitlets.config.loader import LazyConfigValue

    for section, setting, extensions in settings(app):
        if section != "InteractiveShellApp" and isinstance(extensions, LazyConfigValue):
            return (
                f"With them, IPython or kernels would not start, because {setting} also appends. "
                "Use c.InteractiveShellApp.extensions there"
            )
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
    return replacing and f'{replacing} replaces the extensions. Add "reserve_gpu" to that list'


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
    check, output = sys.argv[1:]
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # this file's folder is not on a kernel's sys.path
    text = answer(check, f"{output}.json")
    Path(output).write_text(text, encoding="utf-8", errors="surrogateescape")
    sys.stderr.flush()
    os._exit(0)  # a kernel's threads would keep the process alive


if __name__ == "__main__":
    main()
