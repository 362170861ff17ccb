"""What uses the devices that can't be had, and who has them.

Slow, as it asks for processes and users, and often needless: asked only where it will be read.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from reserve_gpu import choosing, processes, who
from reserve_gpu.bindings import DeviceError
from reserve_gpu.device import State

if TYPE_CHECKING:
    from reserve_gpu.device import Device, Holder, Refusal
    from reserve_gpu.nvml import Nvml


class Explanation:
    """What refusals come to, in words.

    idle_mib: memory in use up to which a device is idle, None for the default.
    """

    def __init__(self, nvml: Nvml, idle_mib: float | None) -> None:
        self._nvml = nvml
        self._idle_mib = idle_mib
        # By label, what was last said of its use: in which case, and when by time.monotonic().
        self._uses: dict[str, tuple[tuple[str, str] | None, float, str]] = {}

    def told(self, refusal: Refusal) -> Refusal:
        """The refusal with its holder in words: to look up a user may take long, so not before."""
        if not refusal.holder or refusal.reason:
            return refusal
        holder = processes.with_user(refusal.holder)
        return refusal.replace(reason=who.holder(holder, refusal.state), holder=holder)

    def of(self, refusal: Refusal, device: Device | None, every_s: float) -> Refusal:
        """The refusal with what uses its device, if that is why it was refused.

        every_s: of a device that is refused as before it is not asked again before so long.
        """
        if device is None or refusal.state not in ("busy", "unknown", "awaited"):
            return refusal
        is_awaited = refusal.state == "awaited"
        case = refusal.state, "" if is_awaited else refusal.reason  # that one counts seconds
        known, asked, use = self._uses.get(refusal.label, (None, 0.0, ""))
        if case != known or time.monotonic() - asked >= every_s:
            use = self._other_use(device) if is_awaited else self._use(device, *case)
            self._uses[refusal.label] = case, time.monotonic(), use
        both = [use, refusal.reason] if is_awaited else [use]
        return refusal.replace(reason="; ".join(filter(None, both)))

    def all_of(self, device: Device, use: tuple[str, str] | None, holder: Holder | None) -> str:
        """All there is to be said of a device that is taken nevertheless.

        use: in which state it is and why, None if it is idle.
        """
        said = [self._use(device, *use)] if use else []
        said += [who.holder(processes.with_user(holder))] if holder else []
        return "; ".join(said)

    def _other_use(self, device: Device) -> str:
        """What uses a device that was not looked at, as others wait for it; empty if idle."""
        try:
            state, reason = choosing.judge(self._nvml.usage(device), self._idle_mib)
        except DeviceError as error:
            return f"can't be read: {error}"
        return "" if state == State.IDLE else self._use(device, state, reason)

    def _use(self, device: Device, state: str, reason: str) -> str:
        if state != "busy":
            return f"{state}: {reason}"
        found = self._nvml.processes(device)
        if self._nvml.sees_all:  # else a pid may be another process's in our PID namespace
            found = [processes.identified(process) for process in found]
        return who.busy(reason, found)
