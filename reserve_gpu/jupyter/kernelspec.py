"""Kernels that have their GPU before their first line runs: a kernelspec that starts them by exec.

Only here jupyter_client and ipykernel are needed. They are no dependencies: whoever has notebooks
has them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from reserve_gpu import host, options
from reserve_gpu.errors import RequestError, ReserveGPUError, shown
from reserve_gpu.quantities import parse_duration
from reserve_gpu.reservation import request

if TYPE_CHECKING:
    from jupyter_client.kernelspec import KernelSpecManager

MARK = "reserve_gpu"  # in the metadata of what was installed here
LONGEST_WAIT_S = 45  # clients give up on a kernel that has not started after 60 s


class InstallError(ReserveGPUError):
    """The files of a kernel can't be written or removed."""

    exit_code = 73  # EX_CANTCREAT


def install(arguments: Namespace) -> str:
    """Install the kernelspec, in place of an earlier one of ours; returns what to tell.

    Raises RequestError for a request that makes no sense, or a name that another kernel has;
    InstallError.
    """
    # Of the request alone: there `--name` is the kernel's, `--gpu-name` the GPU's.
    wishes = Namespace(**{**vars(arguments), "name": arguments.gpu_name})
    _check(wishes)
    name = _name(arguments)
    manager = _manager()
    path = os.path.join(_place(arguments) or _user_place(), name)
    for existing in (path, manager.find_kernel_specs().get(name)):
        if existing and os.path.lexists(existing) and not _is_ours(existing):
            raise RequestError(
                f"{existing} is a kernel that was not installed by this command. "
                "Choose another --name."
            )
    spec, resources = _stock(wishes)
    spec["display_name"] = arguments.display_name or _display_name(wishes)
    try:
        _remove(path)
        shutil.copytree(resources, path)
        with open(os.path.join(path, "kernel.json"), "w", encoding="utf-8") as file:
            json.dump(spec, file, indent=1)
    except OSError as error:
        text = f"The kernel can't be installed: {error.filename}: {error.strerror}."
        raise InstallError(text) from error
    return f"Installed the kernel {spec['display_name']!r} as {name}, in {path}"


def uninstall(arguments: Namespace) -> str:
    """Take away what `install` has installed, and nothing else; returns what to tell.

    Raises RequestError, InstallError.
    """
    name = _name(arguments)
    manager = _manager()
    if place := _place(arguments):
        manager.kernel_dirs = [place]
    path = manager.find_kernel_specs().get(name)
    if path is None:
        raise RequestError(f"There is no kernel {name}.")
    if not _is_ours(path):
        raise RequestError(f"{path} was not installed by this command; it stays.")
    try:
        _remove(path)
    except OSError as error:
        text = f"The kernel can't be removed: {error.filename}: {error.strerror}."
        raise InstallError(text) from error
    return f"Removed the kernel {name} from {path}"


def _words(arguments: Namespace) -> list[str]:
    """Return the words on a command line that mean these options of a request."""
    result: list[str] = []
    for option in options.REQUEST_THAT_GOES_ON:
        value = getattr(arguments, option.attribute)
        if option is options.DEVICES:
            result += value
        elif value is True:
            result.append(option.flag)
        elif value not in (None, False):
            values = value if isinstance(value, list) else [value]
            result += [f"{option.flag}={each}" for each in values]
    return result


def _display_name(wishes: Namespace) -> str:
    """Return `Python 3 (GPU: count 2, min-memory 16GB)`, so that two kernels can be told apart."""
    asked = ", ".join(word.lstrip("-").replace("=", " ") for word in _words(wishes))
    return f"Python 3 (GPU: {asked})" if asked else "Python 3 (GPU)"


def _check(wishes: Namespace) -> None:
    """Raise RequestError for what no machine could satisfy: a kernel would say it only later."""
    arguments = options.wishes(wishes)
    wait = arguments.pop("wait")
    request.parse(arguments.pop("devices"), **arguments)
    if re.match(r"\s*[0-9]{4}-", arguments["until"] or ""):
        raise RequestError(
            "A kernel is also started after that date. Give --until a time of day or a day of the "
            "week, or say for how long: --for 8h."
        )
    if wait is not None and parse_duration(wait) > LONGEST_WAIT_S:
        raise RequestError(
            f"A kernel can wait for a GPU for up to {LONGEST_WAIT_S} s, as notebooks give up on "
            f"one that has not started after 60 s. Give --wait {LONGEST_WAIT_S}s, or wait in the "
            "notebook: the magic has --wait, too."
        )


def _stock(wishes: Namespace) -> tuple[dict[str, Any], str]:
    """Return the stock kernelspec, started by this command, and the folder of its logos."""
    try:
        from ipykernel.kernelspec import RESOURCES, get_kernel_dict
    except ImportError as error:
        raise _missing("ipykernel") from error
    spec: dict[str, Any] = get_kernel_dict(extra_arguments=["--ext", "reserve_gpu"])
    start = [sys.executable, "-m", "reserve_gpu", "kernel", "start", *_words(wishes), "--"]
    spec["argv"] = start + spec["argv"]
    spec["metadata"] = {**spec.get("metadata", {}), MARK: {"version": 1}}
    return spec, RESOURCES


def _manager() -> KernelSpecManager:
    try:
        from jupyter_client.kernelspec import KernelSpecManager
    except ImportError as error:
        raise _missing("jupyter_client") from error
    # To list kernels is to import ipykernel, and before version 7 that imports debugpy, which would
    # print a warning about frozen modules.
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    return KernelSpecManager()


def _place(arguments: Namespace) -> str | None:
    """Return the directory of kernels that was named, None if none was."""
    if sum(map(bool, (arguments.user, arguments.sys_prefix, arguments.prefix))) > 1:
        raise RequestError("Give one of --user, --sys-prefix and --prefix.")
    if arguments.user:
        return _user_place()
    prefix = sys.prefix if arguments.sys_prefix else arguments.prefix
    return os.path.abspath(f"{prefix}/share/jupyter/kernels") if prefix else None


def _user_place() -> str:
    from jupyter_core.paths import jupyter_data_dir

    return os.path.join(jupyter_data_dir(), "kernels")


def _name(arguments: Namespace) -> str:
    name: str = arguments.name
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", name, re.IGNORECASE | re.ASCII):
        raise RequestError(
            f"{shown(name)!r} can't be the name of a kernel: letters, digits, '.', '-' and '_'."
        )
    return name.lower()  # as Jupyter has it


def _remove(path: str) -> None:
    if os.path.islink(path):
        os.unlink(path)
    elif os.path.lexists(path):
        shutil.rmtree(path)


def _is_ours(path: str) -> bool:
    try:
        with open(os.path.join(path, "kernel.json"), encoding="utf-8") as file:
            return MARK in json.load(file)["metadata"]
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _missing(module: str) -> RequestError:
    return RequestError(f"There is no {module} here. Run: {host.install_command(module)}")
