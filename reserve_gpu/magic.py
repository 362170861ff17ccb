"""%reserve_gpu in a shell: its settings, and the empty line: reserve, report."""

from __future__ import annotations

import os
import sys
import warnings
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_magic, magics_class
from traitlets import CUnicode, TraitError, Unicode, validate

from reserve_gpu import errors, myself, reservation, settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from IPython.core.interactiveshell import InteractiveShell

    from reserve_gpu.completion import Completion
    from reserve_gpu.holding import Reservation

MAGIC_NAME, MATCHER = "%reserve_gpu", "reserve_gpu.completion"
VARIABLES = {"lock_directory": settings.LOCK_DIRECTORY, "idle_memory": settings.IDLE_MEMORY}


def _help() -> str:
    from reserve_gpu.options import magic_parser

    return magic_parser().format_help()


def with_help(function: Any) -> Any:
    """Let %reserve_gpu? show what the parser says, which is made only when somebody asks."""
    function.getdoc = _help  # where IPython looks first
    return function


class BadSettingError(errors.RequestError, TraitError):
    """A setting that is no good; one line to read, and traitlets puts the old one back."""


@magics_class
class ReserveGPU(Magics):
    """Settings of %reserve_gpu."""

    lock_directory = Unicode(
        help="Directory of the locks, one for all users of this machine; empty for the default. "
        f"Kept in ${settings.LOCK_DIRECTORY}, so that what this kernel starts uses the same."
    ).tag(config=True)
    idle_memory = CUnicode(  # a bare number is natural too
        help="Memory in use up to which a GPU without compute processes is idle (500MiB, 2GB); "
        "empty for 1 GiB or 5 % of the GPU, whichever is less. "
        f"Kept in ${settings.IDLE_MEMORY}."
    ).tag(config=True)

    _is_adopted = False

    @line_magic
    @with_help
    def reserve_gpu(self, line: str) -> None:
        """Reserve a GPU for this kernel, and set the CUDA variables for what it runs next."""
        try:
            if line.strip():
                from reserve_gpu import commands

                commands.run(line, _report)
            else:
                _report(reservation.reserve)
        except errors.RequestError as error:
            raise UsageError(str(error)) from error

    def adopt_environment(self) -> None:
        """Let a setting that is in the environment prevail over one from a configuration file."""
        for trait, variable in VARIABLES.items():
            if value := os.environ.get(variable):
                setattr(self, trait, value)
            else:
                self._export({"name": trait, "new": getattr(self, trait)})
        self._is_adopted = True
        self.observe(self._export, list(VARIABLES))

    @validate("idle_memory")
    def _check_size(self, proposal: dict[str, Any]) -> str:
        value: str = proposal["value"]
        if value and self._is_adopted:  # what is wrong before that is said when it is needed
            from reserve_gpu import quantities

            try:
                quantities.parse_size(value)
            except errors.RequestError as error:
                raise BadSettingError(str(error)) from error
        return value

    def _export(self, change: dict[str, Any]) -> None:
        variable = VARIABLES[change["name"]]
        if change["new"]:
            os.environ[variable] = change["new"]
        else:
            os.environ.pop(variable, None)


def load(shell: InteractiveShell) -> None:
    """Register the magic and its settings with the shell."""
    unload(shell)
    magics = ReserveGPU(shell=shell, parent=shell)
    magics.adopt_environment()
    shell.register_magics(magics)
    shell.configurables.append(magics)  # type: ignore[arg-type]
    shell.events.register("post_run_cell", _note_cell)
    _add_completion(shell)
    if myself.held_by() == os.getpid():
        _adopt(shell)


def _adopt(shell: InteractiveShell) -> None:
    """Take over what the program before this one held, before the shell starts a child.

    Where that is no GPU, the first cell says why: what is said before it nobody sees.
    """
    if not (reason := reservation.reason()):
        return

    def tell(info: Any) -> None:
        if info.store_history:  # else it is a front end that asks, not a person
            shell.events.unregister("pre_run_cell", tell)
            print(reason, file=sys.stderr, flush=True)  # before what the cell prints

    shell.events.register("pre_run_cell", tell)


def unload(shell: InteractiveShell) -> None:
    """Take the magic and its settings out of the shell."""
    with suppress(ValueError):  # it was not loaded
        shell.events.unregister("post_run_cell", _note_cell)
    _remove_completion(shell)
    shell.magics_manager.magics["line"].pop("reserve_gpu", None)
    shell.magics_manager.registry.pop("ReserveGPU", None)
    shell.configurables[:] = [c for c in shell.configurables if type(c).__name__ != "ReserveGPU"]


def _add_completion(shell: InteractiveShell) -> None:
    """Let Tab complete the magic's line; what knows how is loaded at the first one."""
    known: list[Completion] = []

    def completion() -> Completion:
        if not known:
            from reserve_gpu.completion import Completion

            known.append(Completion(shell))
        return known[0]

    try:
        from IPython.core.completer import context_matcher
    except ImportError:  # before 8.6

        def endings(_shell: InteractiveShell, event: Any) -> list[str]:
            try:
                return completion().endings(event)
            except Exception:  # noqa: BLE001 - whatever it is, it does not belong into the prompt
                return []

        shell.set_hook("complete_command", endings, str_key=MAGIC_NAME)  # type: ignore[no-untyped-call]
        return

    def matcher(context: Any) -> Any:
        nothing: dict[str, Any] = {"completions": []}
        if "reserve_gpu" not in context.full_text:
            return nothing
        try:
            return completion().matches(context)
        except Exception:  # noqa: BLE001 - whatever it is, it does not belong into the prompt
            return nothing

    if shell.Completer is not None:
        shell.Completer.custom_matchers.append(context_matcher(identifier=MATCHER)(matcher))


def _remove_completion(shell: InteractiveShell) -> None:
    matchers = getattr(shell.Completer, "custom_matchers", [])
    matchers[:] = [m for m in matchers if getattr(m, "matcher_identifier", "") != MATCHER]
    if hooks := shell.strdispatchers.get("complete_command"):
        hooks.strs.pop(MAGIC_NAME, None)


def _note_cell(_result: object) -> None:
    """A cell has ended: who holds a GPU lets others see that it is not forgotten."""
    if holding := sys.modules.get("reserve_gpu.holding"):
        holding.note_cell()


def _report(reserve: Callable[[], Reservation]) -> None:
    """Reserve and report; our own warnings become one line each."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", errors.ReserveGPUWarning)
        held = reserve()
    for one in caught:
        if issubclass(one.category, errors.ReserveGPUWarning):
            print(f"Warning: {one.message}", file=sys.stderr)
        else:
            warnings.showwarning(one.message, one.category, one.filename, one.lineno)
    print(held)
