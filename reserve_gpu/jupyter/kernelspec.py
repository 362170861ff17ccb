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
from contextlib import suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from reserve_gpu import errors, foreign, hosts, options
from reserve_gpu.core import request
from reserve_gpu.errors import RequestError, ReserveGPUError, shown
from reserve_gpu.quantities import parse_duration
from reserve_gpu.report.words import listed

if TYPE_CHECKING:
    from jupyter_client.kernelspec import KernelSpecManager

MARK = "reserve_gpu"  # in the metadata of what was installed here
KERNEL_NAME = "python3-gpu"
SSHPYK = "'sshpyk>=1.25'"  # as a shell takes it
NEEDED = ("jupyter_client", "ipykernel")
PROVISIONER = "reserve-gpu-hosts"  # as pyproject.toml has it
IDLE = "2h"  # after which a kernel on another machine releases its GPU, if somebody waits for it
LONGEST_WAIT_S = 45  # clients give up on a kernel that has not started after 60 s


class InstallError(ReserveGPUError):
    """The files of a kernel can't be written."""

    exit_code = 73  # EX_CANTCREAT


class NoHostAnswersError(ReserveGPUError):
    """A kernel was installed for other machines, of which none answers."""

    exit_code = 69  # EX_UNAVAILABLE


def install(arguments: Namespace) -> str:
    """Install the kernelspec, in place of an earlier one of ours; returns what to tell.

    Raises RequestError for a request that makes no sense, or a name that another kernel has;
    InstallError; NoHostAnswersError.
    """
    lacks_sshpyk = arguments.hosts is not None and not find_spec("sshpyk")
    kernels = manager(*[SSHPYK] * lacks_sshpyk)
    names = []
    if arguments.hosts is not None:
        names = hosts.named(arguments.hosts)  # what names no host is said at once
        arguments.hosts = arguments.hosts or [*hosts.groups()]
    # Of the request alone: there `--name` is the kernel's, `--gpu-name` the GPU's.
    wishes = Namespace(**{**vars(arguments), "name": arguments.gpu_name})
    _check(wishes)
    name = _name(arguments)
    others = kernels.find_kernel_specs()
    path = os.path.join(_place(arguments), name)
    for existing in (path, others.get(name)):
        if existing and os.path.lexists(existing) and not _is_ours(existing):
            raise RequestError(
                f"{existing} is a kernel that was not installed by this command. "
                "Choose another --name."
            )
    spec, resources = _stock(wishes)
    spec["display_name"] = arguments.display_name or _display_name(wishes)
    if arguments.hosts is not None:
        spec = _on_hosts(spec, wishes, arguments.hosts, name)
    before = os.path.lexists(path)
    seen = hosts.look(names) if names else None
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
    if lacks_sshpyk:
        told += f"\nWarning: sshpyk is missing. Run: {errors.install_command(SSHPYK)}"
    if seen and not seen.machines:
        told += "\nWarning: no machine answers, so it can't start now."
        why = [f"{each.host}: {each.problem}" for each in seen.answers]
        raise NoHostAnswersError("\n".join([told, *why]))
    return told


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
    """Return `Python 3 (GPU in lab: count 2)`, so that two kernels can be told apart."""
    asked = ", ".join(word.lstrip("-").replace("=", " ") for word in _words(wishes))
    place = f" in {', '.join(wishes.hosts)}" if wishes.hosts else ""
    return f"Python 3 (GPU{place}{f': {asked}' if asked else ''})"


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
            f"one that has not started after 60 s. Give --wait {LONGEST_WAIT_S}s, or wait in a "
            "notebook that runs: the magic has --wait, too."
        )


def _stock(wishes: Namespace) -> tuple[dict[str, Any], str]:
    """Return the stock kernelspec, started by this command, and the folder of its logos."""
    from ipykernel.kernelspec import RESOURCES, get_kernel_dict

    spec: dict[str, Any] = get_kernel_dict(extra_arguments=["--ext", "reserve_gpu"])
    start = [sys.executable, "-m", "reserve_gpu", "kernel", "start", *_words(wishes), "--"]
    spec["argv"] = start + spec["argv"]
    spec["metadata"] = {**spec.get("metadata", {}), MARK: {"version": 1}}
    return spec, RESOURCES


def _on_hosts(
    spec: dict[str, Any], wishes: Namespace, words: list[str], name: str
) -> dict[str, Any]:
    """Return a spec whose kernel starts on other machines. words: which those are.

    Clients that know provisioners use ours. Others, such as VS Code, run the command, which is a
    client that knows them.
    """
    if not any(getattr(wishes, option.attribute) for option in options.WHEN):
        wishes.idle, wishes.if_wanted = IDLE, True
    return {
        **spec,
        "argv": [
            *(sys.executable, "-m", "sshpyk.kernelapp", f"--SSHKernelApp.kernel_name={name}"),
            "--KernelManager.connection_file='{connection_file}'",
        ],
        "interrupt_mode": "message",
        "metadata": {
            **spec["metadata"],
            "kernel_provisioner": {
                "provisioner_name": PROVISIONER,
                "config": {
                    "hosts": words,
                    "wishes": _words(wishes),
                    "remote_kernel_name": KERNEL_NAME,
                },
            },
        },
    }


def manager(*also_missing: str) -> KernelSpecManager:
    """Return what knows the kernels of this user. Raises RequestError without Jupyter's packages.

    also_missing: packages to install with those.
    """
    if missing := [each for each in NEEDED if not find_spec(each)]:
        packages = [*missing, *also_missing]
        names = listed([package.strip("'").partition(">")[0] for package in packages])
        run = errors.install_command(" ".join(packages))
        raise RequestError(f"Missing here: {names}. Run: {run}")
    from jupyter_client.kernelspec import KernelSpecManager

    # To list kernels is to import ipykernel, and before version 7 that imports debugpy, which would
    # print a warning about frozen modules.
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    return KernelSpecManager()


def _place(arguments: Namespace) -> str:
    """Return the directory of kernels that was named, by default the user's."""
    if sum(map(bool, (arguments.user, arguments.sys_prefix, arguments.prefix))) > 1:
        raise RequestError("Give one of --user, --sys-prefix and --prefix.")
    if prefix := sys.prefix if arguments.sys_prefix else arguments.prefix:
        return os.path.abspath(f"{prefix}/share/jupyter/kernels")
    from jupyter_core.paths import jupyter_data_dir

    return os.path.join(jupyter_data_dir(), "kernels")


def _name(arguments: Namespace) -> str:
    """Return the name that was given, else `python3-gpu`, and `python3-gpu-lab` on others."""
    words = "-".join([KERNEL_NAME, *(arguments.hosts or ())])
    name: str = arguments.name or re.sub(r"[^A-Za-z0-9.]+", "-", words).strip("-")
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", name, re.IGNORECASE | re.ASCII):
        raise RequestError(
            f"{shown(name)!r} can't be the name of a kernel: letters, digits, '.', '-' and '_'."
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
            metadata = foreign.parsed(file.read(foreign.SIZE_LIMIT + 1))["metadata"]
        return isinstance(metadata, dict) and MARK in metadata
    return False
