"""Report whether a kernel loads reserve_gpu, or which line of the configuration prevents it.

install.sh runs this file with the Python that it installs into, which may lack everything but the
standard library, IPython and ipykernel.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

NO_KERNELS = "no kernels"
LOADED = "loaded"


def answer(kind: str, connection_file: str) -> str:
    """Return LOADED, NO_KERNELS, or the setting that replaces the extensions; empty if none does.

    Args:
        kind: `kernel` or `terminal`. Only a kernel is started; of a terminal's IPython the
            configuration is read.
        connection_file: Path of the kernel's connection file, which it writes.
    """
    app: Any
    if kind == "terminal":
        from IPython.terminal.ipapp import TerminalIPythonApp

        app = TerminalIPythonApp.instance()
        app.init_profile_dir()
        app.init_config_files()
        app.load_config_file()
        return replacing_setting(app)
    if not find_spec("ipykernel"):
        return NO_KERNELS
    from ipykernel.kernelapp import IPKernelApp

    app = IPKernelApp.instance()
    app.initialize(["-f", connection_file])
    return LOADED if app.shell.find_line_magic("reserve_gpu") else replacing_setting(app)


def replacing_setting(app: Any) -> str:
    """Return the assignment that replaces the extensions, and its remedy; empty without one."""
    from traitlets.config.loader import LazyConfigValue

    found = ""
    for section in app.section_names():  # a later section overrides an earlier one, whatever file
        for name in app.loaded_config_files:  # and a later file an earlier one
            values = read(app, Path(name)).get(section, {})
            if isinstance(values.get("extensions", LazyConfigValue()), LazyConfigValue):
                continue  # it appends, or says nothing
            setting = f"c.{section}.extensions" if name.endswith(".py") else f"{section}.extensions"
            has_it = "reserve_gpu" in values["extensions"]
            found = "" if has_it else f'{setting} in {name}; add "reserve_gpu" to that list'
    return found and f"the extensions are replaced by {found}"


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
    kind, output = sys.argv[1:]
    del sys.path[0]  # this folder is not a kernel's
    text = answer(kind, f"{output}.json")
    Path(output).write_text(text, encoding="utf-8", errors="surrogateescape")
    sys.stderr.flush()
    os._exit(0)  # a kernel's threads go on otherwise


if __name__ == "__main__":
    main()
