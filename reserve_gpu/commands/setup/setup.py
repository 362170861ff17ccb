"""The `setup` command: add the lines that load the extension, and check that they do."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from reserve_gpu.commands.output import Output
from reserve_gpu.commands.setup import find_extension
from reserve_gpu.commands.setup.config_file import Config, SetupError
from reserve_gpu.model import errors
from reserve_gpu.model.errors import RequestError
from reserve_gpu.model.option import Option, add
from reserve_gpu.model.untrusted import sanitize
from reserve_gpu.system import spawn

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

LIMIT_S = 120  # timeout for starting IPython or a kernel, in seconds
ERROR = re.compile(r"[\w.]*(Error|Exception|Exit|Interrupt)(:|$)")  # the last line of a traceback
TOOL_FILES = ("uv-receipt.toml", "pipx_metadata.json")  # in each environment of uv tool or pipx
CACHE_FILE = "CACHEDIR.TAG"  # in each cache directory: https://bford.info/cachedir/
ALREADY = "Your configuration or the system's already loads the extension."

MORE = """\
This adds a few marked lines to ipython_config.py in IPython's default profile,
and then starts IPython and a kernel to check that they load the extension.
Other Python environments share that file. Those without reserve_gpu ignore the
lines.

Example:
  reserve-gpu setup          # from then on, no notebook needs %load_ext
  reserve-gpu setup --undo
"""
OPTIONS = (Option("--undo", "remove the lines for this Python"),)


class NotLoadedError(SetupError):
    """IPython or kernels do not load the extension."""


def add_arguments(parser: ArgumentParser) -> None:
    """Add the `setup` command's arguments."""
    parser.epilog = MORE
    add(OPTIONS, parser)


def run(arguments: Namespace) -> Output:
    """Add or remove the lines.

    Raises:
        RequestError: The user starts neither IPython nor kernels from this environment, or has no
            home directory.
        SetupError: The lines can't be added or removed, or don't load the extension.
    """
    exit_on_signals()
    directory = ipython_directory()
    path = os.path.join(directory, "profile_default", "ipython_config.py")
    config = Config(path, os.fsencode(python_name()))
    command = "setup --undo" if arguments.undo else "setup"
    config.check_owner(errors.command_line(command))
    if arguments.undo:
        return Output("\n".join(config.remove()))
    _require_ipython_user()
    config.check_add()
    if not config.has_block():
        with suppress(NotLoadedError):
            programs = programs_with_extension(directory)
            return _done(f"Nothing was changed. {ALREADY}", programs)
    if conflict := _ask("conflict", directory)[0]:
        raise SetupError(f"The lines were not added to {path}. {conflict}.")
    if config.add():
        result = f"Added lines to {path}"
    else:
        result = f"Nothing was changed. The lines are already in {path}"
    try:
        programs = programs_with_extension(directory)
    except NotLoadedError as error:
        raise NotLoadedError(f"{result}. But {error}") from error
    return _done(result, programs)


def ipython_directory() -> str:
    """Return the directory that contains IPython's profiles, as IPython.paths.get_ipython_dir does.

    Raises:
        RequestError: The user has no home directory.
    """
    home = os.path.expanduser("~")
    directory = os.path.join(home, ".ipython")
    config_home = os.environ.get("XDG_CONFIG_HOME") or os.path.join(home, ".config")
    xdg = os.path.join(config_home, "ipython")
    is_xdg = os.path.isdir(xdg) and os.access(xdg, os.W_OK) and not os.path.islink(xdg)
    if is_xdg and not os.path.exists(directory):
        directory = xdg
    directory = os.path.expanduser(os.environ.get("IPYTHONDIR", directory))
    if directory.startswith("~"):
        raise RequestError("This user has no home directory. Set HOME or IPYTHONDIR.")
    return os.path.abspath(directory)


def python_name() -> str:
    """Return the path by which the lines identify this environment.

    It is the same for `python` and `python3`, and ASCII, so it fits into a file of any encoding.
    """
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return ascii(f"{os.path.realpath(sys.prefix)}/bin/python{version}")[1:-1]


def programs_with_extension(directory: str) -> str:
    """Start IPython, and a kernel if ipykernel is installed, and return the names of both.

    Args:
        directory: The directory that contains IPython's profiles.

    Raises:
        NotLoadedError: One of them does not load the extension.
    """
    names = {"terminal": "IPython", "kernel": "a Jupyter kernel"}
    loading: list[str] = []
    for check, name in names.items():
        answer, output = _ask(check, directory)
        if answer == find_extension.LOADED:
            loading.append(name)
        elif answer != find_extension.NO_KERNELS:
            reason = sanitize(answer or _last_error(output), errors.REASON_LIMIT)
            raise NotLoadedError(f"{name} does not load the extension: {reason.rstrip('.')}.")
    return " or ".join(loading)


def _ask(check: str, directory: str) -> tuple[str, str]:
    """Run find_extension.py, and return its answer and its other output.

    The output goes to a file, because a background process might keep a pipe open.
    """
    with tempfile.TemporaryDirectory() as scratch:
        answer, output = os.path.join(scratch, "answer"), os.path.join(scratch, "output")
        with open(output, "wb") as file:
            try:
                subprocess.run(
                    spawn.python(find_extension.__file__, check, answer),
                    # TERM=dumb keeps window titles out of the output.
                    env={**os.environ, "IPYTHONDIR": directory, "TERM": "dumb"},
                    cwd="/",
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    timeout=LIMIT_S,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                return "", f"it did not start within {LIMIT_S} s"
        return _text(answer), _text(output)


def _text(path: str) -> str:
    if not os.path.exists(path):
        return ""
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        return file.read()


def _last_error(output: str) -> str:
    lines = [line for line in output.splitlines() if line.strip()]
    return ([line for line in lines if ERROR.match(line)] or lines or ["unknown reason"])[-1]


def _done(result: str, programs: str) -> Output:
    is_on_path = (path := shutil.which("ipython")) and errors.runs_this_python(path)
    ipython = "ipython" if is_on_path else f"{quote(sys.executable)} -m IPython"
    loading = f"Whenever {programs} of {sys.executable} starts, it loads the extension."
    return Output(f"{result}\n{loading}\nTry it: {ipython} -c '%reserve_gpu'")


def _require_ipython_user() -> None:
    """Raise RequestError in a tool's environment from which the user starts no IPython."""
    if _is_tool_environment() and not (find_spec("ipykernel") or _links_ipython()):
        raise RequestError(
            f"This reserve-gpu is installed in a separate environment, {sys.prefix}. Your IPython "
            "and kernels run in other ones and can't import it, so nothing was changed. Install it "
            "with pip where they run, and use: python -m reserve_gpu setup"
        )


def _is_tool_environment() -> bool:
    """Return whether uv or pipx made this environment for one tool, perhaps only in its cache."""
    prefix = Path(sys.prefix)
    is_cached = any((parent / CACHE_FILE).exists() for parent in prefix.parents)
    return is_cached or any((prefix / name).exists() for name in TOOL_FILES)


def _links_ipython() -> bool:
    """Return whether another directory on PATH contains this environment's `ipython`."""
    path = shutil.which("ipython")
    if not path or os.path.samefile(os.path.dirname(path), os.path.dirname(sys.executable)):
        return False
    return errors.runs_this_python(path)


def exit_on_signals() -> None:
    """Exit normally on SIGTERM and SIGHUP, so that temporary files are removed."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda each, _: sys.exit(128 + each))
