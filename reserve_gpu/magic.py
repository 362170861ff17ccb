"""%reserve_gpu: parse the line, call, show what came of it; and the settings of the magic."""

from __future__ import annotations

import os
import shlex
import sys
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_magic, magics_class
from traitlets import CUnicode, TraitError, Unicode, observe, validate

from reserve_gpu import errors, options
from reserve_gpu.locks.directory import LOCK_DIRECTORY
from reserve_gpu.report import messages
from reserve_gpu.reservation import api, environment
from reserve_gpu.reservation.request import IDLE_MEMORY, parse_size

if TYPE_CHECKING:
    from argparse import Namespace

    from IPython.core.interactiveshell import ExecutionInfo, ExecutionResult, InteractiveShell

    from reserve_gpu.frameworks.check import Check
    from reserve_gpu.jupyter.completion import Completion
    from reserve_gpu.report.status import Status

MAGIC_NAME = "%reserve_gpu"
MATCHER = "reserve_gpu.jupyter.completion"
SETTINGS = {"lock_directory": LOCK_DIRECTORY, "idle_memory": IDLE_MEMORY}


class WaitInterrupted(KeyboardInterrupt):
    """Ctrl-C during a wait or a check. IPython shows one line: how things stand now."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


# -- the magic and its settings -------------------------------------------------------------------


@magics_class
class ReserveGPU(Magics):
    """Settings of %reserve_gpu."""

    lock_directory = Unicode(
        help="Directory of the locks, one for all users of this machine; empty for the default. "
        f"Kept in ${LOCK_DIRECTORY}, so that what this kernel starts uses the same."
    ).tag(config=True)
    idle_memory = CUnicode(  # people also write the number 500 here
        help="Memory in use up to which a GPU without compute processes is idle (500MiB, 2GB); "
        "empty for 1 GiB or 5 % of the GPU, whichever is less. "
        f"Kept in ${IDLE_MEMORY}."
    ).tag(config=True)

    is_loaded = False

    @line_magic
    def reserve_gpu(self, line: str) -> None:
        """Reserve a GPU for this kernel, and set the CUDA variables for what it runs next."""
        run(line)

    # Where IPython looks before the docstring; %reserve_gpu? shows what the parser says of itself.
    reserve_gpu.getdoc = options.magic_help  # type: ignore[union-attr]

    def tell_reason(self, info: ExecutionInfo) -> None:
        """Say in the first cell why the kernel was started without a GPU: earlier nobody reads."""
        reason = api.reason()
        # Front ends run code of their own unseen, without a place in the history.
        if info.store_history and self.shell:
            self.shell.events.unregister("pre_run_cell", self.tell_reason)
            print(reason, file=sys.stderr, flush=True)  # before what the cell itself prints

    @validate("idle_memory")
    def _check_size(self, proposal: dict[str, Any]) -> str:
        """Refuse what is no size.

        A value from a configuration file is checked at the first reservation instead: an error
        while the shell starts would be a traceback.
        """
        value: str = proposal["value"]
        if value and self.is_loaded:
            try:
                parse_size(value)
            except errors.RequestError as error:
                raise TraitError(str(error)) from error  # traitlets puts the old value back
        return value

    @observe(*SETTINGS)
    def _export(self, change: dict[str, Any]) -> None:
        variable = SETTINGS[change["name"]]
        if change["new"]:
            os.environ[variable] = change["new"]
        else:
            os.environ.pop(variable, None)


# -- loading and unloading ------------------------------------------------------------------------


def load(shell: InteractiveShell) -> None:
    """Register the magic and its settings with the shell."""
    unload(shell)
    # What the environment says prevails over a configuration file.
    given = {trait: os.environ[name] for trait, name in SETTINGS.items() if os.environ.get(name)}
    magics = ReserveGPU(shell=shell, parent=shell, **given)
    magics.is_loaded = True
    shell.register_magics(magics)
    shell.events.register("post_run_cell", _note_cell)
    _add_completion(shell)
    # Asking this takes over what the program before this one held (see api.before_exec), and must
    # come now: a child that the shell starts before would inherit the locks.
    if api.reason():
        shell.events.register("pre_run_cell", magics.tell_reason)


def unload(shell: InteractiveShell) -> None:
    """Take the magic and its settings out of the shell."""
    _remove_completion(shell)
    with suppress(ValueError):  # it was not loaded
        shell.events.unregister("post_run_cell", _note_cell)
    shell.magics_manager.magics["line"].pop("reserve_gpu", None)
    if magics := shell.magics_manager.registry.pop("ReserveGPU", None):
        shell.configurables.remove(magics)
        with suppress(ValueError):  # there was no reason to tell, or it was told
            shell.events.unregister("pre_run_cell", magics.tell_reason)


def _note_cell(_result: ExecutionResult) -> None:
    """After each cell: let others see that this kernel is in use, and say what went wrong."""
    for line in api.note_cell():
        print(f"Warning: {line}", file=sys.stderr)


def _add_completion(shell: InteractiveShell) -> None:
    """Let Tab complete the magic's line; the module that knows how is loaded at the first Tab."""

    @cache
    def completion() -> Completion:
        from reserve_gpu.jupyter.completion import Completion

        return Completion(shell)

    try:
        from IPython.core.completer import context_matcher
    except ImportError:  # before 8.6

        def endings(_shell: InteractiveShell, event: Any) -> list[str]:
            with suppress(Exception):  # IPython would print it into the line being typed
                return completion().endings(event)
            return []

        shell.set_hook("complete_command", endings, str_key=MAGIC_NAME)  # type: ignore[no-untyped-call]
        return

    def matcher(context: Any) -> Any:
        with suppress(Exception):  # IPython would print it into the line being typed
            if "reserve_gpu" in context.full_text:
                return completion().matches(context)
        return {"completions": []}

    if shell.Completer is not None:
        shell.Completer.custom_matchers.append(context_matcher(identifier=MATCHER)(matcher))


def _remove_completion(shell: InteractiveShell) -> None:
    matchers = getattr(shell.Completer, "custom_matchers", [])
    matchers[:] = [m for m in matchers if getattr(m, "matcher_identifier", "") != MATCHER]
    if hooks := shell.strdispatchers.get("complete_command"):
        hooks.strs.pop(MAGIC_NAME, None)


# -- what a line asks for -------------------------------------------------------------------------


def run(line: str) -> None:
    """Do what the line asks for.

    Raises UsageError for a line that makes no sense, which IPython shows in one line; other errors
    as `reserve()`.
    """
    try:
        _do(_parse(line))
    except errors.RequestError as error:
        raise UsageError(str(error)) from error


def _parse(line: str) -> Namespace:
    try:
        words = shlex.split(line, comments=True)
    except ValueError as error:  # a quotation mark that is not closed
        raise errors.RequestError(f"{error}: {errors.shown(line)}") from error
    return options.magic_parser().parse_args(words)


def _do(arguments: Namespace) -> None:
    if arguments.help:
        print(options.magic_help())
    elif arguments.release:
        _release(arguments)
    elif arguments.check:
        _check(arguments)
    elif arguments.status:
        _status(arguments)
    elif arguments.json:
        raise errors.RequestError("--json goes with --status or --check.")
    else:
        _reserve(arguments)


def _release(arguments: Namespace) -> None:
    if arguments.devices:
        raise errors.RequestError(
            "--release lets go of all that this kernel holds; it takes no names."
        )
    devices = api.release()
    print(messages.released(devices, environment.read(), started=environment.cuda_started()))


def _status(arguments: Namespace) -> None:
    """Show how the machine stands; that there is no driver is an answer too, not a failure."""
    try:
        status = api.status()
    except errors.DriverError as error:
        print(error)
    else:
        _show(status, arguments)


def _check(arguments: Namespace) -> None:
    """Show what the driver and the frameworks see."""
    from reserve_gpu.frameworks.check import check
    from reserve_gpu.report.progress import Live

    if arguments.devices:
        raise errors.RequestError("--check is about what this kernel holds; it takes no names.")
    try:
        with Live() as live:
            result = check(progress=None if arguments.json else live.show_check)
    except KeyboardInterrupt:
        raise WaitInterrupted("Stopped the check; nothing was changed.") from None
    _show(result, arguments)


def _show(result: Status | Check, arguments: Namespace) -> None:
    if arguments.json:
        import json

        print(json.dumps(result.to_dict(), indent=2))
    else:
        from IPython.display import display

        display(result)  # type: ignore[no-untyped-call]


def _reserve(arguments: Namespace) -> None:
    may_wait, before = arguments.wait is not None, api.current()
    cautions, outcome = _wait(arguments) if may_wait else options.reserve(arguments)
    if before:
        cautions += [f"Warning: {line}" for line in api.troubles()]
    for line in cautions:
        print(line, file=sys.stderr)
    print(outcome)


def _wait(arguments: Namespace) -> tuple[list[str], str]:
    """Reserve, and show the wait meanwhile."""
    from reserve_gpu.report.progress import Live

    try:
        with Live() as live:
            return options.reserve(arguments, live.show)
    except KeyboardInterrupt:
        kept = api.current()
        text = messages.interrupted(kept.devices if kept else ())
        raise WaitInterrupted(text) from None
