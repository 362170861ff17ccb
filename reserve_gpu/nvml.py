"""What the NVIDIA driver says: which devices there are and what uses them.

The only module that imports `pynvml`. It reports and judges nothing; what the readings mean is decided
in `choosing.py`. Touching a GPU can cost seconds where persistence mode is off, so nothing is asked
that nobody needs: a device is initialised when it is asked for, never before.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from reserve_gpu.caller import Caller
from reserve_gpu.device import Device, Fault, Process, Usage
from reserve_gpu.errors import DriverError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType, TracebackType

MIB = 1 << 20
CALL_LIMIT_S = 20.0  # initialising one GPU takes 1 to 3 s without persistence mode

# Codes of nvmlReturn_t (nvml.h) that mean "this reading is not to be had here" rather than "this
# device is in trouble": NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND, ARGUMENT_VERSION_MISMATCH,
# DEPRECATED.
NOT_OFFERED = frozenset({3, 4, 13, 25, 26})
# Old drivers under WSL2 answer UNKNOWN (999) for process lists.
NO_PROCESS_LIST = NOT_OFFERED | {999}
# What only decorates a message may be missing for more reasons: NOT_FOUND, CORRUPTED_INFOROM, NO_DATA.
NO_DECORATION = NO_PROCESS_LIST | {6, 14, 21}
NOT_FOUND, INSUFFICIENT_SIZE, NO_DATA = 6, 7, 21

INITIAL_PID_NAMESPACE = 0xEFFFFFFC  # include/linux/proc_ns.h: PROC_PID_INIT_INO
WSL_LIBRARY = "/usr/lib/wsl/lib/libnvidia-ml.so.1"

COMPUTE_MODES = {0: "default", 1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}

INIT_REMEDIES = {
    12: "No NVIDIA driver here: libnvidia-ml.so.1 was not found.",
    13: "The NVIDIA driver is too old for nvidia-ml-py. Upgrade the driver, or install an older "
    "nvidia-ml-py.",
    9: "The NVIDIA driver is installed but its kernel module is not loaded. Try nvidia-smi; reboot, or "
    "ask the administrator to.",
    18: "The NVIDIA driver was updated while its old kernel module is still running. Reboot this "
    "machine.",
    17: "The operating system blocks access to the NVIDIA driver. In a container, start it with GPU "
    "access (docker run --gpus all).",
    4: "This user may not use the NVIDIA driver. Ask the administrator for access to /dev/nvidia*.",
    999: "The NVIDIA driver fails to start. A container that lost its GPUs (after systemctl "
    "daemon-reload on the host) must be started again; else see nvidia-smi.",
}
REINSTALL = (
    "The module pynvml in this environment is not the one from nvidia-ml-py. Run: "
    "python -m pip uninstall -y pynvml nvidia-ml-py3 nvidia-ml-py && "
    "python -m pip install nvidia-ml-py"
)


class DeviceError(Exception):
    """A device that can't be read. code: what NVML answered, None if it was no NVML error."""

    def __init__(self, reason: str, code: int | None = None) -> None:
        super().__init__(reason)
        self.code = code


class Nvml:
    """One conversation with the driver, from initialisation to shutdown; a context manager.

    limit_s: seconds after which a driver call counts as hanging.
    Raises DriverError on entry where there is no driver to talk to.
    """

    def __init__(self, limit_s: float = CALL_LIMIT_S) -> None:
        self._limit_s = limit_s
        self._devices: dict[int, list[Device | Fault]] = {}
        self._handles: dict[str, Any] = {}
        self._boards: dict[str, Any] = {}
        self.sees_all = sees_all_processes()

    def __enter__(self) -> Nvml:
        self._pynvml = _import_pynvml()
        self._call = Caller(self._limit_s)
        try:
            self._ask(self._pynvml.nvmlInit)
        except DeviceError as error:
            self._call.close()
            raise DriverError(_init_message(error)) from error
        except BaseException:
            self._call.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._call.stuck:  # NVML serialises: a shutdown would hang behind the call that hangs
            with suppress(DeviceError):
                self._ask(self._pynvml.nvmlShutdown)
        self._call.close()

    def count(self) -> int:
        """How many GPUs there are, one or more, those included that can't be used. Raises DriverError."""
        try:
            count = int(self._ask(self._pynvml.nvmlDeviceGetCount))
        except DeviceError as error:
            raise DriverError(f"The NVIDIA driver does not say how many GPUs there are: {error}.") from error
        if not count:
            raise DriverError("The NVIDIA driver is here, but it shows no GPU to this process.")
        return count

    def walk(self) -> Iterator[Device | Fault]:
        """All devices in PCI bus order, each GPU touched only when it is reached."""
        for index in range(self.count()):
            yield from self.devices(index)

    def devices(self, index: int) -> list[Device | Fault]:
        """The devices of GPU index: itself, or its MIG instances; a Fault for what can't be used."""
        if index not in self._devices:
            self._devices[index] = self._read(index)
        return self._devices[index]

    def _read(self, index: int) -> list[Device | Fault]:
        label = f"GPU{index}"
        try:
            handle = self._ask(self._pynvml.nvmlDeviceGetHandleByIndex, index)
            if not self._mig_is_on(handle):
                return [self._device(handle, index)]
            instances = self._instances(handle, index)
        except DeviceError as error:
            return [Fault(label, str(error))]
        return instances or [Fault(label, "MIG is on, but it has no MIG instances")]

    def usage(self, device: Device) -> Usage:
        """What uses the device now. Raises DeviceError if a reading fails that ought to work."""
        handle = self._handles[device.uuid]
        total, used, reserve_known = self._memory(handle)
        compute = self._process_count(handle, "nvmlDeviceGetComputeRunningProcesses")
        mps = self._process_count(handle, "nvmlDeviceGetMPSComputeRunningProcesses")
        mode = self._optional(self._pynvml.nvmlDeviceGetComputeMode, self._boards[device.uuid])
        return Usage(
            compute=compute,
            mps=mps,
            sees_all=self.sees_all,
            total_mib=total,
            used_mib=used,
            reserve_known=reserve_known,
            graphics_mib=float(sum(p.memory_mib or 0 for p in self._list(handle, "Graphics"))),
            mode=None if mode is None else COMPUTE_MODES.get(mode, f"mode {mode}"),
        )

    def processes(self, device: Device) -> list[Process]:
        """The compute processes and MPS clients on the device, as far as they are shown to us."""
        handle = self._handles[device.uuid]
        found = self._list(handle, "Compute") + self._list(handle, "MPSCompute")
        return list({process.pid: process for process in found}.values())

    # -- one device ------------------------------------------------------------------------------

    def _device(self, handle: Any, index: int, instance: int | None = None, parent: Any = None) -> Device:
        nvml, decoration = self._pynvml, partial(self._optional, absent=NO_DECORATION)
        uuid = _text(self._ask(nvml.nvmlDeviceGetUUID, handle))
        self._handles[uuid] = handle
        board = self._boards[uuid] = handle if parent is None else parent  # whose PCI readings count
        pci = decoration(nvml.nvmlDeviceGetPciInfo, board)
        total = self._memory(handle)[0]
        return Device(
            index=index,
            uuid=uuid,
            name=_text(decoration(nvml.nvmlDeviceGetName, handle)),
            bus_id=None if pci is None else _bus_id(pci),
            memory_mib=None if total is None else int(total),
            vbios=_text(decoration(nvml.nvmlDeviceGetVbiosVersion, board)),
            link_width=decoration(nvml.nvmlDeviceGetCurrPcieLinkWidth, board),
            instance=instance,
        )

    def _mig_is_on(self, handle: Any) -> bool:
        mode = self._optional(self._pynvml.nvmlDeviceGetMigMode, handle)
        return bool(mode and mode[0])

    def _instances(self, handle: Any, index: int) -> list[Device | Fault]:
        nvml, found = self._pynvml, []
        for slot in range(self._ask(nvml.nvmlDeviceGetMaxMigDeviceCount, handle)):
            try:
                instance = self._ask(nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, slot)
                found.append(self._device(instance, index, slot, handle))
            except DeviceError as error:
                if error.code != NOT_FOUND:  # gaps in the numbering are normal
                    found.append(Fault(f"GPU{index}:{slot}", str(error)))
        return found

    def _memory(self, handle: Any) -> tuple[float | None, float | None, bool]:
        """Total and used memory in MiB, and whether the driver's own reserve is left out of it."""
        nvml = self._pynvml
        memory, reserve_known = self._optional(_memory_v2, nvml, handle, absent=NOT_OFFERED | {2}), True
        if memory is None:
            memory, reserve_known = self._optional(nvml.nvmlDeviceGetMemoryInfo, handle), False
        if memory is None:
            return None, None, reserve_known
        return memory.total / MIB, memory.used / MIB, reserve_known

    def _process_count(self, handle: Any, name: str) -> int | None:
        return self._optional(_process_count, self._pynvml, handle, name, absent=NO_PROCESS_LIST)

    def _list(self, handle: Any, kind: str) -> list[Process]:
        """The processes of one kind; none where the driver keeps them to itself.

        _v2 first: drivers 535.43 to 535.98 fill _v3's buffer with a larger struct than they
        declare (https://github.com/XuehaiPan/nvitop/pull/79).
        """
        for version in ("v2", "v3"):
            function = getattr(self._pynvml, f"nvmlDeviceGet{kind}RunningProcesses_{version}", None)
            if function is not None:
                with suppress(DeviceError):
                    return [_process(entry) for entry in self._ask(function, handle)]
        return []

    # -- one call --------------------------------------------------------------------------------

    def _optional(self, function: Callable[..., Any], *arguments: Any, absent: frozenset[int] = NOT_OFFERED) -> Any:
        """The reading, or None if its error code says that it is not to be had here."""
        try:
            return self._ask(function, *arguments)
        except DeviceError as error:
            if error.code in absent:
                return None
            raise

    def _ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return self._call(function, *arguments)
        except self._pynvml.NVMLError as error:
            code = getattr(error, "value", None)
            raise DeviceError(f"{error} ({_name(function)})".replace(". (", " ("), code) from error
        except TimeoutError as error:
            raise DeviceError(f"the driver hangs: {error} ({_name(function)})") from error
        except UnicodeDecodeError as error:
            raise DeviceError(f"unreadable text ({_name(function)})", NO_DATA) from error
        except Exception as error:  # the bindings also raise what is no NVMLError
            raise DeviceError(f"{type(error).__name__}: {error} ({_name(function)})") from error


def sees_all_processes() -> bool:
    """Whether an empty process list means that there are no processes.

    Not in a PID namespace: drivers from 535.113 on leave out what is outside of it. Not under WSL2:
    Windows and other virtual machines use the GPU too.
    """
    try:
        initial = os.stat("/proc/self/ns/pid").st_ino == INITIAL_PID_NAMESPACE
        with open("/proc/sys/kernel/osrelease", encoding="ascii", errors="replace") as release:
            return initial and "microsoft" not in release.read().lower()
    except OSError:
        return False


def _import_pynvml() -> ModuleType:
    _preload_wsl_library()
    try:
        import pynvml
    except ImportError as error:
        raise DriverError(f"The module pynvml can't be imported ({error}). Run: python -m pip install nvidia-ml-py") from error
    if not hasattr(pynvml, "_nvmlGetFunctionPointer") or not hasattr(pynvml, "NVMLError"):
        raise DriverError(REINSTALL)
    return pynvml


def _preload_wsl_library() -> None:
    """Under WSL2 the library is where the loader may not look; once loaded, its name finds it."""
    if os.path.exists(WSL_LIBRARY):
        import ctypes

        with suppress(OSError):
            ctypes.CDLL(WSL_LIBRARY)


def _init_message(error: DeviceError) -> str:
    remedy = INIT_REMEDIES.get(error.code or 0)
    if remedy is None:
        return f"The NVIDIA driver fails to start: {error}."
    return f"{remedy} [{error}]"


def _memory_v2(nvml: ModuleType, handle: Any) -> Any:
    try:
        return nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
    except (TypeError, AttributeError):  # old bindings, or gpustat's replacement of that function
        return None


def _process_count(nvml: ModuleType, handle: Any, name: str) -> int:
    """How many processes the driver would list, without a buffer: it depends on no struct's size."""
    import ctypes

    for variant in (f"{name}_v3", f"{name}_v2", name):
        try:
            function = nvml._nvmlGetFunctionPointer(variant)
        except nvml.NVMLError as error:
            missing = error
            continue
        count = ctypes.c_uint(0)
        code = function(handle, ctypes.byref(count), None)
        if code == INSUFFICIENT_SIZE:
            return max(count.value, 1)
        if code == 0:
            return count.value  # a simulated driver may answer SUCCESS with a count
        raise nvml.NVMLError(code)
    raise missing


def _process(entry: Any) -> Process:
    memory = entry.usedGpuMemory
    return Process(entry.pid, None if memory is None else memory // MIB)


def _text(value: str | bytes | None) -> Any:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _bus_id(pci: Any) -> str:
    """The bus id with four digits of domain, as in 0000:03:00.0."""
    return str(_text(pci.busIdLegacy) or _text(pci.busId)[4:])


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", function)).lstrip("_")
