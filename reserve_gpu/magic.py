"""%reserve_gpu: parse, reserve, report. The only module that imports IPython."""

from __future__ import annotations

import os
import shlex
import sys
import warnings
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments
from traitlets import TraitError, Unicode, validate

from reserve_gpu import choosing, cuda, names, options, settings
from reserve_gpu.errors import (
    DriverError,
    LockError,
    NoDriverError,
    NoFreeDeviceError,
    RequestError,
    ReserveGPUWarning,
)

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from IPython.core.interactiveshell import InteractiveShell

REQUEST = ("count", "min_memory", "name", "exclude", "share", "note")  # as reserve() takes them
VARIABLES = {"lock_directory": settings.LOCK_DIRECTORY, "idle_memory": settings.IDLE_MEMORY}


def with_options(function: Any) -> Any:
    """Give the magic the arguments of the table in options.py."""
    for option in reversed(options.REQUEST + options.MAGIC):
        function = argument(*option.flags, **option.settings)(function)  # type: ignore[no-untyped-call]
    return magic_arguments()(function)  # type: ignore[no-untyped-call]


@magics_class
class ReserveGPU(Magics):
    """Settings of %reserve_gpu."""

    lock_directory = Unicode(
        help="Directory of the locks, one for all users of this machine; empty for the default. "
        f"Kept in ${settings.LOCK_DIRECTORY}, so that what this kernel starts uses the same."
    ).tag(config=True)
    idle_memory = Unicode(
        help="Memory in use up to which a GPU without compute processes is idle (500MiB, 2GB); "
        "empty for 1 GiB or 5 % of the GPU, whichever is less. "
        f"Kept in ${settings.IDLE_MEMORY}."
    ).tag(config=True)

    @line_magic
    @with_options
    def reserve_gpu(self, line: str) -> None:
        """Reserve a GPU for this kernel, and set the CUDA variables for what it runs next."""
        arguments = self._parse(line)
        from reserve_gpu import report, reservation

        if arguments.release:
            devices = reservation.release()
            print(report.released(devices, cuda.read(), started=cuda.started()))
            return
        try:
            self._reserve(arguments)
        except RequestError as error:
            raise UsageError(str(error)) from error
        except (NoFreeDeviceError, DriverError, LockError) as error:
            if not arguments.optional:
                raise
            if not isinstance(error, NoDriverError):
                reservation.go_without()
            print(f"{error}\nGoing on without a GPU.")

    def _reserve(self, arguments: Namespace) -> None:
        """Reserve and report; our own warnings become one line each."""
        from reserve_gpu import reservation

        wanted = {key: value for key, value in vars(arguments).items() if key in REQUEST}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ReserveGPUWarning)
            held = reservation.reserve(arguments.devices or None, **wanted)
        for one in caught:
            if issubclass(one.category, ReserveGPUWarning):
                print(f"Warning: {one.message}", file=sys.stderr)
            else:
                warnings.showwarning(one.message, one.category, one.filename, one.lineno)
        print(held)

    def _parse(self, line: str) -> Namespace:
        parser: ArgumentParser = self.reserve_gpu.parser  # type: ignore[union-attr]
        try:
            return parser.parse_args(shlex.split(line))
        except ValueError as error:  # an open quotation mark
            raise UsageError(f"{error}: {names.shown(line)}") from error

    def adopt_environment(self) -> None:
        """Let a setting that is in the environment prevail over one from a configuration file."""
        for trait, variable in VARIABLES.items():
            if value := os.environ.get(variable):
                setattr(self, trait, value)
            else:
                self._export({"name": trait, "new": getattr(self, trait)})
        self.observe(self._export, list(VARIABLES))

    @validate("idle_memory")
    def _check_size(self, proposal: dict[str, Any]) -> str:
        value: str = proposal["value"]
        try:
            if value:
                choosing.parse_size(value)
        except RequestError as error:
            raise TraitError(str(error)) from error
        return value

    def _export(self, change: dict[str, Any]) -> None:
        cuda.write({VARIABLES[change["name"]]: change["new"] or None})


def load(shell: InteractiveShell) -> None:
    """Register the magic and its settings with the shell."""
    unload(shell)
    magics = ReserveGPU(shell=shell, parent=shell)
    magics.adopt_environment()
    shell.register_magics(magics)
    shell.configurables.append(magics)  # type: ignore[arg-type]


def unload(shell: InteractiveShell) -> None:
    """Take the magic and its settings out of the shell."""
    shell.magics_manager.magics["line"].pop("reserve_gpu", None)
    shell.magics_manager.registry.pop("ReserveGPU", None)
    shell.configurables[:] = [c for c in shell.configurables if type(c).__name__ != "ReserveGPU"]
