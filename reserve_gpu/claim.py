"""Taking devices: the lock first, then the look, and all of them or none.

A look before the lock proves nothing, as somebody else may take the device in between.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from reserve_gpu import choosing, line, processes, records, report
from reserve_gpu.bindings import DeviceError
from reserve_gpu.device import Device, Fault, Holder, Refusal, State
from reserve_gpu.errors import LockError
from reserve_gpu.locks import file_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reserve_gpu.device import Request, Ticket
    from reserve_gpu.locks import Lock, LockDirectory
    from reserve_gpu.nvml import Nvml

SEVERAL_INSTANCES_SINCE = 570  # driver, with CUDA 12.8


class Claim:
    """The devices taken for one request, and why the others were not.

    held: locks that this process has already, by UUID; their devices are free for it.
    idle_mib: memory in use up to which a device is idle, None for the default.
    ticket: of this process, if it waits in line; who does not wait comes after all who do.
    """

    def __init__(
        self,
        nvml: Nvml,
        directory: LockDirectory,
        request: Request,
        held: Mapping[str, Lock],
        idle_mib: float | None,
    ) -> None:
        self.request = request
        self._nvml = nvml
        self._directory = directory
        self._held = held
        self._idle_mib = idle_mib
        self.ticket: Ticket | None = None
        self.begin()

    def begin(self) -> None:
        """Forget what earlier attempts have found."""
        self.locks: dict[str, Lock] = {}  # by UUID
        self.devices: list[Device] = []
        self.refusals: list[Refusal] = []
        self.warnings: dict[str, str] = {}  # by UUID
        self.ahead: list[Ticket] = []
        self._considered: dict[str, Device] = {}  # by label
        self._crowd: dict[str, tuple[bool, float]] = {}  # by UUID: in use?, MiB in use

    def take(self, candidates: Sequence[Device | Fault]) -> bool:
        """Take as many of the candidates as were asked for, the first or the best; or none.

        Done under the mutex, so that two who want several can't make each other fail. Adds to the
        refusals of earlier attempts, until `begin` forgets them.
        """
        me = processes.me(self.request.note)
        with self._directory.mutex():
            self.ahead = line.ahead(self._directory, self.ticket)
            for one in candidates:
                self._try(one)
                if choosing.first_will_do(self.request) and self.devices:
                    break
            if self._choose():
                for lock in self.locks.values():
                    lock.write(me)
                return True
            self.undo()
        self.refusals = [self._told(refusal) for refusal in self.refusals]
        return False

    def usable(self) -> list[str]:
        """The UUIDs of the devices considered that would do, were they free."""
        unfit = {refusal.label for refusal in self.refusals if refusal.state == "unfit"}
        return [d.uuid for label, d in self._considered.items() if label not in unfit]

    def explain(self) -> None:
        """Name the processes on busy devices: asked only now, as it is slow and often needless."""
        self.refusals = [
            r.replace(reason=self._use(self._considered[r.label], r.state, r.reason))
            if r.state in ("busy", "unknown")
            else r
            for r in self.refusals
        ]

    def undo(self) -> None:
        """Let go of all that was not held before."""
        self._keep_only([])

    def _choose(self) -> bool:
        """Keep the best of those taken, if they are as many as were asked for."""
        count, pool = self.request.count, self.devices
        if self.request.devices:
            return len(pool) == count
        if count > 1:  # CUDA gives a process whole GPUs or MIG instances, not both
            whole = [device for device in pool if device.instance is None]
            pool = whole if len(whole) >= count else [d for d in pool if d.instance is not None]
        if len(pool) < count:
            return False
        if self.request.share:
            chosen = sorted(pool, key=lambda device: self._crowd[device.uuid])[:count]
        else:
            chosen = choosing.closest(pool, count, self._nvml.link)
        self._keep_only(chosen)
        return True

    def _keep_only(self, chosen: Sequence[Device]) -> None:
        """Let go of all that is neither chosen nor was held before."""
        for device in self.devices:
            if device not in chosen:
                lock = self.locks.pop(device.uuid)
                self.warnings.pop(device.uuid, None)
                if device.uuid not in self._held:
                    lock.release()
        self.devices = [device for device in self.devices if device in chosen]

    def _try(self, one: Device | Fault) -> None:
        if isinstance(one, Fault):
            self.refusals.append(Refusal(one.label, "broken", one.reason))
            return
        self._considered[one.label] = one
        if reason := self._unfit(one):
            self._refuse(one, "unfit", reason)
        elif one.uuid in self._held and (self.request.share or not self._held[one.uuid].shared):
            self._crowd[one.uuid] = (False, 0.0)
            self._keep(one, self._held[one.uuid])
        else:
            try:
                self._lock(one)
            except LockError as error:
                self._refuse(one, "unknown", str(error))

    def _unfit(self, device: Device) -> str | None:
        if device.instance is not None and self.request.count > 1:
            version = self._nvml.driver_version() or ""
            major = version.partition(".")[0]
            if major.isdecimal() and int(major) < SEVERAL_INSTANCES_SINCE:
                return f"is a MIG instance; with driver {version} a process can use only one"
        return choosing.unfit(device, self.request)

    def _lock(self, device: Device) -> None:
        """Take the device's lock, then look at the device, and keep the lock only if it will do."""
        own, shared = file_name(device.uuid), file_name(device.uuid, shared=True)
        holder = self._directory.holder(shared)
        if self.request.share:
            holder = self._directory.holder(own) or holder
            lock = self._directory.acquire(shared, shared=True)
        else:
            lock = holder or self._directory.acquire(own)
        if isinstance(lock, Holder):
            self._refuse(device, "reserved", "", "share", lock)
            return
        waiting = next((t for t in self.ahead if device.uuid in t.wants), None)
        if waiting and not self.request.share:
            lock.release()
            self._refuse(device, "awaited", "", "wait", waiting.holder)
            return
        try:
            if self._will_do(device, holder):
                self._keep(device, lock)
                return
        except BaseException:
            lock.release()
            raise
        lock.release()

    def _will_do(self, device: Device, holder: Holder | None) -> bool:
        """Whether the device is idle, or in use and wanted all the same; else note why not."""
        try:
            usage = self._nvml.usage(device)
        except DeviceError as error:
            self._refuse(device, "broken", f"can't be read: {error}")
            return False
        state, reason = choosing.judge(usage, self._idle_mib)
        idle = state == State.IDLE
        self._crowd[device.uuid] = (not idle or holder is not None, choosing.used_mib(usage))
        if idle and not holder:
            return True
        is_wanted = self.request.devices or (self.request.share and state == State.BUSY) or idle
        if is_wanted and choosing.usable(usage):
            uses = [] if idle else [self._use(device, state, reason)]
            uses += [self._held_by(holder)] if holder else []
            asked = "You share" if self.request.share else "You asked for"
            self.warnings[device.uuid] = f"{asked} {device.label}: it is {'; '.join(uses)}"
            return True
        self._refuse(device, state, reason, "name" if choosing.usable(usage) else "")
        return False

    def _keep(self, device: Device, lock: Lock) -> None:
        self.locks[device.uuid] = lock
        self.devices.append(device)
        self._refuse(device, "free", "free")  # what is said of it if the others can't be had

    def _refuse(
        self, device: Device, state: str, reason: str, way: str = "", holder: Holder | None = None
    ) -> None:
        self.refusals.append(Refusal(device.label, state, reason, way, holder))

    def _told(self, refusal: Refusal) -> Refusal:
        """The refusal with its holder in words: to look up a user may take long, so not before."""
        if not refusal.holder or refusal.reason:
            return refusal
        return refusal.replace(reason=self._held_by(refusal.holder, refusal.state))

    def _use(self, device: Device, state: str, reason: str) -> str:
        if state != "busy":
            return f"{state}: {reason}"
        found = self._nvml.processes(device)
        if self._nvml.sees_all:  # else a pid may be another process's in our PID namespace
            found = [processes.identified(process) for process in found]
        return report.busy(reason, found)

    def _held_by(self, holder: Holder, what: str = "reserved") -> str:
        text = report.holder(records.with_user(holder), what)
        if holder.seen and holder.pid == os.getppid():
            return f"{text}; that is this process's parent, whose CUDA_VISIBLE_DEVICES it has"
        return text
