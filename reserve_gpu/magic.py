"""%reserve_gpu: parse the line, call, show what came of it."""

from __future__ import annotations

import shlex
from contextlib import suppress
from typing import TYPE_CHECKING

from IPython.core.error import UsageError
from IPython.display import display

from reserve_gpu import errors, options, proc, this_kernel
from reserve_gpu.calls import Late
from reserve_gpu.core import api, between_cells, environment, looking
from reserve_gpu.core.session import session
from reserve_gpu.report import messages, words
from reserve_gpu.report.faces import MAGIC
from reserve_gpu.report.progress import Live

if TYPE_CHECKING:
    from argparse import Namespace

    from reserve_gpu import hosts, list_join_release
    from reserve_gpu.frameworks import check as checks
    from reserve_gpu.report import pictures
    from reserve_gpu.report.about_hosts import Hosts
    from reserve_gpu.report.status import Status
else:
    checks, pictures = Late("frameworks.check"), Late("report.pictures")
    list_join_release, hosts = Late("list_join_release"), Late("hosts")


def run(line: str) -> None:
    """Do what the line asks for.

    Raises UsageError for a line that makes no sense, which IPython shows in one line, and the
    other errors that `reserve()` raises.
    """
    try:
        _do(_parse(line))
    except errors.RequestError as error:
        raise UsageError(str(error)) from error


def tell_notices() -> None:
    """Say before a cell what has become of a reservation that ends."""
    _warn(between_cells.begin_cell())


def after_cell() -> None:
    """Let others see after a cell that this kernel is in use, and say what went wrong."""
    _warn(between_cells.end_cell())


def tell_kept() -> None:
    """Say what is kept for this kernel, which has restarted and not asked for it yet."""
    if text := api.kept():
        pictures.tell(pictures.of_line(text))


def tell_start() -> None:
    """Say which GPU the kernel was started with; or why with none, and how the machine stands."""
    if reason := session().reason:
        told = pictures.of_line(reason)
        with suppress(errors.DriverError):  # that is the reason, and is told
            told = looking.status()._replace(face=MAGIC).picture()
            told = told.below(reason.splitlines())
        pictures.tell(told)
    elif held := api.current():
        devices = [
            f"{device.label} ({errors.shown(device.name or '?')})" for device in held.devices
        ]
        place = f"runs on {errors.shown(proc.machine_name())} and " if this_kernel.origin() else ""
        pictures.tell(f"This kernel {place}has {words.listed(devices)}.")
        api.show_reserved()


def _warn(warnings: list[str]) -> None:
    if warnings:
        pictures.warn(warnings)


def _parse(line: str) -> Namespace:
    try:
        words = shlex.split(line, comments=True)
    except ValueError as error:  # a quotation mark that is not closed
        raise errors.RequestError(f"{error}: {errors.shown(line)}") from error
    return options.magic_parser().parse_args(words)


def _do(arguments: Namespace) -> None:
    asked = [name for name in ACTIONS if getattr(arguments, name) not in (None, False)]
    if len(asked) > 1:
        raise errors.RequestError(f"One at a time: --{' or --'.join(asked)}.")
    if arguments.help:
        print(options.magic_help())
    elif asked and arguments.devices:
        named = errors.shown(arguments.devices[0])
        raise errors.RequestError(TAKES_NO_NAMES[asked[0]].format(named))
    elif asked:
        ACTIONS[asked[0]](arguments)
    elif arguments.all or arguments.hosts is not None:
        raise errors.RequestError(f"--{'all' if arguments.all else 'hosts'} goes with --status.")
    else:
        _reserve(arguments)


def _release(_arguments: Namespace) -> None:
    held = api.current()
    devices = api.release()
    values = environment.read({*environment.CUDA, *(held.environ if held else ())})
    print(messages.released(devices, values, started=environment.cuda_started()))


def _check(_arguments: Namespace) -> None:
    """Show what the driver and the frameworks see."""
    try:
        with Live() as live:
            result = checks.check(progress=live.show_check, slow=live.show, face=MAGIC)
    except KeyboardInterrupt:
        raise errors.WaitInterrupted("Stopped the check; nothing was changed.") from None
    display(result)  # type: ignore[no-untyped-call]


def _status(arguments: Namespace) -> None:
    """Show how the machine stands; that there is no driver is an answer too, not a failure."""
    try:
        display(_look(arguments)._replace(is_all=arguments.all))  # type: ignore[no-untyped-call]
        if arguments.hosts is None:
            tell_kept()
    except errors.DriverError as error:
        print(error)


def _look(arguments: Namespace) -> Status | Hosts:
    if arguments.hosts is not None:
        return hosts.look_at(arguments.hosts)
    with Live() as live:
        return looking.look(live.show)._replace(face=MAGIC)


def _join(arguments: Namespace) -> None:
    which = [arguments.join] if arguments.join else []
    print(api.join(list_join_release.chosen(which, "%reserve_gpu --join")))


# What is done instead of reserving, by its option.
ACTIONS = {"release": _release, "check": _check, "status": _status, "join": _join}
TAKES_NO_NAMES = {
    "release": "--release releases all that this kernel holds; it takes no names.",
    "check": "--check is about what this kernel holds; it takes no names.",
    "status": "--status shows every GPU; it takes no names.",
    "join": "Give one name: --join {}",
}


def _reserve(arguments: Namespace) -> None:
    before = api.current()
    outcome = _ask(arguments)
    _warn(outcome.warnings + (between_cells.device_faults() if before else []))
    if outcome.excused and outcome.excused.picture:
        outcome.excused.picture.show()
    elif outcome.excused:
        print(outcome.excused)
    print(outcome.text)
    if not outcome.excused:
        api.show_reserved()


def _ask(arguments: Namespace) -> options.Outcome:
    """Reserve, and show meanwhile what is waited for."""
    try:
        with Live() as live:
            return options.reserve(arguments, MAGIC, live.show)
    except KeyboardInterrupt:
        if arguments.wait is None:  # nothing has changed
            raise
        kept = api.current()
        text = messages.interrupted(kept.devices if kept else (), MAGIC)
        raise errors.WaitInterrupted(text) from None
