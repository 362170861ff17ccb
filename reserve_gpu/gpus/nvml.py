"""Query the NVIDIA driver for devices, the links between them, and the processes that use them.

This module only reads; `usage.py` decides whether a device is idle. When persistence mode is off,
the first access to a GPU can take seconds, so a GPU is accessed only when a caller needs it.
"""

from __future__ import annotations

import math
import time
from collections import deque
from contextlib import closing, suppress
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from reserve_gpu.gpus.bindings import Bindings, DeviceError
from reserve_gpu.gpus.codes import DOWN, DOWN_OR_HUNG, NOT_OFFERED, Code
from reserve_gpu.gpus.usage import (
    has_no_memory,
    is_desktop,
    is_surely_busy,
    recent_use,
    samples_start_s,
    split_graphics,
)
from reserve_gpu.model.devices import (
    COMPUTE,
    GRAPHICS,
    MIB,
    MPS,
    Board,
    Device,
    Fault,
    Gauges,
    Process,
    State,
    Usage,
    UseSample,
)
from reserve_gpu.model.errors import NoDeviceError
from reserve_gpu.system import procfs

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence

    from typing_extensions import Self

    from reserve_gpu.model.clocks import Instant
    from reserve_gpu.system.executor import T

    Place = Device | Fault
    Reading = tuple[Usage, Gauges]

CALL_LIMIT_S = 20.0  # seconds; without persistence mode, initializing a GPU takes 1 to 3 s

# Only these error codes mean that a GPU can't have MIG instances. After any other error, the GPU
# might have instances. The GPU's own process list might not include the instances' processes, so
# the GPU is not used.
NO_MIG = frozenset({Code.NOT_SUPPORTED, Code.FUNCTION_NOT_FOUND})
MIG_COUNT = "nvmlDeviceGetMaxMigDeviceCount"
NO_INSTANCE = frozenset({Code.NOT_FOUND})  # there can be gaps between instance numbers

# No process has used the GPU since the requested time
# (https://github.com/Cldfire/nvml-wrapper/issues/56). If the driver succeeds but returns no sample,
# the bindings raise an error with code 0.
NO_SAMPLES = frozenset({0, Code.NOT_FOUND})
# The driver offers samples, but it hung, or new samples arrived between two calls.
UNREAD_SAMPLES = frozenset({None, Code.INSUFFICIENT_SIZE})

# NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, and the recovery actions that make a GPU unusable:
# https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/error-recovery-and-response-flags.html
RECOVERY, DRAIN_AND_RESET = 230, 4
FAILED = "its memory has failed and can't be repaired: the GPU must be replaced"
RECOVERIES = {
    1: "a GPU reset",
    2: "a reboot",
    3: "stopping all peer-to-peer traffic, among other steps",
    5: "a reset of the GPU's bus",
    6: "a reboot",
}

# Process kinds, and their spelling in NVML's function names. If a process is of several kinds, the
# first one counts.
KINDS = {COMPUTE: "Compute", MPS: "MPSCompute", GRAPHICS: "Graphics"}

# The first function is missing from drivers before R570 and from older bindings. The second one
# will be removed in CUDA 14.
TEMPERATURES = ("nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature")
TEMPERATURE_GPU = 0  # NVML_TEMPERATURE_GPU

# For a GPU that uses the host's memory, the minimum ratio of its reported memory to host memory.
LEAST_OF_HOST = 0.9
# VBIOS versions that say nothing, in lower case and without brackets, dots and zeros.
NO_VERSION = frozenset({"", "n/a", "none", "not available", "unknown"})
ADDRESSING_ATS = 2  # NVML_DEVICE_ADDRESSING_MODE_ATS: host and GPU share page tables

P2P_NVLINK, P2P_OK = 2, 0  # NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK


class Link:
    """The distance between two GPUs; a lower value is closer."""

    NVLINK, SWITCH, SOCKET, SYSTEM = range(4)


# Levels of nvmlGpuTopologyLevel_t, which describes the common ancestor of two GPUs. From closest to
# farthest, the levels are a board, a PCIe switch, several switches, a host bridge, a NUMA node, and
# the system.
SEVERAL_SWITCHES, ONE_NODE = 20, 40


class Nvml:
    """An NVML session, as a context manager.

    Entering the context starts NVML's initialization without waiting for it to finish. DriverError
    is raised if NVML's Python bindings can't be imported.

    Args:
        limit_s: Timeout for each reading, in seconds.

    Attributes:
        sees_all: Whether an empty process list proves that no process exists.
    """

    def __init__(self, limit_s: float = CALL_LIMIT_S) -> None:
        self.sees_all, self._is_wsl = procfs.sees_all_processes(), procfs.is_wsl()
        self._limit_s = limit_s
        self._devices: dict[int, list[Device | Fault]] = {}  # by GPU index
        # By UUID: NVML's handles for the device and for the GPU that contains it. NVML does not
        # report board properties for an instance's handle.
        self._handles: dict[str, tuple[Any, Any]] = {}
        self._places: dict[str, tuple[int, int | None]] = {}  # GPU index and instance, by UUID
        self._boards: dict[int, Board] = {}  # by GPU index
        self._first_usages: dict[str, Usage] = {}  # by UUID; only what concerns memory

    def __enter__(self) -> Self:
        self._driver = Bindings(self._limit_s)
        return self

    def __exit__(self, *_: object) -> None:
        self._driver.close()

    def count(self) -> int:
        """Wait until NVML is initialized, and return the number of GPUs, including unusable ones.

        Raises:
            DriverError: The driver does not start.
            NoDeviceError: The machine has no GPU.
        """
        count = self._driver.count()
        if not count:
            raise NoDeviceError(
                "The NVIDIA driver is running, but it shows no GPU to this process."
            )
        return count

    def driver_version(self) -> str | None:
        """Return the driver version, such as `550.54.15`, or None if it can't be read."""
        with suppress(DeviceError):
            return str(self._driver.run(self._driver.ask, "nvmlSystemGetDriverVersion"))
        return None

    def awaits_ready_state(self) -> bool | None:
        """Return whether confidential computing is on, but the GPUs do not accept work yet.

        CUDA does not start until the administrator changes the GPUs' ready state
        (https://github.com/NVIDIA/nvtrust/issues/39).

        Returns:
            None if the driver or the bindings do not report it.

        Raises:
            DriverError: The driver does not start.
        """
        with suppress(DeviceError):
            return self._driver.run(self._read_awaits_ready_state)
        return None

    def walk(self) -> Iterator[Device | Fault]:
        """Yield all devices in PCI bus order."""
        return chain.from_iterable(self.batches(range(self.count())))

    def batches(
        self,
        indices: Sequence[int],
        is_wanted: Callable[[Sequence[Device | Fault]], bool] | None = None,
    ) -> Iterator[Sequence[Device | Fault]]:
        """Yield the devices of several GPUs in order, in batches that are read together.

        Args:
            indices: The GPUs' indices.
            is_wanted: A function that returns whether the caller will probably need no further GPU
                after a GPU with these devices. No GPU is then accessed before it is needed: the
                first batch ends with the first wanted GPU, and each later batch contains up to
                twice as many wanted GPUs as the one before. A batch also ends with a GPU that
                answers slowly, because initializing the next one can also take seconds. By default,
                all GPUs are read together.
        """
        unread = [index for index in indices if self._is_unread(index)]
        batch: list[Device | Fault] = []
        most = 1
        for index in indices:
            if unread and index == unread[0]:
                if batch:
                    yield batch
                batch = []
                rest = self._read_gpus(unread, is_wanted and _count_wanted(is_wanted, most))
                read = unread[: len(unread) - len(rest)]
                wanted = sum(is_wanted(self._devices[each]) for each in read) if is_wanted else 0
                unread, most = rest, max(1, 2 * wanted)
            batch += self._devices[index]
        if batch:
            yield batch

    def has_screen(self, device: Device | Fault) -> bool:
        """Return whether a display is active on a device's GPU, which this session has read."""
        board = self._boards.get(device.index)
        return board is not None and board.has_screen

    def was_busy(self, device: Device, idle_mib: float | None = None) -> bool:
        """Return whether a device's memory showed that it was busy when it was first read.

        Args:
            device: The device, which this session has read.
            idle_mib: The maximum memory use of an idle device in MiB, or None for the default.
        """
        first = self._first_usages.get(device.uuid)
        return first is not None and is_surely_busy(first, idle_mib)

    def devices(self, index: int) -> list[Device | Fault]:
        """Return a GPU's devices, which are the GPU itself or its MIG instances.

        A Fault represents a device that can't be used. A fault might be temporary, so the next call
        reads the GPU again. Unless a device is faulty, the result is cached for the session.

        Args:
            index: The GPU's index.
        """
        if self._is_unread(index):
            self._read_gpus([index])
        return list(self._devices[index])

    def _is_unread(self, index: int) -> bool:
        known = self._devices.get(index)
        return known is None or any(isinstance(device, Fault) for device in known)

    def _read_gpus(
        self,
        indices: Sequence[int],
        is_enough: Callable[[list[Device | Fault]], bool] | None = None,
    ) -> list[int]:
        """Read the first GPUs, at least one, and return the indices of the others."""
        unread = deque(indices)
        for outcome in self._driver.run_each(self._read_gpu, indices, is_enough=is_enough):
            index = unread.popleft()
            if isinstance(outcome, DeviceError):
                fault = Fault(index, str(outcome), state=outcome.state, is_lost=outcome.is_lost)
                self._devices[index] = [fault]
            else:
                self._devices[index] = outcome
        return [*unread]

    def find(self, device: Device) -> Device:
        """Return a device as the driver currently describes it.

        The driver renumbers the GPUs when one is added or removed, so only the UUID identifies a
        device.

        Args:
            device: The device, possibly from an earlier session.

        Raises:
            DeviceError: The device can't be used. `is_lost` is set if the driver has lost it.
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
        raise DeviceError("the driver no longer lists it", is_lost=True)

    def usage(self, device: Device, limit_s: float | None = None) -> Usage:
        """Read a device's memory use and number of processes.

        Args:
            device: The device, possibly from an earlier session.
            limit_s: Timeout in seconds. Defaults to the session's timeout.

        Raises:
            DeviceError: A required reading failed, or timed out.
        """
        self._require(device)
        return self._driver.run(self._read_usage, device, limit_s=limit_s)

    def usages(
        self, devices: Sequence[Device], limit_s: Callable[[], float] | None = None
    ) -> Generator[Usage | DeviceError, None, None]:
        """Read several devices' usage together, and yield it in the same order.

        If one device answers slowly, the usage of the devices before it is yielded first.

        Args:
            devices: The devices, possibly from an earlier session.
            limit_s: A function that returns the timeout for the next device, in seconds. Defaults
                to the session's timeout.

        Yields:
            The device's usage, or the error if a required reading failed or timed out.
        """
        return self._read_each(self._read_usage, devices, limit_s)

    def readings(self, devices: Sequence[Device]) -> dict[Device, Reading | DeviceError]:
        """Read several devices together, as `read_all` does.

        Args:
            devices: The devices, possibly from an earlier session.

        Returns:
            Each device's reading, or the error if a required reading failed or timed out.
        """
        return dict(zip(devices, self._read_each(self._read_all, devices), strict=True))

    def read_all(self, device: Device) -> Reading:
        """Read a device's usage, including its processes, and its gauges, such as temperature.

        They are read together, because separate readings would each switch to the worker thread and
        back.

        Raises:
            DeviceError: A required reading failed, or timed out.
        """
        self._require(device)
        return self._driver.run(self._read_all, device)

    def processes(self, device: Device) -> list[Process]:
        """Return the processes on a device, except a desktop's, if the driver lists them."""
        return self.processes_of([device]).get(device, [])

    def processes_of(self, devices: Sequence[Place]) -> dict[Place, list[Process]]:
        """Query the processes on each device, all at once.

        The result contains compute processes, even those without device memory, MPS clients, and
        graphics processes that hold more memory than a desktop would. It is empty if the driver
        does not answer.
        """
        for device in devices:
            if isinstance(device, Device):
                with suppress(DeviceError):
                    self._require(device)
        with suppress(DeviceError):
            return self._driver.run(self._read_uses_of, tuple(devices))
        return {}

    def recent_use(
        self, device: Device, since: Instant, suspects: Collection[int] = ()
    ) -> dict[int, int | None] | None:
        """Return the processes that have used a device since a given time.

        Drivers keep samples of use for only a few seconds or minutes: driver 580 on an H100 for
        about 15 s. Earlier use is not found.

        Args:
            device: The device.
            since: The start of the period.
            suspects: The pids of the processes on the device if it is active at this moment.

        Returns:
            The percentage of time that each process spent computing, keyed by pid, or None if a
            process's samples can't be understood. None instead of a dictionary if the driver
            reports no samples, as for MIG instances or under WSL2.

        Raises:
            DeviceError: The driver reports samples, but they could not be read this time.
        """
        self._require(device)
        samples = self._driver.run(self._read_use_samples, device, 0)
        now, monotonic = procfs.now(), time.monotonic()
        start_s = samples_start_s(samples or (), since, now, monotonic)
        if start_s is not None:
            samples = self._driver.run(self._read_use_samples, device, int(start_s * 1e6))
        return None if samples is None else recent_use(samples, since, now, monotonic, suspects)

    def minors(self, devices: Sequence[Device]) -> dict[Device, int]:
        """Return the number N of each GPU's device file /dev/nvidiaN, if it is known.

        It can differ from the GPU's index. The processes of a MIG instance open its GPU's file.
        """
        minors = zip(devices, self._read_each(self._read_minor, devices), strict=True)
        return {device: minor for device, minor in minors if not isinstance(minor, DeviceError)}

    def share(self, device: Device) -> float | None:
        """Return a device's fraction of its GPU's memory, or None if the fraction is unknown."""
        if device.instance is None:
            return 1.0
        with suppress(DeviceError):
            self._require(device)
            return self._driver.run(self._read_share, device)
        return None

    def link(self, one: Device, other: Device, limit_s: float | None = None) -> int:
        """Return the distance between two GPUs as a `Link` value.

        Args:
            one: The first device.
            other: The second device.
            limit_s: Timeout in seconds. Defaults to the session's timeout.

        Returns:
            The distance, or `Link.SYSTEM` if the distance can't be read in time.
        """
        with suppress(DeviceError):
            self._require(one)
            self._require(other)
            return self._driver.run(self._read_link, one, other, limit_s=limit_s)
        return Link.SYSTEM

    def _require(self, device: Device) -> None:
        """Make sure that this session has a handle for a device from an earlier session."""
        if device.uuid not in self._handles:
            self.find(device)

    def _read_each(
        self,
        reading: Callable[[Device], T],
        devices: Sequence[Device],
        limit_s: Callable[[], float] | None = None,
    ) -> Generator[T | DeviceError, None, None]:
        lost: dict[Device, DeviceError] = {}
        for device in devices:
            try:
                self._require(device)
            except DeviceError as error:  # noqa: PERF203 - the other devices might be there
                lost[device] = error.with_traceback(None)  # its traceback refers to `lost`
        known = [device for device in devices if device not in lost]
        with closing(self._driver.run_each(reading, known, limit_s)) as outcomes:
            for device in devices:
                yield lost[device] if device in lost else next(outcomes)

    # The methods below run on the bindings' worker thread. Readings take a device and not its
    # handle, because a hanging reading is recognized by its arguments, and handles can change.

    def _read_gpu(self, index: int) -> list[Device | Fault]:
        gpu = self._driver.ask("nvmlDeviceGetHandleByIndex", index)
        is_split = self._is_split(gpu)
        self._boards[index] = self._read_board(gpu)
        if not is_split:
            return [self._read_device(index, gpu, gpu)]
        return [*self._read_instances(index, gpu)] or [
            Fault(index, "MIG is on, but the GPU has no MIG instances", state=State.EMPTY)
        ]

    def _read_awaits_ready_state(self) -> bool:
        if not self._driver.is_confidential():
            return False
        return not self._driver.ask("nvmlSystemGetConfComputeGpusReadyState")

    def _is_split(self, gpu: Any) -> bool:
        """Return whether MIG is on. Raise DeviceError if this can't be determined."""
        try:
            mode = self._driver.ask("nvmlDeviceGetMigMode", gpu, absent=NO_MIG)
        except DeviceError as error:
            # MIG can't be on if the GPU can't have instances.
            if error.code in DOWN_OR_HUNG or self._driver.ask(MIG_COUNT, gpu, faults=DOWN) != 0:
                raise
            return False
        return bool(mode and mode[0])

    def _read_board(self, gpu: Any) -> Board:
        """Read the properties of a whole GPU. Raise DeviceError if the GPU has a fault.

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
            raise DeviceError(f"it has a fault: the driver requests {RECOVERIES[action]}")
        has_screen = bool(read("nvmlDeviceGetDisplayActive", gpu))
        is_numa_node = read("nvmlDeviceGetNumaNodeId", gpu) is not None
        return Board(has_screen, bool(is_pending) or action == DRAIN_AND_RESET, is_numa_node)

    def _has_host_memory(self, gpu: Any, total_mib: float | None) -> bool:
        """Return whether a GPU uses the host's memory and has none of its own.

        For most such GPUs (GB10, Jetson, Thor), NVML reports no total memory
        (https://github.com/leptonai/gpud/pull/1170). Some drivers report the host's total memory
        (https://github.com/Syllo/nvtop/pull/463). A discrete GPU can have as much memory as its
        host, but it does not share the host's page tables
        (https://github.com/AlexsJones/llmfit/pull/93).
        """
        ask = self._driver.ask
        try:
            # If the total is unknown, read it again to get the error code.
            total_mib = total_mib or ask("nvmlDeviceGetMemoryInfo", gpu).total / MIB
            host_mib = procfs.memory_mib() or 0.0
            is_as_large = LEAST_OF_HOST * host_mib <= total_mib <= host_mib
            return is_as_large and ask("nvmlDeviceGetAddressingMode", gpu) == ADDRESSING_ATS
        except DeviceError as error:
            return total_mib is None and error.code == Code.NOT_SUPPORTED

    def _read_instances(self, index: int, gpu: Any) -> Iterator[Device | Fault]:
        """Yield a GPU's MIG instances. Raise DeviceError if they can't be listed."""
        ask = self._driver.ask
        for slot in range(ask(MIG_COUNT, gpu)):
            try:
                function = "nvmlDeviceGetMigDeviceHandleByIndex"
                if (handle := ask(function, gpu, slot, absent=NO_INSTANCE)) is not None:
                    yield self._read_device(index, handle, gpu, slot)
            except DeviceError as error:  # noqa: PERF203 - other instances might be fine
                yield Fault(index, str(error), slot, error.state, error.is_lost)

    def _read_device(self, index: int, handle: Any, gpu: Any, slot: int | None = None) -> Device:
        """Return the device with this handle, reusing the existing object if there is one."""
        uuid = self._driver.ask("nvmlDeviceGetUUID", handle)
        first = self._places.setdefault(uuid, (index, slot))
        if first != (index, slot):  # virtual GPUs can share a UUID, and thus a lock file
            label = Fault(first[0], "", first[1]).label
            raise DeviceError(f"it has the same UUID as {label}, so only {label} is used")
        self._handles[uuid] = handle, gpu
        for known in self._devices.get(index, ()):
            if isinstance(known, Device) and (known.uuid, known.instance) == (uuid, slot):
                return known
        read = partial(self._driver.ask, faults=DOWN)
        total_mib, used_mib, reserve_mib = self._read_memory(handle)
        has_host_memory = slot is None and self._has_host_memory(gpu, total_mib)
        if has_host_memory:
            self._boards[index] = self._boards[index]._replace(has_host_memory=True)
            total_mib = total_mib or procfs.memory_mib()
        memory_mib = None if total_mib is None else int(total_mib)
        self._first_usages[uuid] = Usage(
            total_mib=memory_mib,
            used_mib=used_mib,
            reserve_known=reserve_mib is not None,
            has_host_memory=self._boards[index].has_host_memory,
        )
        gpu_uuid, old_name = (None, None) if slot is None else self._read_origin(handle, gpu)
        return Device(
            index=index,
            uuid=uuid,
            name=read("nvmlDeviceGetName", handle),
            bus_id=self._driver.bus_id(gpu),
            memory_mib=memory_mib,
            vbios=_known_version(read("nvmlDeviceGetVbiosVersion", gpu)),
            # A GB10 reports a width of 1: https://github.com/Syllo/nvtop/issues/499
            link_width=None if has_host_memory else read("nvmlDeviceGetCurrPcieLinkWidth", gpu),
            instance=slot,
            gpu_uuid=gpu_uuid,
            old_name=old_name,
            reserve_mib=None if reserve_mib is None else math.ceil(reserve_mib),
        )

    def _read_origin(self, handle: Any, gpu: Any) -> tuple[str, str]:
        """Return the UUID of a MIG instance's GPU, and the instance's name in drivers before R470.

        https://docs.nvidia.com/datacenter/tesla/mig-user-guide/mig-device-names.html
        """
        gpu_uuid = self._driver.ask("nvmlDeviceGetUUID", gpu)
        gpu_instance = self._driver.ask("nvmlDeviceGetGpuInstanceId", handle, faults=DOWN)
        compute_instance = self._driver.ask("nvmlDeviceGetComputeInstanceId", handle, faults=DOWN)
        return gpu_uuid, f"MIG-{gpu_uuid}/{gpu_instance}/{compute_instance}"

    def _read_all(self, device: Device) -> Reading:
        return self._read_usage(device), self._read_gauges(device)

    def _read_usage(self, device: Device) -> Usage:
        handle, gpu = self._handles[device.uuid]
        board = self._boards[self._places[device.uuid][0]]
        _, used_mib, reserve_mib = self._read_memory(handle)
        # The compute mode belongs to the GPU, not to an instance.
        mode = self._driver.ask("nvmlDeviceGetComputeMode", gpu, faults=DOWN_OR_HUNG)
        graphics = self._read_list(handle, GRAPHICS)
        compute = self._driver.process_count(handle, KINDS[COMPUTE])
        mps = self._driver.process_count(handle, KINDS[MPS])
        # An idle device needs no further call.
        computing = [] if compute == 0 else self._read_list(handle, COMPUTE)
        clients = [] if mps == 0 else self._read_list(handle, MPS)
        sizes = [p.memory_mib for p in _distinct([*computing, *clients, *graphics])]
        missing = max(0, (compute or 0) - len(computing))
        is_all = (
            self.sees_all and compute is not None and not missing and len(clients) >= (mps or 0)
        )
        listed_mib = float(sum(filter(None, sizes))) if is_all and None not in sizes else None
        if board.has_host_memory:
            used_mib = listed_mib
        if compute:  # processes missing from the list count as use
            uses = [p for p in _jobs(computing, graphics) if not has_no_memory(p, mode)]
            # Driver 580 lists an MPS client as a compute process as well.
            counted = {p.pid for p in clients} if mps else set()
            compute = len({p.pid for p in uses} - counted) + missing
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
            listed_mib=listed_mib,
            processes=tuple(_each_once(computing, clients, graphics)),
        )

    def _read_memory(self, handle: Any) -> tuple[float | None, float | None, float | None]:
        """Read the total memory, the used memory and the driver's reserve, all in MiB.

        The reserve is None if the driver includes it in the used memory.
        """
        memory = None
        if not self._driver.may_have_memory_limit(handle):
            memory = self._driver.memory_v2(handle)
        if not memory:
            memory = self._driver.ask("nvmlDeviceGetMemoryInfo", handle, absent=NOT_OFFERED)
        if memory is None:
            return None, None, None
        reserve = getattr(memory, "reserved", None)  # only version 2 has this field
        return memory.total / MIB, memory.used / MIB, None if reserve is None else reserve / MIB

    def _read_gauges(self, device: Device) -> Gauges:
        """Read the gauges, which are only displayed: utilization, temperature and power.

        A gauge that can't be read is None.
        """
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
        """Return the result of the first function that succeeds, or None if all fail."""
        for name in names:
            with suppress(DeviceError):
                return self._driver.ask(name, *arguments)
        return None

    def _read_uses_of(self, devices: Sequence[Place]) -> dict[Place, list[Process]]:
        known = [d for d in devices if isinstance(d, Device) and d.uuid in self._handles]
        return {d: split_graphics(self._read_processes(d), d.memory_mib)[0] for d in known}

    def _read_processes(self, device: Device) -> list[Process]:
        handle, _ = self._handles[device.uuid]
        return _each_once(*(self._read_list(handle, kind) for kind in KINDS))

    def _read_list(self, handle: Any, kind: str) -> list[Process]:
        """Read the processes of one kind. The list is empty if the driver does not report them.

        This tries the _v2 function first, because drivers 535.43 to 535.98 fill the _v3 function's
        buffer with larger structs than they declare (https://github.com/XuehaiPan/nvitop/pull/79).
        """
        for version in ("v2", "v3"):
            with suppress(DeviceError):
                name = f"nvmlDeviceGet{KINDS[kind]}RunningProcesses_{version}"
                return [_process(entry, kind) for entry in self._driver.ask(name, handle)]
        return []

    def _read_use_samples(self, device: Device, since_us: int) -> list[UseSample] | None:
        """Read the processes' utilization since a time on the samples' own clock, or since 0.

        The result is None if the driver reports no samples.
        """
        handle, _ = self._handles[device.uuid]
        try:
            samples = self._driver.ask("nvmlDeviceGetProcessUtilization", handle, since_us)
        except DeviceError as error:
            if error.code in NO_SAMPLES:
                return []
            if error.code in UNREAD_SAMPLES:
                raise
            return None
        return [
            UseSample(s.pid, s.timeStamp / 1e6, (s.smUtil, s.memUtil, s.encUtil, s.decUtil))
            for s in samples
        ]

    def _read_minor(self, device: Device) -> int:
        minor: int = self._driver.ask("nvmlDeviceGetMinorNumber", self._handles[device.uuid][1])
        return minor

    def _read_share(self, device: Device) -> float | None:
        handle, gpu = self._handles[device.uuid]
        device_mib, gpu_mib = self._read_memory(handle)[0], self._read_memory(gpu)[0]
        return min(1.0, device_mib / gpu_mib) if device_mib and gpu_mib else None

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


def _count_wanted(
    is_wanted: Callable[[Sequence[Place]], bool], number: int
) -> Callable[[Sequence[Place]], bool]:
    """Return a function that returns whether it has been called with at least `number` wanted GPUs.

    Args:
        is_wanted: A function that returns whether a GPU, given as its devices, is wanted.
        number: The number of wanted GPUs.
    """
    wanted = 0

    def is_enough(devices: Sequence[Place]) -> bool:
        nonlocal wanted
        wanted += is_wanted(devices)
        return wanted >= number

    return is_enough


def _jobs(computing: Sequence[Process], graphics: Sequence[Process]) -> list[Process]:
    """Return the compute processes that do not belong to a desktop."""
    drawing = {process.pid for process in graphics}
    return [process for process in computing if not is_desktop(process, drawing)]


def _each_once(
    computing: Sequence[Process], clients: Sequence[Process], graphics: Sequence[Process]
) -> list[Process]:
    """Return one entry for each process, preferring compute entries, and then MPS entries."""
    return _distinct([*_jobs(computing, graphics), *clients, *graphics])


def _distinct(listed: Iterable[Process]) -> list[Process]:
    """Return each process's first entry."""
    processes: dict[int, Process] = {}
    for process in listed:
        processes.setdefault(process.pid, process)
    return list(processes.values())


def _process(entry: Any, kind: str) -> Process:
    memory = entry.usedGpuMemory
    # Rounded up, because 0 means that the process holds no memory. With the structs of drivers
    # 535.43 to 535.98, the _v3 function puts the second process's pid in place of its memory.
    return Process(entry.pid, None if memory is None else -(-memory // MIB), kind=kind)


def _known_version(text: str | None) -> str | None:
    """Return a VBIOS version, or None for a placeholder such as `00.00.00.00.00` or `[N/A]`."""
    return text if text and text.strip("[] .0").lower() not in NO_VERSION else None
