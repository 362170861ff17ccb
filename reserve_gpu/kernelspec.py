"""Kernels that have their GPU before their first line runs: a kernelspec that starts them by exec.

Only here jupyter_client and ipykernel, which are no dependencies: who has notebooks has them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
from typing import TYPE_CHECKING, Any

from reserve_gpu import choosing, errors, quantities
from reserve_gpu.launch import ExitError, words
from reserve_gpu.text import shown

if TYPE_CHECKING:
    from argparse import Namespace

    from jupyter_client.kernelspec import KernelSpecManager

NAME, DISPLAY_NAME = "python3-gpu", "Python 3 (GPU)"
MARK = "reserve_gpu"  # in the metadata of what was installed here
MOST_WAIT_S = 45  # clients give up on a kernel that has not started after 60 s
CANNOT_CREATE = 73  # EX_CANTCREAT of sysexits.h


def install(arguments: Namespace) -> str:
    """Install the kernelspec, in place of an earlier one of ours; returns what to tell.

    Raises RequestError for a request that makes no sense, or a name that somebody else's has.
    """
    _check(arguments)
    name = _name(arguments)
    manager = _manager()
    place = _place(arguments) or _user_place()
    for path in (os.path.join(place, name), manager.find_kernel_specs().get(name)):
        if path and os.path.lexists(path) and not _is_ours(path):
            raise errors.RequestError(
                f"{path} is a kernel that was not installed by this command. Choose another --name."
            )
    spec = _spec(arguments)
    with tempfile.TemporaryDirectory() as folder:
        source = os.path.join(folder, name)
        shutil.copytree(_stock_resources(), source)
        with open(os.path.join(source, "kernel.json"), "w", encoding="utf-8") as file:
            json.dump(spec, file, indent=1)
        try:
            path = manager.install_kernel_spec(
                source, name, user=_is_user(arguments), prefix=_prefix(arguments)
            )
        except OSError as error:
            text = f"The kernel can't be installed: {error.filename}: {error.strerror}."
            raise ExitError(text, CANNOT_CREATE) from error
    return f"Installed the kernel {spec['display_name']!r} as {name}, in {path}"


def uninstall(arguments: Namespace) -> str:
    """Take away what `install` has installed, and nothing else; returns what to tell."""
    name = _name(arguments)
    manager = _manager()
    if place := _place(arguments):
        manager.kernel_dirs = [place]
    path = manager.find_kernel_specs().get(name)
    if path is None:
        raise errors.RequestError(f"There is no kernel {name}.")
    if not _is_ours(path):
        raise errors.RequestError(f"{path} was not installed by this command; it stays.")
    try:
        if os.path.islink(path):
            os.unlink(path)
        else:
            shutil.rmtree(path)
    except OSError as error:
        text = f"The kernel can't be removed: {error.filename}: {error.strerror}."
        raise ExitError(text, CANNOT_CREATE) from error
    return f"Removed the kernel {name} from {path}"


def _check(arguments: Namespace) -> None:
    """Raise RequestError for what no machine could satisfy: a kernel would say it only later."""
    choosing.request(
        arguments.devices or None,
        count=arguments.count,
        min_memory=arguments.min_memory,
        name=arguments.gpu_name,
        exclude=arguments.exclude,
        share=arguments.share,
        note=arguments.note,
    )
    if arguments.wait is not None and quantities.parse_duration(arguments.wait) > MOST_WAIT_S:
        raise errors.RequestError(
            f"A kernel can wait for a GPU for up to {MOST_WAIT_S} s, as notebooks give up on one "
            f"that has not started after 60 s. Give --wait {MOST_WAIT_S}s, or wait in the "
            "notebook: the magic has --wait, too."
        )


def _spec(arguments: Namespace) -> dict[str, Any]:
    """The stock kernelspec, started by this command, with the extension loaded."""
    try:
        from ipykernel.kernelspec import get_kernel_dict
    except ImportError as error:
        raise _missing("ipykernel") from error
    spec: dict[str, Any] = get_kernel_dict(extra_arguments=["--ext", "reserve_gpu"])
    options = words({**vars(arguments), "name": arguments.gpu_name})
    start = [sys.executable, "-m", "reserve_gpu", "kernel", "start", *options, "--"]
    spec["argv"] = start + spec["argv"]
    spec["display_name"] = arguments.display_name or DISPLAY_NAME
    spec["metadata"] = {**spec.get("metadata", {}), MARK: {"version": 1}}
    return spec


def _stock_resources() -> str:
    from ipykernel.kernelspec import RESOURCES

    return str(RESOURCES)


def _manager() -> KernelSpecManager:
    try:
        from jupyter_client.kernelspec import KernelSpecManager
    except ImportError as error:
        raise _missing("jupyter_client") from error
    # Listing kernels imports ipykernel, which before 7 imports debugpy, and that would warn.
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    return KernelSpecManager()


def _place(arguments: Namespace) -> str | None:
    """The directory of kernels that was named, None if none was."""
    prefix = _prefix(arguments)
    if sum(map(bool, (arguments.user, arguments.sys_prefix, arguments.prefix))) > 1:
        raise errors.RequestError("Give one of --user, --sys-prefix and --prefix.")
    if arguments.user:
        return _user_place()
    return os.path.join(prefix, "share", "jupyter", "kernels") if prefix else None


def _user_place() -> str:
    from jupyter_core.paths import jupyter_data_dir

    return os.path.join(jupyter_data_dir(), "kernels")


def _prefix(arguments: Namespace) -> str | None:
    prefix: str | None = arguments.prefix
    return sys.prefix if arguments.sys_prefix else prefix and os.path.abspath(prefix)


def _is_user(arguments: Namespace) -> bool:
    return _prefix(arguments) is None


def _name(arguments: Namespace) -> str:
    name: str = arguments.name
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", name, re.IGNORECASE | re.ASCII):
        raise errors.RequestError(
            f"{shown(name)!r} can't be the name of a kernel: letters, digits, '.', '-' and '_'."
        )
    return name.lower()  # as Jupyter has it


def _is_ours(path: str) -> bool:
    try:
        with open(os.path.join(path, "kernel.json"), encoding="utf-8") as file:
            return MARK in json.load(file)["metadata"]
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _missing(module: str) -> errors.RequestError:
    return errors.RequestError(
        f"There is no {module} here. Run: {shown(sys.executable)} -m pip install {module}"
    )
