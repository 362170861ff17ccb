"""Taking devices: the lock first, then the look, and all of them or none.

A look before the lock proves nothing, as somebody else may take the device in between.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from reserve_gpu import choosing, processes, report
from reserve_gpu.device import Device, Fault, Holder, Refusal, State
from reserve_gpu.errors import LockError
from reserve_gpu.locks import file_name
from reserve_gpu.nvml import DeviceError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from reserve_gpu.locks import Lock, LockDirectory
    from reserve_gpu.nvml import Nvml


class Claim:
    """The devices taken so far for one request, and why the others were not.

    held: locks that this process has already, by UUID; their devices are free for it.
    idle_mib: memory in use up to which a device is idle, None for the default.
    """

    def __init__(
        self, nvml: Nvml, directory: LockDirectory, held: Mapping[str, Lock], idle_mib: float | None
    ) -> None:
        self._nvml = nvml
        self._directory = directory
        self._held = held
        self._idle_mib = idle_mib
        self.locks: dict[str, Lock] = {}
        self.devices: list[Device] = []
        self.refusals: list[Refusal] = []
        self.warnings: list[str] = []
        self._considered: dict[str, Device] = {}

    def take(self, candidates: Iterable[Device | Fault], count: int, *, named: bool) -> bool:
        """Take the first count of the candidates that can be had; if they are fewer, take none.

        named: the candidates were named one by one, so that somebody's unreserved use is no obstacle.
        """
        try:
            for one in candidates:
                if isinstance(one, Fault):
                    self.refusals.append(Refusal(one.label, "broken", one.reason))
                else:
                    self._try(one, named)
                if len(self.devices) == count:
                    return True
            self._explain()
        except BaseException:
            self.undo()
            raise
        self.undo()
        return False

    def undo(self) -> None:
        """Let go of all that was not held before."""
        for uuid, lock in self.locks.items():
            if uuid not in self._held:
                lock.release()

    def _try(self, device: Device, named: bool) -> None:
        if device.uuid in self._held:
            self._keep(device, self._held[device.uuid])
            return
        try:
            lock = self._directory.acquire(file_name(device.uuid))
        except LockError as error:
            self._refuse(device, "unknown", str(error))
            return
        if isinstance(lock, Holder):
            self._refuse(device, "reserved", report.holder(lock))
            return
        try:
            if self._will_do(device, named):
                self._keep(device, lock)
                return
        except BaseException:
            lock.release()
            raise
        lock.release()

    def _will_do(self, device: Device, named: bool) -> bool:
        """Whether the device is idle, or in use but named; else note why not."""
        try:
            usage = self._nvml.usage(device)
        except DeviceError as error:
            self._refuse(device, "broken", f"can't be read: {error}")
            return False
        state, reason = choosing.judge(usage, self._idle_mib)
        if state is State.IDLE:
            return True
        takeable = choosing.usable(usage)
        if named and takeable:
            self.warnings.append(f"{device.label} was named, so it is reserved, but it is {self._use(device, state.value, reason)}")
            return True
        self._refuse(device, state.value, reason, takeable=takeable)
        return False

    def _keep(self, device: Device, lock: Lock) -> None:
        self.locks[device.uuid] = lock
        self.devices.append(device)
        self._refuse(device, "free", "free")  # what is said of it if the others can't be had

    def _refuse(self, device: Device, state: str, reason: str, *, takeable: bool = False) -> None:
        self.refusals.append(Refusal(device.label, state, reason, takeable))
        self._considered[device.label] = device

    def _explain(self) -> None:
        """Name the processes on the busy devices: asked only now, as it is slow and often needless."""
        self.refusals = [
            replace(r, reason=self._use(self._considered[r.label], r.state, r.reason))
            if r.state in ("busy", "unknown") and r.label in self._considered
            else r
            for r in self.refusals
        ]

    def _use(self, device: Device, state: str, reason: str) -> str:
        if state != "busy":
            return f"{state}: {reason}"
        found = self._nvml.processes(device)
        if self._nvml.sees_all:  # else a pid may be another process's in our PID namespace
            found = [processes.identified(process) for process in found]
        return report.busy(reason, found)
