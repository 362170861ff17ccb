"""%reserve_gpu in a shell: the magic and its settings. What a line does is loaded by the first."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from IPython.core.magic import Magics, line_magic, magics_class
from traitlets import CUnicode, Unicode, validate

from reserve_gpu import settings

if TYPE_CHECKING:
    from types import ModuleType

    from IPython.core.interactiveshell import ExecutionResult, InteractiveShell

    from reserve_gpu.completion import Completion

MAGIC_NAME, MATCHER = "%reserve_gpu", "reserve_gpu.completion"
VARIABLES = {"lock_directory": settings.LOCK_DIRECTORY, "idle_memory": settings.IDLE_MEMORY}


def _help() -> str:
    from reserve_gpu.options import magic_help

    return magic_help()


def with_help(function: Any) -> Any:
    """Let %reserve_gpu? show what the parser says, which is made only when somebody asks."""
    function.getdoc = _help  # where IPython looks first
    return function


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
        _commands().run(line)

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
            _commands().check_size(value)
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
    if settings.HELD in os.environ:
        _adopt(shell)


def _adopt(shell: InteractiveShell) -> None:
    """Take over what the program before this one held, before the shell starts a child.

    Where that is no GPU, the first cell says why: what is said before it nobody sees.
    """
    from reserve_gpu import reservation

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


def _note_cell(result: ExecutionResult) -> None:
    """A cell has ended: who holds a GPU lets others see that it is not forgotten.

    And whoever has just loaded the extension by hand reserves next: at the end of a cell nobody
    waits for the rest of it to be loaded. Every shell would, if that were done at its start.
    """
    if holding := sys.modules.get("reserve_gpu.holding"):
        holding.note_cell()
    elif "reserve_gpu" in (getattr(result.info, "raw_cell", None) or ""):
        with suppress(Exception):  # what is wrong, the line itself can say
            _commands().prepare()


def _commands() -> ModuleType:
    """What a line needs."""
    from reserve_gpu import loading

    with loading.definitions():
        from reserve_gpu import commands

    return commands
