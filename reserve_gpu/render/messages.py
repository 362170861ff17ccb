"""Sentences about a reservation, its release and a wait; see `notices.py` for notices."""

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
NO_DEVICES = ("-1", "NoDevFiles")  # as CUDA_VISIBLE_DEVICES, what hides all of them
ANY = Request()  # a GPU, whichever


# -- what was done ---------------------------------------------------------------------------------


def variables(environ: Variables) -> list[str]:
    """Return a line for each variable that is set: `CUDA_VISIBLE_DEVICES = '2'`."""
    return [f"{name} = {value!r}" for name, value in sorted(environ.items()) if value is not None]


def command_ends(lease: Lease, now: float) -> str:
    """Say when a command will be ended."""
    until = lease.until or now
    if lease.is_jobs:
        return f"The job ends at {durations.moment(until, now)}, and the command with it."
    return (
        f"The command gets SIGTERM at {durations.moment(until, now)}, and SIGKILL a minute later."
    )


def released(devices: Sequence[Device], environ: Variables, *, started: bool) -> str:
    """Return the lines that a release prints.

    Args:
        devices: The released devices.
        environ: The variables after the release.
        started: CUDA runs in this process, so its memory on the devices stays in use.
    """
    lines = [f"Released {labels(devices)}." if devices else "This kernel holds no GPU."]
    if started and devices:
        lines.append("CUDA still runs in this kernel: restart it to free the GPU's memory as well.")
    lines += [
        f"{name} is not set" if value is None else f"{name} = {value!r}"
        for name, value in sorted(environ.items())
    ]
    return "\n".join(lines)


def left_with(kept: Sequence[Device], frontend: Frontend) -> str:
    """Return a sentence about the devices that stay reserved after a refusal."""
    if kept:
        return f"{frontend.here.capitalize()} keeps {labels(kept)}; nothing was changed."
    return f"No GPU is visible to this {frontend.sight}." if frontend.sight else ""


def going_on(held: Sequence[Device], visible: str | None = None) -> str:
    """Return the line for a kernel that continues without the GPU that it requested.

    Args:
        held: The devices that it still holds.
        visible: Its CUDA_VISIBLE_DEVICES, if it keeps that.
    """
    if held:
        return f"Going on with {labels(held)}, as before."
    if visible:
        return f"Going on with CUDA_VISIBLE_DEVICES = {sanitize(visible)!r}, as before."
    return "Going on without a GPU."


def joined(devices: Sequence[Device], name: str | None, environ: Mapping[str, str]) -> str:
    """Return the lines for a process that has joined the holder of this name."""
    where = sanitize(name or "a process", phrases.NOTEBOOK_LIMIT)
    return "\n".join([f"Joined {where} on {labels(devices)}.", *variables(environ)])


def kept(devices: Sequence[Device], until: float) -> str:
    """Say that devices are kept for this kernel, which has restarted and not asked for them yet."""
    at = time.strftime("%H:%M:%S", time.localtime(until))
    return (
        f"{labels(devices)} {phrases.be(len(devices))} kept for this kernel until {at}. "
        f"%reserve_gpu takes {them(devices)} again."
    )


# -- a wait ----------------------------------------------------------------------------------------


def asked(request: Request) -> str:
    """Return the request in words: `GPU0 and GPU1:0`, `2 GPUs of 16.0 GiB or more`."""
    what = "a GPU" if request.needed == 1 else f"{request.needed} GPUs"
    if request.devices:
        what = listed([_label(name) for name in request.devices])
    if request.min_memory_mib:
        what += f" of {phrases.gib(request.min_memory_mib)} or more"
    if request.model:
        what += f" with {sanitize(request.model)!r} in the name"
    if size := request.terms.size:
        of = "of each of" if request.needed > 1 else "of"
        return f"{phrases.part(size)} {of} {what}"
    return what


def slow(news: Slow) -> str:
    """Say what is waited for. A GPU that nobody uses can take 3 s to wake up."""
    what = f" ({news.what})" if news.what else ""
    return f"Waiting for the NVIDIA driver for {durations.duration(news.waited_s)}{what}."


def interrupted(held: Sequence[Device], frontend: Frontend) -> str:
    """Return the sentence after an interrupted wait."""
    if held:
        return f"Stopped waiting. {frontend.here.capitalize()} keeps {labels(held)}."
    return f"Stopped waiting; nothing is reserved. {left_with((), frontend)}".rstrip()


# -- parts of them ---------------------------------------------------------------------------------


def limit_line(limit: str, count: int) -> str:
    """Return the sentence about an inherited CUDA_VISIBLE_DEVICES that leaves `count` devices."""
    inside = "that one" if count == 1 else "those"
    return f"{VARIABLE}={sanitize(limit)!r} was set elsewhere: it limits this process to {inside}."


def hides_on_purpose(limit: str) -> bool:
    """Return whether this CUDA_VISIBLE_DEVICES is one of the usual values that hide every GPU."""
    return not limit.strip() or limit.strip() in NO_DEVICES


def fit(rows: Sequence[DeviceStatus]) -> list[DeviceStatus]:
    """Return the devices that fit the request."""
    return [row for row in rows if row.state is not State.UNFIT]


def them(devices: Sequence[Device]) -> str:
    """Return the pronoun for the devices."""
    return "it" if len(devices) == 1 else "them"


def _label(name: str) -> str:
    """Return `GPU2` for the typed names `2` and `gpu2`, and other names as they are."""
    is_number = gpu_index(name) is not None
    return f"GPU{name.lower().removeprefix('gpu').removeprefix('cuda:')}" if is_number else name
