"""The steps of install.sh that need Python, run from its checkout: nothing is installed yet."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import io
import os
import shlex
import shutil
import sys
import sysconfig
from typing import TYPE_CHECKING

from reserve_gpu import config_file
from reserve_gpu.config_file import InstallError

if TYPE_CHECKING:
    from collections.abc import Callable

PIP_YES = {"y", "yes", "t", "true", "on", "1"}  # what pip takes for yes in its variables


def main(step: str) -> None:
    """Run one of STEPS; where it can't be done, leave with a line on stderr and the exit code 1."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # any path can be printed
    try:
        STEPS[step]()
    except (InstallError, OSError) as error:
        sys.exit(f"install.sh: {error}")


def check_install() -> None:
    """Find what would stand in the way, before anything is changed."""
    check_not_managed()
    check_pip()
    config_file.check_add(config_file.config_path())


def add() -> None:
    """Let IPython load what pip has installed, and say what was done."""
    package = installed()
    if not package:
        raise InstallError(
            f"pip installed reserve_gpu where {sys.executable} does not look for packages"
        )
    place = package.locate_file("")
    print(f"Installed reserve_gpu {package.version} in {place} for {sys.executable}")
    print(config_file.add(config_file.config_path()))
    beside = os.path.join(os.path.dirname(sys.executable), "ipython")
    is_first = shutil.which("ipython") == beside
    command = "ipython" if is_first else f"{shlex.quote(sys.executable)} -m IPython"
    print(f"Try it: {command} -c '%reserve_gpu'")


def check_uninstall() -> None:
    """Find what would stand in the way, before anything is changed."""
    config_file.check_remove(config_file.config_path())
    if installed():
        check_pip()


def remove() -> None:
    """Let IPython load it no more, and say what was done."""
    config_file.remove(config_file.config_path())


def is_installed() -> None:
    """Leave with the exit code 1 where the package is not installed."""
    sys.exit(not installed())


STEPS: dict[str, Callable[[], None]] = {
    "check-install": check_install,
    "add": add,
    "check-uninstall": check_uninstall,
    "remove": remove,
    "is-installed": is_installed,
}


def installed() -> importlib.metadata.Distribution | None:
    """Return the package that this Python has."""
    try:
        return importlib.metadata.distribution("reserve_gpu")
    except importlib.metadata.PackageNotFoundError:
        return None


def check_pip() -> None:
    """Raise InstallError where there is no pip."""
    if not importlib.util.find_spec("pip"):
        python = sys.executable
        raise InstallError(
            f"{python} has no pip; add it: {shlex.quote(python)} -m ensurepip --upgrade"
        )


def check_not_managed() -> None:
    """Raise InstallError where pip would refuse: https://peps.python.org/pep-0668/."""
    notice = os.path.join(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED")
    is_forced = os.environ.get("PIP_BREAK_SYSTEM_PACKAGES", "").lower() in PIP_YES
    if sys.prefix != sys.base_prefix or not os.path.exists(notice) or is_forced:
        return
    checkout = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    script = shlex.quote(os.path.join(checkout, "install.sh"))
    python = shlex.quote(sys.executable)
    apt = "" if importlib.util.find_spec("ensurepip") else "  sudo apt install python3-venv\n"
    raise InstallError(
        f"{sys.executable} is externally managed: it is not for pip to install into\n"
        f"({notice}). Nothing was changed.\n"
        f"Make a virtual environment and install there:\n{apt}"
        f"  {python} -m venv ~/.venvs/reserve_gpu\n"
        f"  . ~/.venvs/reserve_gpu/bin/activate\n"
        f"  sh {script}"
    )
