"""The `kernel install` command: install a kernelspec that reserves GPUs before the kernel starts.

The kernel runs on this machine, on another machine (`--hosts`), or in a Slurm job (`--slurm`).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from argparse import Namespace
from contextlib import suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from reserve_gpu import request_options
from reserve_gpu.commands.hosts.hosts_option import HOSTS, other_machines
from reserve_gpu.commands.output import Output
from reserve_gpu.commands.run import command
from reserve_gpu.commands.slurm import srun
from reserve_gpu.model import errors, untrusted
from reserve_gpu.model.errors import RequestError, ReserveGPUError
from reserve_gpu.model.option import Option, add
from reserve_gpu.model.parsing import parse_duration
from reserve_gpu.model.untrusted import sanitize
from reserve_gpu.render import phrases
from reserve_gpu.system import settings

if TYPE_CHECKING:
    from argparse import ArgumentParser
    from collections.abc import Sequence

    from jupyter_client.kernelspec import KernelSpecManager

NEEDED = ("jupyter_client", "ipykernel")
MARK = "reserve_gpu"  # metadata key that marks the kernelspecs installed by this command
LONGEST_WAIT_S = 45  # maximum value of --wait; clients give up on a kernel that takes 60 s to start


class InstallError(ReserveGPUError):
    """The kernelspec's files can't be written."""

    exit_code = 73  # EX_CANTCREAT


class NoHostAnswersError(ReserveGPUError):
    """A kernel was installed for other machines, but none of them responded."""

    exit_code = 69  # EX_UNAVAILABLE


def run(arguments: Namespace) -> Output:
    """Install the kernelspec, replacing any that this command installed under the same name.

    Raises:
        RequestError: The request is invalid, or the name belongs to a kernel that this command did
            not install.
        InstallError: The files can't be written.
        NoHostAnswersError: The kernel was installed, but none of its machines responded.
    """
    machines = other_machines(arguments)
    _check_slurm(arguments)
    missing_packages = machines.lacks() if machines else []
    kernels = manager(*missing_packages)
    places = machines.words if machines else ["Slurm"] if arguments.slurm else []
    # In a request, `name` selects GPUs by model name. Here, its value comes from --gpu-name,
    # because --name sets the kernel's name.
    request = Namespace(**{**vars(arguments), "name": arguments.gpu_name})
    _check_request(request)
    name = _name(arguments.name, places)
    installed = kernels.find_kernel_specs()
    path = os.path.join(_kernels_directory(arguments), name)
    for existing in (path, installed.get(name)):
        if existing and os.path.lexists(existing) and not _is_ours(existing):
            raise RequestError(
                f"The kernel in {existing} was not installed by this command. "
                "Choose another --name."
            )
    spec, resources = _stock(request)
    where = f" in {', '.join(places)}" if machines else ", Slurm" if arguments.slurm else ""
    spec["display_name"] = arguments.display_name or _display_name(request, where)
    if machines:
        spec = machines.kernel(spec, request, name)
    if arguments.slurm:
        spec = srun.kernel(spec, request, arguments.command)
    action = "Replaced" if os.path.lexists(path) else "Installed"
    snapshot = machines.look() if machines else None
    try:
        _delete(path)
        shutil.copytree(resources, path)
        with open(os.path.join(path, "kernel.json"), "w", encoding="utf-8") as file:
            json.dump(spec, file, indent=1)
    except OSError as error:
        text = f"The kernel can't be installed: {error.filename}: {error.strerror}."
        raise InstallError(text) from error
    message = f"{action} the kernel {spec['display_name']!r} as {name}, in {path}"
    for package in missing_packages:
        missing = f"{_bare_name(package)} is missing"
        message += f"\nWarning: {missing}. Run: {errors.install_command(package)}"
    if snapshot and not snapshot.machines:
        message += "\nWarning: no machine is responding, so the kernel can't start now."
        problems = [f"{each['name']}: {each['problem']}" for each in snapshot.to_dict()["hosts"]]
        raise NoHostAnswersError("\n".join([message, *problems]))
    return Output(message)


def _check_slurm(arguments: Namespace) -> None:
    """Raise RequestError for --slurm with --hosts, or for srun options without --slurm."""
    if arguments.slurm and arguments.hosts is not None:
        raise RequestError("Give --slurm or --hosts, not both: Slurm chooses the machine.")
    if arguments.command and not arguments.slurm:
        raise RequestError("Only --slurm takes options for srun after --. Add --slurm.")


def _display_name(request: Namespace, where: str) -> str:
    """Return a display name that lists the options, such as `Python 3 (GPU in lab: count 2)`."""
    options = request_options.words(request)
    text = ", ".join(word.lstrip("-").replace("=", " ") for word in options)
    return f"Python 3 (GPU{where}{f': {text}' if text else ''})"


def _check_request(request: Namespace) -> None:
    """Raise RequestError if a kernel with this request could never get a GPU."""
    _, wait = request_options.to_request(request)
    if re.match(r"\s*[0-9]{4}-", getattr(request, "until", None) or ""):
        raise RequestError(
            "The kernel might be started after that date. Use a time of day or a weekday with "
            "--until, or give a duration: --for 8h."
        )
    if wait is not None and parse_duration(wait) > LONGEST_WAIT_S:
        raise RequestError(
            f"A kernel can wait for a GPU for up to {LONGEST_WAIT_S} s, because notebooks give up "
            f"on a kernel after 60 s. Give --wait {LONGEST_WAIT_S}s, or wait in a running notebook "
            "with %reserve_gpu --wait."
        )


def _stock(request: Namespace) -> tuple[dict[str, Any], str]:
    """Return ipykernel's kernelspec and logo folder. The kernelspec runs `kernel start`."""
    from ipykernel.kernelspec import RESOURCES, get_kernel_dict

    spec: dict[str, Any] = get_kernel_dict(extra_arguments=["--ext", "reserve_gpu"])
    spec["argv"] = request_options.kernel_start(request) + spec["argv"]
    spec["metadata"] = {**spec.get("metadata", {}), MARK: {"version": 1}}
    return spec, RESOURCES


def manager(*also_missing: str) -> KernelSpecManager:
    """Return Jupyter's kernelspec manager.

    Args:
        also_missing: Other missing packages, to be included in the error's install command.

    Raises:
        RequestError: jupyter_client or ipykernel is not installed.
    """
    if missing := [each for each in NEEDED if not find_spec(each)]:
        packages = [*missing, *also_missing]
        names = phrases.listed([_bare_name(package) for package in packages])
        install = errors.install_command(" ".join(packages))
        raise RequestError(f"Missing packages: {names}. Run: {install}")
    from jupyter_client.kernelspec import KernelSpecManager

    # Listing kernels imports ipykernel. Before version 7, ipykernel imports debugpy, which prints a
    # warning about frozen modules unless this variable is set.
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    return KernelSpecManager()


def _bare_name(package: str) -> str:
    """Return the package name from a shell-quoted requirement such as `'sshpyk>=1.25'`."""
    return package.strip("'").partition(">")[0]


def _kernels_directory(arguments: Namespace) -> str:
    """Return the kernels directory that the options select, by default the user's."""
    if sum(map(bool, (arguments.user, arguments.sys_prefix, arguments.prefix))) > 1:
        raise RequestError("Give one of --user, --sys-prefix and --prefix, not several.")
    if prefix := sys.prefix if arguments.sys_prefix else arguments.prefix:
        return os.path.abspath(f"{prefix}/share/jupyter/kernels")
    from jupyter_core.paths import jupyter_data_dir

    return os.path.join(jupyter_data_dir(), "kernels")


def _name(given: str | None, places: Sequence[str]) -> str:
    """Return the given kernel name, or a default such as `python3-gpu` or `python3-gpu-lab`."""
    words = "-".join([settings.KERNEL_NAME, *places])
    name = given or re.sub(r"[^A-Za-z0-9.]+", "-", words).strip("-")
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", name, re.IGNORECASE | re.ASCII):
        raise RequestError(
            f"{sanitize(name)!r} is not a valid kernel name. Use letters, digits, '.', '-' and '_'."
        )
    return name.lower()  # Jupyter also lowercases kernel names


def _delete(path: str) -> None:
    if os.path.islink(path):
        os.unlink(path)
    elif os.path.lexists(path):
        shutil.rmtree(path)


def _is_ours(path: str) -> bool:
    """Return whether `kernel install` created this kernelspec, or False if it is unreadable."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        with open(os.path.join(path, "kernel.json"), encoding="utf-8") as file:
            metadata = untrusted.parsed(file.read(untrusted.SIZE_LIMIT + 1))["metadata"]
        return isinstance(metadata, dict) and MARK in metadata
    return False


MORE = """\
The kernel runs with this Python. If no GPU is free, it starts without one, and
its first cell shows why. --wait can be at most 45s, because notebooks give up
on a kernel after 60 s. With --hosts, the kernel runs on a machine with a free
GPU. If no machine has one, it does not start.
"""
OPTIONS = (
    *(each for each in request_options.REQUEST_KEYWORDS if each is not request_options.NAME),
    Option("--gpu-name TEXT", "only GPUs whose name contains this text"),
    Option("--name NAME",
           "the kernel's name; default: python3-gpu, or python3-gpu-lab with --hosts lab"),
    Option("--display-name TEXT",
           "the name shown in notebooks; default: made from your options, such as "
           "Python 3 (GPU: count 2)"),
    HOSTS,
    Option("--slurm", "run the kernel in a Slurm job; put options for srun after --"),
    Option("--user", "install for this user (default)"),
    Option("--sys-prefix", "install in this Python's environment"),
    Option("--prefix DIR", "install in DIR/share/jupyter/kernels"),
)  # fmt: skip
split = command.split_at_sign


def add_arguments(parser: ArgumentParser) -> None:
    """Add the `kernel install` command's arguments."""
    parser.epilog = MORE
    add(OPTIONS, parser)
