"""What the NVIDIA driver says: which devices there are and what uses them.

It reports and judges nothing; what the readings mean is decided in `choosing.py`. Touching a GPU
can cost seconds where persistence mode is off, so nothing is asked that nobody needs: a GPU is
initialised when it is asked for, never before.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from reserve_gpu import bindings, myself
from reserve_gpu.bindings import NOT_OFFERED, Bindings, DeviceError
from reserve_gpu.device import Device, Fault, Process, Usage
from reserve_gpu.errors import DriverError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from typing_extensions import Self

MIB = 1 << 20
CALL_LIMIT_S = 20.0  # initialising one GPU takes 1 to 3 s without persistence mode

# Old drivers under WSL2 answer UNKNOWN for process lists.
NO_PROCESS_LIST = NOT_OFFERED | {bindings.UNKNOWN}
# Any other answer leaves open whether it is split, and who then uses a part of it.
NO_MIG = frozenset({bindings.NOT_SUPPORTED, bindings.FUNCTION_NOT_FOUND})
NO_MEMORY_V2 = NOT_OFFERED | {bindings.INVALID_ARGUMENT}

COMPUTE_MODES = {0: "default", 1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}


class Nvml:
    """One conversation with the driver, from initialisation to shutdown; a context manager.

    limit_s: seconds after which a driver call counts as hanging.
    Entered, it starts the driver and does not wait for it. Raises DriverError if there are no
    bindings to do that with.
    """

    def __init__(self, limit_s: float = CALL_LIMIT_S) -> None:
        self._limit_s = limit_s
        self._devices: dict[int, list[Device | Fault]] = {}
        self._handles: dict[str, Any] = {}  # by UUID
        self._boards: dict[str, Any] = {}  # the handle of the GPU that a device is, or is a part of
        self.sees_all = sees_all_processes()

    def __enter__(self) -> Self:
        self._driver = Bindings(self._limit_s)
        self._pynvml = self._driver.pynvml
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._driver.close()

    def count(self) -> int:
        """How many GPUs there are, one or more, unusable ones included.

        To be asked first: here it shows whether there is a driver to talk to. Raises DriverError.
        """
        try:
            count = self._driver.count()
        except DeviceError as error:
            raise DriverError(f"The NVIDIA driver does not count its GPUs: {error}.") from error
        if not count:
            raise DriverError("The NVIDIA driver is here, but it shows no GPU to this process.")
        return count

    def driver_version(self) -> str | None:
        """The version of the driver, as `550.54.15`."""
        with suppress(DeviceError):
            function = self._pynvml.nvmlSystemGetDriverVersion
            return str(bindings.text(self._driver.run(self._driver.ask, function)))
        return None

    def walk(self, skipped: frozenset[int] = frozenset()) -> Iterator[Device | Fault]:
        """All devices in PCI bus order, each GPU touched only when it is reached.

        skipped: the indices of GPUs that are not to be touched at all.
        """
        for index in range(self.count()):
            if index not in skipped:
                yield from self.devices(index)

    def devices(self, index: int) -> list[Device | Fault]:
        """The devices of GPU index: itself, or its MIG instances; a Fault for what is unusable."""
        if index not in self._devices:
            try:
                self._devices[index] = self._driver.run(self._read, index)
            except DeviceError as error:
                self._devices[index] = [Fault(index, str(error))]
        return self._devices[index]

    def usage(self, device: Device) -> Usage:
        """What uses the device now. Raises DeviceError if a reading fails that ought to work."""
        return self._driver.run(self._usage, device)

    def _usage(self, device: Device) -> Usage:
        handle = self._handles[device.uuid]
        total, used, reserve_known = self._memory(handle)
        board = self._boards[device.uuid]  # an instance has no compute mode of its own
        mode = self._driver.ask_if_offered(self._pynvml.nvmlDeviceGetComputeMode, board)
        return Usage(
            compute=self._process_count(handle, "nvmlDeviceGetComputeRunningProcesses"),
            mps=self._process_count(handle, "nvmlDeviceGetMPSComputeRunningProcesses"),
            sees_all=self.sees_all,
            total_mib=total,
            used_mib=used,
            reserve_known=reserve_known,
            graphics_mib=float(sum(p.memory_mib or 0 for p in self._list(handle, "Graphics"))),
            mode=None if mode is None else COMPUTE_MODES.get(mode, f"mode {mode}"),
        )

    def utilisation(self, device: Device) -> int | None:
        """How busy the device was of late, in percent; None where that is not reported."""
        function = self._pynvml.nvmlDeviceGetUtilizationRates
        with suppress(DeviceError):
            return int(self._driver.run(self._driver.ask, function, self._handles[device.uuid]).gpu)
        return None

    def processes(self, device: Device) -> list[Process]:
        """The compute processes and MPS clients on the device, as far as they are shown to us."""
        with suppress(DeviceError):
            return self._driver.run(self._processes, self._handles[device.uuid])
        return []

    def _processes(self, handle: Any) -> list[Process]:
        listed = (self._list(handle, kind) for kind in ("Compute", "MPSCompute"))
        return list({process.pid: process for found in listed for process in found}.values())

    def link(self, one: Device, other: Device) -> int:
        """How two GPUs are connected, as far as the driver can tell."""
        from reserve_gpu import links

        return links.link(self._driver, self._boards[one.uuid], self._boards[other.uuid])

    def _read(self, index: int) -> list[Device | Fault]:
        handle = self._driver.ask(self._pynvml.nvmlDeviceGetHandleByIndex, index)
        function = self._pynvml.nvmlDeviceGetMigMode
        mode = self._driver.ask_if_offered(function, handle, absent=NO_MIG)
        if not (mode and mode[0]):
            return [self._device(handle, index, handle)]
        from reserve_gpu import mig

        found = mig.instances(self._driver, handle, index, partial(self._device, handle, index))
        return found or [Fault(index, "MIG is on, but it has no MIG instances")]

    def _device(self, board: Any, index: int, handle: Any, slot: int | None = None) -> Device:
        decoration, nvml = self._driver.decoration, self._pynvml
        uuid = bindings.text(self._driver.ask(nvml.nvmlDeviceGetUUID, handle))
        self._handles[uuid], self._boards[uuid] = handle, board
        pci = decoration(nvml.nvmlDeviceGetPciInfo, board)
        total = self._memory(handle)[0]
        return Device(
            index=index,
            uuid=uuid,
            name=decoration(nvml.nvmlDeviceGetName, handle),
            bus_id=None if pci is None else _bus_id(pci),
            memory_mib=None if total is None else int(total),
            vbios=decoration(nvml.nvmlDeviceGetVbiosVersion, board),
            link_width=decoration(nvml.nvmlDeviceGetCurrPcieLinkWidth, board),
            instance=slot,
        )

    def _memory(self, handle: Any) -> tuple[float | None, float | None, bool]:
        """Total and used memory in MiB, and whether the driver's own reserve is left out of it."""
        ask, nvml = self._driver.ask_if_offered, self._pynvml
        name = "nvmlDeviceGetMemoryInfo_v2"
        memory = ask(bindings.memory_v2, nvml, handle, name, absent=NO_MEMORY_V2)
        reserve_known = memory is not None
        if memory is None:
            memory = ask(nvml.nvmlDeviceGetMemoryInfo, handle)
        if memory is None:
            return None, None, reserve_known
        return memory.total / MIB, memory.used / MIB, reserve_known

    def _process_count(self, handle: Any, name: str) -> int | None:
        count: int | None = self._driver.ask_if_offered(
            bindings.process_count, self._pynvml, handle, name, absent=NO_PROCESS_LIST
        )
        return count

    def _list(self, handle: Any, kind: str) -> list[Process]:
        """The processes of one kind; none where the driver keeps them to itself.

        _v2 first: drivers 535.43 to 535.98 fill _v3's buffer with a larger struct than they
        declare (https://github.com/XuehaiPan/nvitop/pull/79).
        """
        for version in ("v2", "v3"):
            function = getattr(self._pynvml, f"nvmlDeviceGet{kind}RunningProcesses_{version}", None)
            if function is not None:
                with suppress(DeviceError):
                    return [_process(entry) for entry in self._driver.ask(function, handle)]
        return []


def sees_all_processes() -> bool:
    """Whether an empty process list means that there are no processes.

    Not in a PID namespace: drivers from 535.113 on leave out what is outside of it. Not under WSL2:
    Windows and other virtual machines use the GPU too.
    """
    try:
        initial = myself.pid_namespace() == myself.INITIAL_PID_NAMESPACE
        with open("/proc/sys/kernel/osrelease", encoding="utf-8") as release:
            return initial and "microsoft" not in release.read().lower()
    except OSError:
        return False


def _process(entry: Any) -> Process:
    memory = entry.usedGpuMemory
    return Process(entry.pid, None if memory is None else memory // MIB)


def _bus_id(pci: Any) -> str:
    """The bus id with four digits of domain, as in 0000:03:00.0."""
    return str(bindings.text(pci.busIdLegacy) or bindings.text(pci.busId)[4:])
