"""Messages about reservations, releases and waits. Warnings and errors are in `notices.py`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from reserve_gpu.gpus.names import gpu_index
from reserve_gpu.model.devices import State
from reserve_gpu.model.requests import Request
from reserve_gpu.model.untrusted import sanitize
from reserve_gpu.render import durations, phrases
from reserve_gpu.render.phrases import labels, listed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reserve_gpu.model.devices import Device
    from reserve_gpu.model.holders import DeviceStatus
    from reserve_gpu.model.progress import Slow
    from reserve_gpu.model.requests import Lease, Variables
    from reserve_gpu.render.frontends import Frontend

VARIABLE = "CUDA_VISIBLE_DEVICES"
NO_DEVICES = ("-1", "NoDevFiles")  # values of CUDA_VISIBLE_DEVICES commonly used to hide all GPUs
ANY = Request()  # a request for any one GPU


# -- reservations and releases ---------------------------------------------------------------------


def variables(environ: Variables) -> list[str]:
    """Return a line for each variable that is set, such as `CUDA_VISIBLE_DEVICES = '2'`."""
    return [f"{name} = {value!r}" for name, value in sorted(environ.items()) if value is not None]


def command_ends(lease: Lease, now: float) -> str:
    """Return the message that says when a command will be terminated."""
    until = lease.until or now
    if lease.is_jobs:
        return f"The job and the command end at {durations.moment(until, now)}."
    return (
        f"The command gets SIGTERM at {durations.moment(until, now)}, and SIGKILL a minute later."
    )


def released(devices: Sequence[Device], environ: Variables, *, started: bool) -> str:
    """Return the message about a release.

    Args:
        devices: The released devices.
        environ: The environment variables after the release. An unset variable is None.
        started: Whether CUDA is running in this process. If so, its GPU memory stays in use.
    """
    lines = [f"Released {labels(devices)}." if devices else "This kernel holds no GPU."]
    if started and devices:
        lines.append(
            "CUDA is still running in this kernel. Restart it to free the GPU's memory as well."
        )
    lines += [
        f"{name} is not set" if value is None else f"{name} = {value!r}"
        for name, value in sorted(environ.items())
    ]
    return "\n".join(lines)


def left_with(kept: Sequence[Device], frontend: Frontend) -> str:
    """Return the sentence about the devices that this process keeps after a refusal.

    If the process keeps no devices, the sentence says that no GPU is visible. For a shell command
    that keeps no devices, the result is empty.
    """
    if kept:
        return f"{frontend.here.capitalize()} keeps {labels(kept)}; nothing was changed."
    return f"No GPU is visible to this {frontend.sight}." if frontend.sight else ""


def continuing(held: Sequence[Device], visible: str | None = None) -> str:
    """Return the message for a kernel that continues without the GPU that it requested.

    Args:
        held: The devices that the kernel still holds.
        visible: The kernel's CUDA_VISIBLE_DEVICES, if it is still set.
    """
    if held:
        return f"Continuing with {labels(held)}, as before."
    if visible:
        return f"Continuing with CUDA_VISIBLE_DEVICES = {sanitize(visible)!r}, as before."
    return "Continuing without a GPU."


def joined(devices: Sequence[Device], name: str | None, environ: Mapping[str, str]) -> str:
    """Return the message for a process that has joined a reservation.

    Args:
        devices: The devices of the reservation.
        name: The holder's name.
        environ: The environment variables that are set by joining.
    """
    holder = sanitize(name or "a process", phrases.NOTEBOOK_LIMIT)
    return "\n".join([f"Joined {holder} on {labels(devices)}.", *variables(environ)])


def kept_for_restart(devices: Sequence[Device], until: float) -> str:
    """Return the message for a restarted kernel whose devices are kept until it reserves again."""
    at = time.strftime("%H:%M:%S", time.localtime(until))
    return (
        f"{labels(devices)} {phrases.be(len(devices))} kept for this kernel until {at}. "
        f"To reserve {pronoun(devices)} again:\n%reserve_gpu"
    )


# -- waits -----------------------------------------------------------------------------------------


def request_text(request: Request) -> str:
    """Describe a request, such as `GPU0 and GPU1:0` or `2 GPUs of 16.0 GiB or more`."""
    text = "a GPU" if request.needed == 1 else f"{request.needed} GPUs"
    if request.devices:
        text = listed([_label(name) for name in request.devices])
    if request.min_memory_mib:
        text += f" of {phrases.gib(request.min_memory_mib)} or more"
    if request.model:
        text += f" with {sanitize(request.model)!r} in the name"
    if size := request.terms.size:
        of = "of each of" if request.needed > 1 else "of"
        return f"{phrases.part(size)} {of} {text}"
    return text


def slow(news: Slow) -> str:
    """Return the message about a slow driver call.

    Without persistence mode, the driver takes up to 3 s to initialize an unused GPU.
    """
    function = f" ({news.what})" if news.what else ""
    return (
        f"Still waiting for the NVIDIA driver after {durations.duration(news.waited_s)}{function}."
    )


def interrupted(
    held: Sequence[Device], frontend: Frontend, place_kept_s: float | None = None
) -> str:
    """Return the message about an interrupted wait.

    Args:
        held: The devices that this process keeps.
        frontend: The frontend.
        place_kept_s: The time for which the position in the queue is kept, in seconds, or None if
            this process has no position in the queue.
    """
    text = f"Stopped waiting; nothing is reserved. {left_with((), frontend)}".rstrip()
    if held:
        text = f"Stopped waiting. {frontend.here.capitalize()} keeps {labels(held)}."
    if place_kept_s:
        kept = durations.duration(place_kept_s)
        text += f"\nYour place in the queue is kept for {kept}; the same request returns to it."
    return text


# -- helpers ---------------------------------------------------------------------------------------


def limit_line(limit: str, count: int) -> str:
    """Return the sentence that says how an inherited CUDA_VISIBLE_DEVICES limits this process.

    Args:
        limit: The value of CUDA_VISIBLE_DEVICES.
        count: The number of devices that this process may use.
    """
    devices = "1 device" if count == 1 else f"{count} devices"
    value = sanitize(limit)
    return f"{VARIABLE}={value!r} was set elsewhere. It limits this process to {devices}."


def hides_on_purpose(limit: str) -> bool:
    """Return whether CUDA_VISIBLE_DEVICES is set to a value commonly used to hide all GPUs."""
    return not limit.strip() or limit.strip() in NO_DEVICES


def fit(rows: Sequence[DeviceStatus]) -> list[DeviceStatus]:
    """Return the devices that match the request, whether or not they are free."""
    return [row for row in rows if row.state is not State.UNFIT]


def pronoun(devices: Sequence[Device]) -> str:
    """Return `it` for one device, and `them` otherwise."""
    return "it" if len(devices) == 1 else "them"


def _label(name: str) -> str:
    """Return `GPU2` for the names `2`, `gpu2` and `cuda:2`. Other names are unchanged."""
    is_number = gpu_index(name) is not None
    return f"GPU{name.lower().removeprefix('gpu').removeprefix('cuda:')}" if is_number else name
