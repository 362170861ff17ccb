"""%reserve_gpu: parse the line, call, show what came of it; and the settings of the magic."""

from __future__ import annotations

import os
import shlex
import sys
import warnings
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_magic, magics_class
from traitlets import CUnicode, TraitError, Unicode, validate

from reserve_gpu import errors, options
from reserve_gpu.locks.directory import LOCK_DIRECTORY
from reserve_gpu.report import messages
from reserve_gpu.report.progress import Live
from reserve_gpu.reservation import api, environment
from reserve_gpu.reservation.request import IDLE_MEMORY, parse_size

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable

    from IPython.core.interactiveshell import ExecutionInfo, ExecutionResult, InteractiveShell

    from reserve_gpu.frameworks.check import Check
    from reserve_gpu.jupyter.completion import Completion
    from reserve_gpu.report.status import Status
    from reserve_gpu.reservation.session import Reservation

MAGIC_NAME = "%reserve_gpu"
MATCHER = "reserve_gpu.jupyter.completion"
SETTINGS = {"lock_directory": LOCK_DIRECTORY, "idle_memory": IDLE_MEMORY}


class WaitInterrupted(KeyboardInterrupt):
    """Ctrl-C during a wait or a check. IPython shows one line: how things stand now."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


class BadSettingError(errors.RequestError, TraitError):
    """A setting that makes no sense; as it is a TraitError, traitlets puts the old value back."""


# -- the magic and its settings -------------------------------------------------------------------


def with_help(function: Any) -> Any:
    """Let %reserve_gpu? show the parser's help, which is made only when somebody asks."""
    function.getdoc = options.magic_help  # where IPython looks before the docstring
    return function


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

    _has_started = False

    @line_magic
    @with_help
    def reserve_gpu(self, line: str) -> None:
        """Reserve a GPU for this kernel, and set the CUDA variables for what it runs next."""
        run(line)

    def read_environment(self) -> None:
        """Take the settings from the environment, which prevails over a configuration file.

        From then on a change of a setting changes the environment, for what the kernel starts.
        """
        for trait, variable in SETTINGS.items():
            if value := os.environ.get(variable):
                setattr(self, trait, value)
            else:
                self._export({"name": trait, "new": getattr(self, trait)})
        self._has_started = True
        self.observe(self._export, list(SETTINGS))

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
        if value and self._has_started:
            try:
                parse_size(value)
            except errors.RequestError as error:
                raise BadSettingError(str(error)) from error
        return value

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
    magics = ReserveGPU(shell=shell, parent=shell)
    magics.read_environment()
    shell.register_magics(magics)
    shell.configurables.append(magics)  # type: ignore[arg-type]
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
    magics = shell.magics_manager.registry.pop("ReserveGPU", None)
    if magics is None:
        return
    with suppress(ValueError):  # there was no reason to tell, or it was told
        shell.events.unregister("pre_run_cell", magics.tell_reason)
    shell.configurables[:] = [other for other in shell.configurables if other is not magics]


def _note_cell(_result: ExecutionResult) -> None:
    """After each cell: let others see that this kernel is in use, and say what went wrong."""
    for line in api.note_cell():
        print(f"Warning: {line}", file=sys.stderr)


def _add_completion(shell: InteractiveShell) -> None:
    """Let Tab complete the magic's line; the module that knows how is loaded at the first Tab."""
    loaded: list[Completion] = []

    def completion() -> Completion:
        if not loaded:
            from reserve_gpu.jupyter.completion import Completion

            loaded.append(Completion(shell))
        return loaded[0]

    try:
        from IPython.core.completer import context_matcher
    except ImportError:  # before 8.6

        def endings(_shell: InteractiveShell, event: Any) -> list[str]:
            try:
                return completion().endings(event)
            except Exception:  # noqa: BLE001 - IPython would print it into the line being typed
                return []

        shell.set_hook("complete_command", endings, str_key=MAGIC_NAME)  # type: ignore[no-untyped-call]
        return

    def matcher(context: Any) -> Any:
        nothing: dict[str, Any] = {"completions": []}
        if "reserve_gpu" not in context.full_text:
            return nothing
        try:
            return completion().matches(context)
        except Exception:  # noqa: BLE001 - IPython would print it into the line being typed
            return nothing

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
    elif arguments.optional:
        _reserve_or_go_on(arguments)
    else:
        _report(lambda: _reserve(arguments))


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


def _report(reserve: Callable[[], Reservation]) -> None:
    """Reserve and report; each warning of ours becomes one line, others stay as they are."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", errors.ReserveGPUWarning)
        reservation = reserve()
    for warning in caught:
        if issubclass(warning.category, errors.ReserveGPUWarning):
            print(f"Warning: {warning.message}", file=sys.stderr)
        else:
            warnings.showwarning(
                warning.message, warning.category, warning.filename, warning.lineno
            )
    print(reservation)


def _reserve(arguments: Namespace) -> Reservation:
    """Reserve, and meanwhile show the wait if this request may wait."""
    wishes = options.wishes(arguments)
    if arguments.wait is None:
        return api.reserve(**wishes)
    try:
        with Live() as live:
            return api.reserve(progress=live.show, **wishes)
    except KeyboardInterrupt:
        kept = api.current()
        text = messages.interrupted(kept.devices if kept else ())
        raise WaitInterrupted(text) from None


def _reserve_or_go_on(arguments: Namespace) -> None:
    """Reserve, or say why there is no GPU to be had, and see that none is used by mistake."""
    try:
        _report(lambda: _reserve(arguments))
    except errors.EXCUSED as error:
        print(f"{error}\n{api.go_on_after(error)}")
