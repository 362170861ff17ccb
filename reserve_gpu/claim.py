"""Taking devices: the lock first, then the look, and all of them or none.

A look before the lock proves nothing, as somebody else may take the device in between.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from reserve_gpu import choosing, myself
from reserve_gpu.bindings import DeviceError
from reserve_gpu.device import Device, Fault, Holder, Refusal, State
from reserve_gpu.errors import LockError
from reserve_gpu.files import TICKET, file_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reserve_gpu.device import Request
    from reserve_gpu.explanation import Explanation
    from reserve_gpu.line import Ticket
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
        self.directory = directory
        self._held = dict(held)
        self._idle_mib = idle_mib
        self.ticket: Ticket | None = None
        self._known: Explanation | None = None
        self._begin()

    def _begin(self) -> None:
        # A handler of a signal may have let go of some.
        self._held = {uuid: lock for uuid, lock in self._held.items() if lock.held()}
        self.locks: dict[str, Lock] = {}  # by UUID
        self.devices: list[Device] = []
        self.refusals: list[Refusal] = []
        self.warnings: dict[str, str] = {}  # by UUID
        self.ahead: list[Ticket] = []
        self.considered: dict[str, Device] = {}  # by label
        self._crowd: dict[str, tuple[bool, float]] = {}  # by UUID: in use?, MiB in use

    def take(
        self, candidates: Sequence[Device | Fault], deadline: float, *, afresh: bool = False
    ) -> bool:
        """Take as many of the candidates as were asked for, the first or the best; or none.

        Done under the mutex, so that two who want several can't make each other fail.
        deadline: when to give up on the mutex, by time.monotonic(), in seconds.
        afresh: forget what earlier attempts have found, else this adds to it.
        """
        me = myself.me(self.request.note)
        with self.directory.mutex(until=deadline):
            if afresh:
                self._begin()
            self.ahead = self._tickets_ahead()
            for one in candidates:
                self._try(one)
                if choosing.first_will_do(self.request) and self.devices:
                    break
            if self._choose():
                for lock in self.locks.values():
                    lock.write(me)
                return True
            self.undo()
        told = self._explanation().told
        self.refusals = [told(refusal) for refusal in self.refusals]
        return False

    def _tickets_ahead(self) -> list[Ticket]:
        """Who waits, before this process if it does so too: most of the time nobody."""
        if not any(name.endswith(TICKET) for name in self.directory.names()):
            return []
        from reserve_gpu import line

        return line.ahead(self.directory, self.ticket)

    def explained(self, every_s: float = 0.0) -> tuple[Refusal, ...]:
        """The refusals with what uses the devices: slow and often needless, so not asked before.

        every_s: of a device that is refused as before it is not asked again before so long.
        """
        # Not a tuple of a generator: Python cuts that to size, and keeps 2,000 of these for reuse.
        found = [
            self._explanation().of(refusal, self.considered.get(refusal.label), every_s)
            for refusal in self.refusals
        ]
        return tuple(found)

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
                lock = self.locks.pop(device.uuid, None)  # none where this was interrupted
                self.warnings.pop(device.uuid, None)
                if lock and device.uuid not in self._held:
                    lock.release()
        self.devices = [device for device in self.devices if device in chosen]

    def _try(self, one: Device | Fault) -> None:
        if isinstance(one, Fault):
            self.refusals.append(Refusal(one.label, "broken", one.reason))
            return
        self.considered[one.label] = one
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
        share = self.request.share
        sharing = self._sharer(device) if share else None  # before this process is one of them
        lock = self.directory.acquire(file_name(device.uuid, shared=share), shared=share)
        if isinstance(lock, Holder):
            self._refuse(device, "reserved", "", "share", lock)
            return
        try:
            if self._may_be_kept(device, sharing):
                self._keep(device, lock)
                return
        except BaseException:
            lock.release()
            raise
        lock.release()

    def _may_be_kept(self, device: Device, sharing: Holder | None) -> bool:
        """Whether the device, now locked, will do for all that others have or await of it."""
        waiting = next((t for t in self.ahead if device.uuid in t.wants), None)
        if self.request.share:
            holder = self.directory.holder(file_name(device.uuid)) or sharing
            return self._will_do(device, holder, waiting)
        if holder := self._sharer(device):
            self._refuse(device, "reserved", "", "share", holder)
            return False
        if waiting:
            self._refuse(device, "awaited", "", "wait", waiting.holder)
            return False
        return self._will_do(device, None, None)

    def _sharer(self, device: Device) -> Holder | None:
        """Who shares the device, other than this process."""
        name = file_name(device.uuid, shared=True)
        if device.uuid not in self._held or not myself.sees_all_locks():
            return self.directory.holder(name)
        others = [pid for pid in self.directory.holders.pids(name) if pid != os.getpid()]
        return Holder(pid=others[0], seen=True) if others else None

    def _will_do(self, device: Device, holder: Holder | None, waiting: Ticket | None) -> bool:
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
            if waiting:  # to share is no way past those who wait for what nobody has
                self._refuse(device, "awaited", "", "wait", waiting.holder)
            return not waiting
        is_wanted = self.request.devices or (self.request.share and state == State.BUSY) or idle
        if is_wanted and choosing.usable(usage):
            what = None if idle else (state, reason)
            said = self._explanation().all_of(device, what, holder)
            asked = "You share" if self.request.share else "You asked for"
            self.warnings[device.uuid] = f"{asked} {device.label}: it is {said}"
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

    def _explanation(self) -> Explanation:
        """What finds out what uses the devices; needed only where something does."""
        if self._known is None:
            from reserve_gpu.explanation import Explanation

            self._known = Explanation(self._nvml, self._idle_mib)
        return self._known
