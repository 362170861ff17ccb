"""What the NVIDIA driver says: which devices there are, how they are linked, and what uses them.

It reports and judges nothing; `usage.py` says what a reading means. To touch a GPU for the first
time can take seconds where persistence mode is off, so each is touched only when it is asked for.
"""

from __future__ import annotations

import math
from contextlib import suppress
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from reserve_gpu.gpus.bindings import Bindings, DeviceError
from reserve_gpu.gpus.codes import DOWN, DOWN_OR_HUNG, NOT_OFFERED, Code
from reserve_gpu.gpus.usage import is_desktop, split_graphics
from reserve_gpu.model.devices import (
    GRAPHICS,
    MIB,
    Board,
    Device,
    Fault,
    Gauges,
    Process,
    State,
    Usage,
)
from reserve_gpu.model.errors import NoDeviceError
from reserve_gpu.system import procfs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from typing_extensions import Self

    Place = Device | Fault
    Lists = Callable[[str], list[Process]]  # which read the processes of a kind

CALL_LIMIT_S = 20.0  # initialising one GPU takes 1 to 3 s without persistence mode

# Only these answers mean that a GPU can't be split. After any other it may be, with somebody on a
# part of it whom a look at the whole GPU need not show; so then it is not used.
NO_MIG = frozenset({Code.NOT_SUPPORTED, Code.FUNCTION_NOT_FOUND})
MIG_COUNT = "nvmlDeviceGetMaxMigDeviceCount"
NO_INSTANCE = frozenset({Code.NOT_FOUND})  # gaps in the numbering of the instances are normal

# NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, and what it may be that takes a GPU away:
# https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/error-recovery-and-response-flags.html
RECOVERY, DRAIN_AND_RESET = 230, 4
FAILED = "its memory has failed, and can't be repaired: the GPU has to be replaced"
RECOVERIES = {
    1: "a reset of the GPU",
    2: "a reboot of the machine",
    3: "the end of all peer-to-peer traffic, and then more",
    5: "a reset of the GPU's bus",
    6: "a reboot of the machine",
}

# By the kind of processes, as in `RunningProcesses` of NVML's names; the strongest kind first.
KINDS = {"compute": "Compute", "MPS": "MPSCompute", GRAPHICS: "Graphics"}

# The second will be gone with CUDA 14; the first is missing before R570 and from older bindings.
TEMPERATURES = ("nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature")
TEMPERATURE_GPU = 0  # NVML_TEMPERATURE_GPU

# Where the memory of a GPU is the host's, its total is about the host's.
LEAST_OF_HOST = 0.9
ADDRESSING_ATS = 2  # NVML_DEVICE_ADDRESSING_MODE_ATS: host and GPU have one set of page tables

P2P_NVLINK, P2P_OK = 2, 0  # NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK


class Link:
    """How far two GPUs are from each other; less is closer."""

    NVLINK, SWITCH, SOCKET, SYSTEM = range(4)


# The common ancestor of two GPUs as NVML names it (nvmlGpuTopologyLevel_t), the closest first: one
# board, one PCIe switch, several of them; one host bridge, one NUMA node; all else.
SEVERAL_SWITCHES, ONE_NODE = 20, 40


class Nvml:
    """One conversation with the driver, from initialisation to shutdown; a context manager.

    Entering it starts the driver and does not wait for that.

    limit_s: seconds after which a driver call counts as hanging.
    sees_all: an empty process list means that there are no processes.
    Raises DriverError where the Python bindings of NVML are missing.
    """

    def __init__(self, limit_s: float = CALL_LIMIT_S) -> None:
        self.sees_all, self._is_wsl = procfs.sees_all_processes(), procfs.is_wsl()
        self._limit_s = limit_s
        self._devices: dict[int, list[Device | Fault]] = {}  # by the GPU's index
        # By UUID: NVML's handles of the device, and of the GPU that it is or is a part of. Of an
        # instance NVML refuses to say what is a property of the board.
        self._handles: dict[str, tuple[Any, Any]] = {}
        self._places: dict[str, tuple[int, int | None]] = {}  # index and slot, by UUID
        self._boards: dict[int, Board] = {}  # by the GPU's index

    def __enter__(self) -> Self:
        self._driver = Bindings(self._limit_s)
        return self

    def __exit__(self, *_: object) -> None:
        self._driver.close()

    def count(self) -> int:
        """Return how many GPUs there are, one or more, unusable ones included.

        To be asked first: it raises DriverError where there is no driver to talk to.
        """
        count = self._driver.count()
        if not count:
            raise NoDeviceError("The NVIDIA driver is here, but it shows no GPU to this process.")
        return count

    def driver_version(self) -> str | None:
        """Return the version of the driver, as `550.54.15`."""
        with suppress(DeviceError):
            return str(self._driver.run(self._driver.ask, "nvmlSystemGetDriverVersion"))
        return None

    def walk(self) -> Iterator[Device | Fault]:
        """Yield all devices in PCI bus order, each GPU touched only when it is reached."""
        for index in range(self.count()):
            yield from self.devices(index)

    def screens_last(self, devices: Iterable[Device | Fault]) -> Iterator[Device | Fault]:
        """Yield the devices in their order, but those at the end on which a display is active."""
        screens = []
        for device in devices:
            if (board := self._boards.get(device.index)) and board.has_screen:
                screens.append(device)
            else:
                yield device
        yield from screens

    def devices(self, index: int) -> list[Device | Fault]:
        """Return the devices of the GPU with that index: itself, or its MIG instances.

        A Fault stands for what can't be used. It may pass, so the GPU is asked again at the next
        call; where there is none, the answer stays for the rest of the conversation.
        """
        known = self._devices.get(index)
        if known is None or any(isinstance(device, Fault) for device in known):
            try:
                known = self._driver.run(self._read_gpu, index)
            except DeviceError as error:
                known = [Fault(index, str(error), state=error.state, is_lost=error.is_lost)]
            self._devices[index] = known
        return list(known)

    def find(self, device: Device) -> Device:
        """Return the device as the driver describes it now.

        The driver renumbers the GPUs if one is added or removed, so only the UUID identifies a
        device.

        Args:
            device: The device, perhaps from an earlier conversation.

        Raises:
            DeviceError: It can't be used. `is_lost` is set if the driver has lost it.
            DriverError: The driver does not start.
        """
        fault = None
        for index in sorted(range(self.count()), key=lambda index: index != device.index):
            for place in self.devices(index):
                if isinstance(place, Device) and place.uuid == device.uuid:
                    return place
                is_its_place = index == device.index and place.instance in (None, device.instance)
                if isinstance(place, Fault) and is_its_place and place.state is not State.EMPTY:
                    fault = place
        if fault:
            raise DeviceError(fault.reason, is_lost=fault.is_lost)
        raise DeviceError("the driver does not show it any more", is_lost=True)

    def usage(self, device: Device, limit_s: float | None = None) -> Usage:
        """Return what uses the device now.

        limit_s: seconds after which this reading counts as hanging, None for those of the
        conversation.
        Raises DeviceError if a reading fails that ought to work.
        """
        self._require(device)
        return self._driver.run(self._read_usage, device, limit_s=limit_s)

    def read_all(self, device: Device) -> tuple[Usage, list[Process], Gauges]:
        """Return all that people want to see: usage, processes of all kinds, gauges.

        In one reading, as each takes a change to the worker thread and back.
        Raises DeviceError if a reading fails that ought to work.
        """
        self._require(device)
        return self._driver.run(self._read_all, device)

    def processes(self, device: Device) -> list[Process]:
        """Return the processes that use the device, as far as the driver shows them."""
        return self.processes_of([device]).get(device, [])

    def processes_of(self, devices: Sequence[Place]) -> dict[Place, list[Process]]:
        """Return the processes that use each device, in one reading.

        These are compute processes, MPS clients, and graphics processes with more memory than a
        desktop has. If the driver does not answer, the result is empty.
        """
        for device in devices:
            if isinstance(device, Device):
                with suppress(DeviceError):
                    self._require(device)
        with suppress(DeviceError):
            return self._driver.run(self._read_uses_of, tuple(devices))
        return {}

    def workers(self, device: Device, since: float) -> dict[int, int] | None:
        """Return the pids that have computed on the device, or coded video, since that moment.

        Each with the percent of the time in which it has computed.
        since: in seconds since the epoch; the driver remembers some seconds, or minutes.
        None where it does not tell: of MIG instances, under WSL2.
        """
        with suppress(DeviceError):
            self._require(device)
            return self._driver.run(self._read_workers, device, since)
        return None

    def share(self, device: Device) -> float | None:
        """Return which share of its GPU's memory a device has, from 0 to 1; None if not known."""
        if device.instance is None:
            return 1.0
        with suppress(DeviceError):
            self._require(device)
            return self._driver.run(self._read_share, device)
        return None

    def link(self, one: Device, other: Device, limit_s: float | None = None) -> int:
        """Return how two GPUs are linked, as far as is known: one of Link, less is closer.

        limit_s: seconds after which this reading counts as hanging: then it is not known.
        """
        with suppress(DeviceError):
            self._require(one)
            self._require(other)
            return self._driver.run(self._read_link, one, other, limit_s=limit_s)
        return Link.SYSTEM

    def _require(self, device: Device) -> None:
        """Make sure that a device can be asked, also one that an earlier conversation has found."""
        if device.uuid not in self._handles:
            self.find(device)

    # What follows runs on the worker thread of the bindings. Readings are given devices and not
    # handles, as handles may be new: so a reading that hangs is known to be the same one.

    def _read_gpu(self, index: int) -> list[Device | Fault]:
        gpu = self._driver.ask("nvmlDeviceGetHandleByIndex", index)
        is_split = self._is_split(gpu)
        self._boards[index] = self._read_board(gpu)
        if not is_split:
            return [self._read_device(index, gpu, gpu)]
        return [*self._read_instances(index, gpu)] or [
            Fault(index, "MIG is on, but it has no MIG instances", state=State.EMPTY)
        ]

    def _is_split(self, gpu: Any) -> bool:
        """Return whether MIG is on. Raises DeviceError if that is unknown."""
        try:
            mode = self._driver.ask("nvmlDeviceGetMigMode", gpu, absent=NO_MIG)
        except DeviceError as error:
            # A GPU that can have no instances has no MIG mode that could be on.
            if error.code in DOWN_OR_HUNG or self._driver.ask(MIG_COUNT, gpu, faults=DOWN) != 0:
                raise
            return False
        return bool(mode and mode[0])

    def _read_board(self, gpu: Any) -> Board:
        """Return what a GPU is like. Raises DeviceError if it has a fault.

        https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/
        """
        read = partial(self._driver.ask, faults=DOWN)
        rows = read("nvmlDeviceGetRemappedRows", gpu)
        *_, is_pending, has_failed = rows or (False, False)
        fields = read("nvmlDeviceGetFieldValues", gpu, [RECOVERY])
        action = fields[0].value.uiVal if fields and not fields[0].nvmlReturn else 0
        if has_failed:
            raise DeviceError(FAILED)
        if action in RECOVERIES:
            raise DeviceError(f"it has a fault: the driver asks for {RECOVERIES[action]}")
        has_screen = bool(read("nvmlDeviceGetDisplayActive", gpu))
        is_numa_node = read("nvmlDeviceGetNumaNodeId", gpu) is not None
        return Board(has_screen, bool(is_pending) or action == DRAIN_AND_RESET, is_numa_node)

    def _has_host_memory(self, gpu: Any, total_mib: float | None) -> bool:
        """Tell whether a GPU has no memory of its own.

        NVML mostly can't say how much memory those have (GB10, Jetson, Thor:
        https://github.com/leptonai/gpud/pull/1170). Some drivers give the host's total
        (https://github.com/Syllo/nvtop/pull/463), but a card can have as much as its host, too. It
        does not share the host's page tables (https://github.com/AlexsJones/llmfit/pull/93).
        """
        ask = self._driver.ask
        try:
            # Where there is no total it is asked for once more, for the error.
            total_mib = total_mib or ask("nvmlDeviceGetMemoryInfo", gpu).total / MIB
            host_mib = procfs.memory_mib() or 0.0
            is_as_large = LEAST_OF_HOST * host_mib <= total_mib <= host_mib
            return is_as_large and ask("nvmlDeviceGetAddressingMode", gpu) == ADDRESSING_ATS
        except DeviceError as error:
            return total_mib is None and error.code == Code.NOT_SUPPORTED

    def _read_instances(self, index: int, gpu: Any) -> Iterator[Device | Fault]:
        """Yield the MIG instances of a GPU. Raises DeviceError if there is no telling."""
        ask = self._driver.ask
        for slot in range(ask(MIG_COUNT, gpu)):
            try:
                function = "nvmlDeviceGetMigDeviceHandleByIndex"
                if (handle := ask(function, gpu, slot, absent=NO_INSTANCE)) is not None:
                    yield self._read_device(index, handle, gpu, slot)
            except DeviceError as error:  # noqa: PERF203 - one's fault says nothing of the others
                yield Fault(index, str(error), slot, error.state, error.is_lost)

    def _read_device(self, index: int, handle: Any, gpu: Any, slot: int | None = None) -> Device:
        """Return the device at that place; asked again, return the same object."""
        uuid = self._driver.ask("nvmlDeviceGetUUID", handle)
        first = self._places.setdefault(uuid, (index, slot))
        if first != (index, slot):  # some virtual GPUs: one lock can't stand for both
            other = Fault(first[0], "", first[1])
            raise DeviceError(f"the driver gives it the UUID of {other.label}: only that is used")
        self._handles[uuid] = handle, gpu
        for known in self._devices.get(index, ()):
            if isinstance(known, Device) and (known.uuid, known.instance) == (uuid, slot):
                return known
        read = partial(self._driver.ask, faults=DOWN)
        total_mib, _, reserve_mib = self._read_memory(handle)
        if slot is None and self._has_host_memory(gpu, total_mib):
            self._boards[index] = self._boards[index]._replace(has_host_memory=True)
            total_mib = total_mib or procfs.memory_mib()
        gpu_uuid, old_name = (None, None) if slot is None else self._read_origin(handle, gpu)
        return Device(
            index=index,
            uuid=uuid,
            name=read("nvmlDeviceGetName", handle),
            bus_id=self._driver.bus_id(gpu),
            memory_mib=None if total_mib is None else int(total_mib),
            vbios=read("nvmlDeviceGetVbiosVersion", gpu),
            link_width=read("nvmlDeviceGetCurrPcieLinkWidth", gpu),
            instance=slot,
            gpu_uuid=gpu_uuid,
            old_name=old_name,
            reserve_mib=None if reserve_mib is None else math.ceil(reserve_mib),
        )

    def _read_origin(self, handle: Any, gpu: Any) -> tuple[str, str]:
        """Return the UUID of an instance's GPU, and the instance's name before R470 gave it a UUID.

        https://docs.nvidia.com/datacenter/tesla/mig-user-guide/mig-device-names.html
        """
        gpu_uuid = self._driver.ask("nvmlDeviceGetUUID", gpu)
        gpu_instance = self._driver.ask("nvmlDeviceGetGpuInstanceId", handle, faults=DOWN)
        part = self._driver.ask("nvmlDeviceGetComputeInstanceId", handle, faults=DOWN)
        return gpu_uuid, f"MIG-{gpu_uuid}/{gpu_instance}/{part}"

    def _read_all(self, device: Device) -> tuple[Usage, list[Process], Gauges]:
        listed = self._lists(device)
        usage = self._read_usage(device, listed)
        return usage, _all_listed(listed), self._read_gauges(device)

    def _lists(self, device: Device) -> Lists:
        """Return what reads each list of processes once, when it is asked for."""
        return cache(partial(self._read_list, self._handles[device.uuid][0]))

    def _read_usage(self, device: Device, listed: Lists | None = None) -> Usage:
        """Return the usage. listed: the lists of processes, where there are some already."""
        handle, gpu = self._handles[device.uuid]
        board = self._boards[self._places[device.uuid][0]]
        listed = listed or self._lists(device)
        _, used_mib, reserve_mib = self._read_memory(handle)
        # An instance has no compute mode of its own.
        mode = self._driver.ask("nvmlDeviceGetComputeMode", gpu, faults=DOWN_OR_HUNG)
        graphics = listed(GRAPHICS)
        compute = self._driver.process_count(handle, "Compute")
        mps = self._driver.process_count(handle, "MPSCompute")
        if board.has_host_memory:
            sizes = [p.memory_mib for p in _distinct(p for kind in KINDS for p in listed(kind))]
            is_all = self.sees_all and compute is not None and len(sizes) >= compute + (mps or 0)
            used_mib = float(sum(filter(None, sizes))) if is_all and None not in sizes else None
        if compute and graphics:
            compute = max(0, compute - len(listed("compute")) + len(_jobs(listed)))
        return Usage(
            compute=compute,
            mps=mps,
            sees_all=self.sees_all,
            is_wsl=self._is_wsl,
            total_mib=device.memory_mib,
            used_mib=used_mib,
            reserve_known=reserve_mib is not None,
            graphics_mib=float(sum(process.memory_mib or 0 for process in graphics)),
            mode=mode,
            awaits_reset=board.awaits_reset,
            has_host_memory=board.has_host_memory,
        )

    def _read_memory(self, handle: Any) -> tuple[float | None, float | None, float | None]:
        """Return total and used memory in MiB, and the driver's reserve where it is not in use."""
        memory = None
        if not self._driver.may_have_memory_limit(handle):
            memory = self._driver.memory_v2(handle)
        if not memory:
            memory = self._driver.ask("nvmlDeviceGetMemoryInfo", handle, absent=NOT_OFFERED)
        if memory is None:
            return None, None, None
        reserve = getattr(memory, "reserved", None)  # which only the second version knows
        return memory.total / MIB, memory.used / MIB, None if reserve is None else reserve / MIB

    def _read_gauges(self, device: Device) -> Gauges:
        """Return the readings that decide nothing; one that fails is None, and the others stay."""
        handle, gpu = self._handles[device.uuid]
        rates = self._read_first(("nvmlDeviceGetUtilizationRates",), handle)
        power = self._read_first(("nvmlDeviceGetPowerUsage",), gpu)
        limit = self._read_first(("nvmlDeviceGetEnforcedPowerLimit",), gpu)
        return Gauges(
            None if rates is None else int(rates.gpu),
            self._read_first(TEMPERATURES, gpu, TEMPERATURE_GPU),
            None if power is None else power / 1000,
            None if limit is None else limit / 1000,
        )

    def _read_first(self, names: Iterable[str], *arguments: Any) -> Any:
        """Return the answer of the first of these functions that has one; None where none has."""
        for name in names:
            with suppress(DeviceError):
                return self._driver.ask(name, *arguments)
        return None

    def _read_uses_of(self, devices: Sequence[Place]) -> dict[Place, list[Process]]:
        known = [d for d in devices if isinstance(d, Device) and d.uuid in self._handles]
        return {d: split_graphics(_all_listed(self._lists(d)), d.memory_mib)[0] for d in known}

    def _read_list(self, handle: Any, kind: str) -> list[Process]:
        """Return the processes of one kind; none where the driver keeps them to itself.

        _v2 first: drivers 535.43 to 535.98 fill _v3's buffer with a larger struct than they
        declare (https://github.com/XuehaiPan/nvitop/pull/79).
        """
        for version in ("v2", "v3"):
            with suppress(DeviceError):
                name = f"nvmlDeviceGet{KINDS[kind]}RunningProcesses_{version}"
                return [_process(entry, kind) for entry in self._driver.ask(name, handle)]
        return []

    def _read_workers(self, device: Device, since: float) -> dict[int, int] | None:
        """Ask nvmlDeviceGetProcessUtilization; NOT_FOUND means that there were none."""
        handle, _ = self._handles[device.uuid]
        since_us = int(since * 1e6)
        try:
            samples = self._driver.ask("nvmlDeviceGetProcessUtilization", handle, since_us)
        except DeviceError as error:
            return {} if error.code == Code.NOT_FOUND else None
        used = (s for s in samples if s.smUtil or s.memUtil or s.encUtil or s.decUtil)
        return {sample.pid: sample.smUtil for sample in used if sample.timeStamp > since_us}

    def _read_share(self, device: Device) -> float | None:
        handle, gpu = self._handles[device.uuid]
        own_mib, whole_mib = self._read_memory(handle)[0], self._read_memory(gpu)[0]
        return min(1.0, own_mib / whole_mib) if own_mib and whole_mib else None

    def _read_link(self, one: Device, other: Device) -> int:
        gpus = self._handles[one.uuid][1], self._handles[other.uuid][1]
        with suppress(DeviceError):
            if self._driver.ask("nvmlDeviceGetP2PStatus", *gpus, P2P_NVLINK) == P2P_OK:
                return Link.NVLINK
        with suppress(DeviceError):
            level = self._driver.ask("nvmlDeviceGetTopologyCommonAncestor", *gpus)
            if level <= ONE_NODE:
                return Link.SWITCH if level <= SEVERAL_SWITCHES else Link.SOCKET
        return Link.SYSTEM


def _jobs(listed: Lists) -> list[Process]:
    """Return the compute processes without those that are a desktop's."""
    drawing = {process.pid for process in listed(GRAPHICS)}
    return [process for process in listed("compute") if not is_desktop(process, drawing)]


def _all_listed(listed: Lists) -> list[Process]:
    """Return the processes of all kinds, each as the strongest kind that it is."""
    return _distinct([*_jobs(listed), *listed("MPS"), *listed(GRAPHICS)])


def _distinct(listed: Iterable[Process]) -> list[Process]:
    """Return the processes, each as what it is listed as first."""
    processes: dict[int, Process] = {}
    for process in listed:
        processes.setdefault(process.pid, process)
    return list(processes.values())


def _process(entry: Any, kind: str) -> Process:
    memory = entry.usedGpuMemory
    return Process(entry.pid, None if memory is None else memory // MIB, kind=kind)
