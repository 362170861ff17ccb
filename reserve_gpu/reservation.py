"""Reserving, letting go, and what is held: what the magic calls, and what scripts call."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from reserve_gpu import choosing, cuda, loading
from reserve_gpu.errors import (
    NoDriverError,
    NoFreeDeviceError,
    ReservedAboveError,
    ReserveGPUWarning,
    TooLateError,
)
from reserve_gpu.holding import Reservation, own

if TYPE_CHECKING:
    from collections.abc import Callable

    from reserve_gpu.awaited import Wait
    from reserve_gpu.device import Device, Request
    from reserve_gpu.errors import ReserveGPUError
    from reserve_gpu.names import DeviceNames


def reserve(  # noqa: PLR0913 - all but the first are keywords
    devices: DeviceNames | None = None,
    *,
    count: int | None = None,
    min_memory: float | str | None = None,
    name: str | None = None,
    exclude: DeviceNames = (),
    wait: float | str | None = None,
    share: bool = False,
    note: str | None = None,
    progress: Callable[[Wait], object] = id,
) -> Reservation:
    """Reserve GPUs for this process and set the CUDA variables for whatever it starts next.

    devices: the ones to take, one or several, in this order, by index, UUID or its unique prefix,
        MIG instance (`1:0`) or PCI bus id; None for the first that are free.
    count: how many, where none are named; 1 by default.
    min_memory: total memory of each, in MiB or as `16GB`, `16GiB`.
    name: text that the name of each must contain, in upper or lower case.
    exclude: devices that will not do.
    wait: for how long to wait in line for them, in seconds or as `90s`, `10m`, `2h`; True for ever.
    share: also take what others use or hold, if nothing else is to be had or if it is named.
    note: a line for others to read.
    progress: called now and then while this waits.

    A process has one reservation. Asking again for what it already holds changes nothing.
    Raises RequestError, TooLateError, NoFreeDeviceError (WaitTimeoutError after a wait),
    DriverError, LockError. A ReserveGPUWarning tells that somebody else uses a device that was
    named or shared.
    """
    request = choosing.request(
        devices,
        count=count,
        min_memory=min_memory,
        name=name,
        exclude=exclude,
        share=share,
        note=note,
    )
    wait_s = None
    if wait is not None:
        from reserve_gpu import quantities

        wait_s = quantities.parse_duration(wait)
    held, said = _reserve(request, wait_s, progress)
    try:
        for text in said:
            warnings.warn(text, ReserveGPUWarning, stacklevel=2)
    except ReserveGPUWarning:  # where warnings are errors nobody gets to know of the reservation
        held.release()
        raise
    return held


def current() -> Reservation | None:
    """The reservation that this process holds, if any."""
    return own().current()


def release() -> tuple[Device, ...]:
    """Let go of what this process holds; returns the devices that it let go of.

    The variables get back the values that they had before, also where a failure had emptied
    `CUDA_VISIBLE_DEVICES`.
    """
    mine = own()
    with mine.turn:
        held = mine.reservation
        if held is None:
            mine.restore_environment()
            return ()
        held.release()
        return held.devices


def go_without() -> None:
    """Leave this process, if it holds nothing, without any GPU that it could use by mistake."""
    mine = own()
    with mine.turn:
        mine.go_without()


def go_on_after(error: ReserveGPUError) -> str:
    """Go on although nothing could be reserved, with no GPU that could be used by mistake.

    Returns how: a line to read.
    """
    if not isinstance(error, (NoDriverError, NoFreeDeviceError)):  # the last has seen to it
        go_without()
    from reserve_gpu import refusal

    held, visible = current(), cuda.read()[cuda.VISIBLE]
    is_above = isinstance(error, ReservedAboveError)
    return refusal.going_on(held.devices if held else (), visible if is_above else None)


def before_exec(reason: str | None = None) -> None:
    """Leave what this process holds to the program that it becomes with its next exec.

    reason: why it holds nothing, for that program to tell.
    """
    own().leave(reason)


def reason() -> str | None:
    """Why the program before this one, in the same process, has left it no GPU."""
    return own().reason


def _reserve(
    request: Request, wait_s: float | None, progress: Callable[[Wait], object]
) -> tuple[Reservation, list[str]]:
    """The reservation that satisfies the request, and what there is to be said against it."""
    mine = own()
    with mine.turn_within(wait_s):
        try:
            held = mine.current()
            if held and held.satisfies(request):
                return held.again(request.note), []
            cuda.remember_over_fork()
            if cuda.started():
                from reserve_gpu import refusal

                raise TooLateError(refusal.too_late(held.devices if held else ()))
            with loading.definitions():
                from reserve_gpu.nvml import Nvml

            with Nvml() as nvml:
                # The driver starts on a thread of its own; meanwhile the rest of us is loaded.
                with loading.definitions():
                    from reserve_gpu import attempt

                return attempt.run(mine, nvml, request, wait_s, progress)
        except KeyboardInterrupt:
            if wait_s is not None:  # also where the driver had not even started
                mine.go_without()
            raise
