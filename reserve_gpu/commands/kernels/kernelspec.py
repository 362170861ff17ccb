"""Kernels that have their GPU before their first line runs: their kernelspec."""

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
from reserve_gpu.commands.hosts.remote_status import HOSTS, other_machines
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
MARK = "reserve_gpu"  # in the metadata of what was installed here
LONGEST_WAIT_S = 45  # clients give up on a kernel that has not started after 60 s


class InstallError(ReserveGPUError):
    """The files of a kernel can't be written."""

    exit_code = 73  # EX_CANTCREAT


class NoHostAnswersError(ReserveGPUError):
    """A kernel was installed for other machines, of which none answers."""

    exit_code = 69  # EX_UNAVAILABLE


def run(arguments: Namespace) -> Output:
    """Install the kernelspec, in place of an earlier one of ours.

    Raises RequestError for a request that makes no sense, or a name that another kernel has;
    InstallError; NoHostAnswersError.
    """
    machines = other_machines(arguments)
    _check_slurm(arguments)
    lacking = machines.lacks() if machines else []
    kernels = manager(*lacking)
    places = machines.words if machines else ["Slurm"] if arguments.slurm else []
    # Of the request alone: there `--name` is the kernel's, `--gpu-name` the GPU's.
    wishes = Namespace(**{**vars(arguments), "name": arguments.gpu_name})
    _check(wishes)
    name = _name(arguments.name, places)
    there = kernels.find_kernel_specs()
    path = os.path.join(_place(arguments), name)
    for existing in (path, there.get(name)):
        if existing and os.path.lexists(existing) and not _is_ours(existing):
            raise RequestError(
                f"{existing} is a kernel that was not installed by this command. "
                "Choose another --name."
            )
    spec, resources = _stock(wishes)
    where = f" in {', '.join(places)}" if machines else ", Slurm" if arguments.slurm else ""
    spec["display_name"] = arguments.display_name or _display_name(wishes, where)
    if machines:
        spec = machines.kernel(spec, wishes, name)
    if arguments.slurm:
        spec = srun.kernel(spec, wishes, arguments.command)
    before = os.path.lexists(path)
    seen = machines.look() if machines else None
    try:
        _delete(path)
        shutil.copytree(resources, path)
        with open(os.path.join(path, "kernel.json"), "w", encoding="utf-8") as file:
            json.dump(spec, file, indent=1)
    except OSError as error:
        text = f"The kernel can't be installed: {error.filename}: {error.strerror}."
        raise InstallError(text) from error
    did = "Replaced" if before else "Installed"
    told = f"{did} the kernel {spec['display_name']!r} as {name}, in {path}"
    for package in lacking:
        missing = f"{_bare(package)} is missing"
        told += f"\nWarning: {missing}. Run: {errors.install_command(package)}"
    if seen and not seen.machines:
        told += "\nWarning: no machine answers, so it can't start now."
        why = [f"{each['name']}: {each['problem']}" for each in seen.to_dict()["hosts"]]
        raise NoHostAnswersError("\n".join([told, *why]))
    return Output(told)


def _check_slurm(arguments: Namespace) -> None:
    """Raise RequestError for --slurm with --hosts, or for options of srun without it."""
    if arguments.slurm and arguments.hosts is not None:
        raise RequestError("Give --slurm or --hosts: Slurm finds the machine.")
    if arguments.command and not arguments.slurm:
        raise RequestError("What stands behind -- belongs to --slurm, which is missing.")


def _display_name(wishes: Namespace, where: str) -> str:
    """Return `Python 3 (GPU in lab: count 2)`, so that two kernels can be told apart."""
    asked = ", ".join(word.lstrip("-").replace("=", " ") for word in request_options.words(wishes))
    return f"Python 3 (GPU{where}{f': {asked}' if asked else ''})"


def _check(wishes: Namespace) -> None:
    """Raise RequestError for what no machine could satisfy: a kernel would say it only later."""
    _, wait = request_options.to_request(wishes)
    if re.match(r"\s*[0-9]{4}-", getattr(wishes, "until", None) or ""):
        raise RequestError(
            "A kernel is also started after that date. Give --until a time of day or a day of the "
            "week, or say for how long: --for 8h."
        )
    if wait is not None and parse_duration(wait) > LONGEST_WAIT_S:
        raise RequestError(
            f"A kernel can wait for a GPU for up to {LONGEST_WAIT_S} s, as notebooks give up on "
            f"one that has not started after 60 s. Give --wait {LONGEST_WAIT_S}s, or wait in a "
            "notebook that runs: the magic has --wait, too."
        )


def _stock(wishes: Namespace) -> tuple[dict[str, Any], str]:
    """Return the stock kernelspec, started by this command, and the folder of its logos."""
    from ipykernel.kernelspec import RESOURCES, get_kernel_dict

    spec: dict[str, Any] = get_kernel_dict(extra_arguments=["--ext", "reserve_gpu"])
    spec["argv"] = request_options.kernel_start(wishes) + spec["argv"]
    spec["metadata"] = {**spec.get("metadata", {}), MARK: {"version": 1}}
    return spec, RESOURCES


def manager(*also_missing: str) -> KernelSpecManager:
    """Return what knows the kernels of this user. Raises RequestError without Jupyter's packages.

    also_missing: packages to install with those.
    """
    if missing := [each for each in NEEDED if not find_spec(each)]:
        packages = [*missing, *also_missing]
        names = phrases.listed([_bare(package) for package in packages])
        run = errors.install_command(" ".join(packages))
        raise RequestError(f"Missing here: {names}. Run: {run}")
    from jupyter_client.kernelspec import KernelSpecManager

    # To list kernels is to import ipykernel, and before version 7 that imports debugpy, which would
    # print a warning about frozen modules.
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    return KernelSpecManager()


def _bare(package: str) -> str:
    """Return the name of a package that is written as a shell takes it: of 'sshpyk>=1.25'."""
    return package.strip("'").partition(">")[0]


def _place(arguments: Namespace) -> str:
    """Return the directory of kernels that was named, by default the user's."""
    if sum(map(bool, (arguments.user, arguments.sys_prefix, arguments.prefix))) > 1:
        raise RequestError("Give one of --user, --sys-prefix and --prefix.")
    if prefix := sys.prefix if arguments.sys_prefix else arguments.prefix:
        return os.path.abspath(f"{prefix}/share/jupyter/kernels")
    from jupyter_core.paths import jupyter_data_dir

    return os.path.join(jupyter_data_dir(), "kernels")


def _name(given: str | None, places: Sequence[str]) -> str:
    """Return the name that was given, else `python3-gpu`, and `python3-gpu-lab` on others."""
    words = "-".join([settings.KERNEL_NAME, *places])
    name = given or re.sub(r"[^A-Za-z0-9.]+", "-", words).strip("-")
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", name, re.IGNORECASE | re.ASCII):
        raise RequestError(
            f"{sanitize(name)!r} can't be the name of a kernel: letters, digits, '.', '-' and '_'."
        )
    return name.lower()  # as Jupyter has it


def _delete(path: str) -> None:
    if os.path.islink(path):
        os.unlink(path)
    elif os.path.lexists(path):
        shutil.rmtree(path)


def _is_ours(path: str) -> bool:
    """Tell whether a kernel was installed here; what can't be read was not."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        with open(os.path.join(path, "kernel.json"), encoding="utf-8") as file:
            metadata = untrusted.parsed(file.read(untrusted.SIZE_LIMIT + 1))["metadata"]
        return isinstance(metadata, dict) and MARK in metadata
    return False


MORE = """\
It is started with this Python. Where no GPU is free it starts anyway, sees no
GPU, and its first cell shows why. --wait may be up to 45s, as notebooks give
up on a kernel after 60 s. With --hosts it runs on the machine that has a free
GPU; where none is free it does not start.
"""
OPTIONS = (
    *(each for each in request_options.REQUEST_KEYWORDS if each is not request_options.NAME),
    Option("--gpu-name TEXT", "only GPUs with this text in their name"),
    Option("--name NAME",
           "of the kernel; python3-gpu by default, and python3-gpu-lab with --hosts lab"),
    Option("--display-name TEXT",
           "what notebooks show; by default Python 3 (GPU: count 2), as what you ask for"),
    HOSTS,
    Option("--slurm", "in a job of Slurm's; behind -- what srun takes"),
    Option("--user", "for this user; the default"),
    Option("--sys-prefix", "in this Python's environment"),
    Option("--prefix DIR", "in DIR/share/jupyter/kernels"),
)  # fmt: skip
split = command.split_at_sign


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `kernel install`."""
    parser.epilog = MORE
    add(OPTIONS, parser)
