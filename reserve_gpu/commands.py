"""What a line of %reserve_gpu asks for: parse, call, report."""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING

from IPython.core.error import UsageError
from traitlets import TraitError

from reserve_gpu import cuda, errors, loading, reservation
from reserve_gpu.text import released, shown

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable

    from reserve_gpu.checklist import Check
    from reserve_gpu.holding import Reservation
    from reserve_gpu.table import Status

# What a line says besides is for reserve().
FLAGS = ("devices", "help", "release", "status", "check", "json", "optional")


class WaitInterrupted(KeyboardInterrupt):
    """The person has stopped a wait: one line says how things stand."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


class BadSettingError(errors.RequestError, TraitError):
    """A setting that is no good; one line to read, and traitlets puts the old one back."""


def run(line: str) -> None:
    """Do what the line asks for. Raises UsageError for what makes no sense, else as `reserve`."""
    try:
        if line.strip():
            _do(_parse(line))
        else:  # the commonest; making a parser takes as long as all the rest
            _report(reservation.reserve)
    except errors.RequestError as error:
        raise UsageError(str(error)) from error


def prepare() -> None:
    """Load what the first reservation needs."""
    with loading.definitions():
        from reserve_gpu import attempt, nvml  # noqa: F401 - it is there when it is asked for


def check_size(text: str) -> None:
    """Raise BadSettingError for what is no size."""
    from reserve_gpu import quantities

    try:
        quantities.parse_size(text)
    except errors.RequestError as error:
        raise BadSettingError(str(error)) from error


def _do(arguments: Namespace) -> None:
    if arguments.help:
        from reserve_gpu import options

        print(options.magic_help())
    elif arguments.release:
        _release(arguments)
    elif arguments.check:
        _check(arguments)
    elif arguments.status or arguments.json:
        _status(arguments)
    elif arguments.optional:
        _reserve_or_go_on(arguments)
    else:
        _report(lambda: _reserve(arguments))


def _parse(line: str) -> Namespace:
    import shlex

    from reserve_gpu import options

    try:
        return options.magic_parser().parse_args(shlex.split(line, comments=True))
    except ValueError as error:
        if isinstance(error, errors.RequestError):
            raise
        # an open quotation mark
        raise errors.RequestError(f"{error}: {shown(line)}") from error


def _release(arguments: Namespace) -> None:
    if arguments.devices:
        raise errors.RequestError(
            "--release lets go of all that this kernel holds; it takes no names."
        )
    devices = reservation.release()
    print(released(devices, cuda.read(), started=cuda.started()))


def _status(arguments: Namespace) -> None:
    """Show how the machine stands, also where that is that there is no driver."""
    from reserve_gpu.overview import status

    if not arguments.status:
        raise errors.RequestError("--json goes with --status or --check.")
    try:
        found = status()
    except errors.DriverError as error:
        print(error)
        return
    _show(found, arguments)


def _check(arguments: Namespace) -> None:
    """Show what the driver and the frameworks see."""
    from reserve_gpu.frameworks import check
    from reserve_gpu.live import Live

    if arguments.devices:
        raise errors.RequestError("--check is about what this kernel holds; it takes no names.")
    try:
        with Live() as live:
            found = check(progress=id if arguments.json else live.show_check)
    except KeyboardInterrupt:
        raise WaitInterrupted("Stopped the check; nothing was changed.") from None
    _show(found, arguments)


def _show(found: Status | Check, arguments: Namespace) -> None:
    if arguments.json:
        import json

        print(json.dumps(found.to_dict(), indent=2))
    else:
        from IPython.display import display

        display(found)  # type: ignore[no-untyped-call]


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


def _reserve(arguments: Namespace) -> Reservation:
    """Reserve, and meanwhile show a wait if this request may wait."""
    devices = arguments.devices or None
    wanted = {key: value for key, value in vars(arguments).items() if key not in FLAGS}
    if arguments.wait is None:
        return reservation.reserve(devices, **wanted)
    from reserve_gpu import awaited
    from reserve_gpu.live import Live

    try:
        with Live() as live:
            return reservation.reserve(devices, progress=live.show, **wanted)
    except KeyboardInterrupt:
        held = reservation.current()
        raise WaitInterrupted(awaited.interrupted(held.devices if held else ())) from None


def _reserve_or_go_on(arguments: Namespace) -> None:
    """Reserve, or say why there is no GPU to be had, and see that none is used by mistake."""
    try:
        _report(lambda: _reserve(arguments))
    except errors.EXCUSED as error:
        print(f"{error}\n{reservation.go_on_after(error)}")
