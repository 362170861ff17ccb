"""Print all values that NVML reports of a GPU, and the GPU as a scenario of the stand-in driver.

`python -m tests.hardware --describe` runs this module in a process of its own. The name of each
call is printed before the call, so that a call that hangs is the last one named.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from typing import TYPE_CHECKING, Any

import pynvml

from tests import driver
from tests.support.hardware.machine import H100S
from tests.support.hardware.report import one_line

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1 << 20
NAMES = (
    *("Name", "UUID", "Serial", "PciInfo", "VbiosVersion", "MinorNumber", "Architecture"),
    *("CudaComputeCapability", "ComputeMode", "PersistenceMode", "MigMode", "MaxMigDeviceCount"),
    *("CurrPcieLinkWidth", "MaxPcieLinkWidth", "CurrPcieLinkGeneration", "RemappedRows"),
    *("DisplayActive", "DisplayMode", "NumaNodeId", "AddressingMode", "MemoryInfo", "EccMode"),
    *("UtilizationRates", "PowerUsage", "EnforcedPowerLimit", "VirtualizationMode"),
    *("AccountingMode", "BAR1MemoryInfo", "CurrentClocksEventReasons"),
)
SYSTEM = (
    *("DriverVersion", "NVMLVersion", "CudaDriverVersion_v2", "ConfComputeState"),
    "ConfComputeGpusReadyState",
)
KINDS = {"compute": "Compute", "graphics": "Graphics", "mps": "MPSCompute"}
MODES = ("default", "exclusive_thread", "prohibited", "exclusive_process")
RECOVERY_ACTION = 230  # NVML_FI_DEV_GET_GPU_RECOVERY_ACTION


class Asked:
    """The answers of NVML, by the name of the call."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}
        self.errors: dict[str, str] = {}

    def ask(self, name: str, *arguments: Any, label: str = "", **keywords: Any) -> Any:
        """Make a call, and print its answer and its time; returns None after an error."""
        key = name + label
        print(f"{key} ", end="", flush=True)
        start, value = time.perf_counter(), None
        try:
            value = getattr(pynvml, name)(*arguments, **keywords)
            text = f"= {shown(name, value)}"
        except Exception as error:
            text = self.errors[key] = f"{type(error).__name__}: {error}"
        print(f"{one_line(text)}  [{(time.perf_counter() - start) * 1e3:.2f} ms]", flush=True)
        self.answers[key] = value
        return value


def shown(name: str, value: Any) -> object:
    """Return the answer of a call without UUID, serial number, pids and addresses."""
    if name in {"nvmlDeviceGetUUID", "nvmlDeviceGetSerial"} or "Handle" in name:
        return "(hidden)"
    if "Process" in name:
        return f"{len(value)} entries"
    return plain(value)


def plain(value: Any) -> Any:
    """Return structures, arrays and bytes of ctypes as values that can be printed."""
    if isinstance(value, ctypes.Union):
        return getattr(value, "uiVal", None)
    if isinstance(value, ctypes.Structure):
        return {field[0]: plain(getattr(value, field[0])) for field in value._fields_}
    if type(value).__name__ == "nvmlFriendlyObject":
        return {name: plain(each) for name, each in vars(value).items()}
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, (list, tuple, ctypes.Array)):
        return [plain(each) for each in value]
    return value


def read(asked: Asked, index: int) -> None:
    """Ask NVML for everything that a scenario contains, and more."""
    for name in SYSTEM:
        asked.ask(f"nvmlSystemGet{name}")
    handle = asked.ask("nvmlDeviceGetHandleByIndex", index)
    if handle is None:
        return
    for name in NAMES:
        asked.ask(f"nvmlDeviceGet{name}", handle)
    version = getattr(pynvml, "nvmlMemory_v2", 2)
    asked.ask("nvmlDeviceGetMemoryInfo", handle, label=" v2", version=version)
    asked.ask("nvmlDeviceGetTemperature", handle, 0)
    asked.ask("nvmlDeviceGetFieldValues", handle, [RECOVERY_ACTION])
    for kind in KINDS.values():
        asked.ask(f"nvmlDeviceGet{kind}RunningProcesses", handle)
    asked.ask("nvmlDeviceGetProcessUtilization", handle, 0)
    read_instances(asked, handle)
    if asked.answers.get("nvmlDeviceGetCount", 1) > 1:
        other = pynvml.nvmlDeviceGetHandleByIndex(1 if index == 0 else 0)
        asked.ask("nvmlDeviceGetTopologyCommonAncestor", handle, other)


def read_instances(asked: Asked, handle: Any) -> None:
    """Ask for each MIG instance."""
    mode = asked.answers.get("nvmlDeviceGetMigMode")
    for slot in (
        range(asked.answers.get("nvmlDeviceGetMaxMigDeviceCount") or 0) if mode and mode[0] else ()
    ):
        label = f" of slot {slot}"
        instance = asked.ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, slot, label=label)
        for name in ("Name", "GpuInstanceId", "ComputeInstanceId", "MemoryInfo"):
            if instance is not None:
                asked.ask(f"nvmlDeviceGet{name}", instance, label=label)


def scenario(asked: Asked) -> str:
    """Return the GPU in the language of the stand-in driver, without UUID, pids and paths."""
    system = {"driver": "DriverVersion", "cuda": "CudaDriverVersion_v2"}
    lines = [f"{word} {asked.answers[f'nvmlSystemGet{name}']}" for word, name in system.items()]
    words = [f"  {word} {value}" for word, value in gpu_words(asked.answers) if value is not None]
    errors = [f"#   {one_line(f'{name}: {error}')}" for name, error in asked.errors.items()]
    return "\n".join([*lines, "gpu", *words, *errors])


def gpu_words(answers: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Return the words that describe the GPU, and their values."""

    def value(name: str) -> Any:
        return answers.get(f"nvmlDeviceGet{name}")

    def or_none(number: Any) -> Any:
        return "none" if number is None else number

    pci, memory, mode = value("PciInfo"), value("MemoryInfo v2"), value("ComputeMode")
    capability, mig, rates = (
        value("CudaComputeCapability"),
        value("MigMode"),
        value("UtilizationRates"),
    )
    lists = {kind: value(f"{name}RunningProcesses") or [] for kind, name in KINDS.items()}
    yield "name", value("Name")
    yield "bus", pci and plain(pci.busId)[-12:]
    yield "vbios", value("VbiosVersion")
    if memory:
        listed = {p.pid: p.usedGpuMemory or 0 for found in lists.values() for p in found}
        yield "memory", memory.total // MIB
        yield "reserved", memory.reserved // MIB
        yield "used", max(0, memory.used - sum(listed.values())) // MIB
    yield "width", or_none(value("CurrPcieLinkWidth"))
    yield "generation", or_none(value("CurrPcieLinkGeneration"))
    yield "mode", None if mode is None else MODES[mode]
    yield "utilisation", or_none(rates and rates.gpu)
    yield "temperature", or_none(value("Temperature"))
    for word, name in (("power", "PowerUsage"), ("power-limit", "EnforcedPowerLimit")):
        watts = value(name)
        yield word, "none" if watts is None else round(watts / 1000)
    yield "capability", capability and ".".join(map(str, capability))
    yield "mig", "none" if mig is None else "on" if mig[0] else "off"
    for word, name in (
        ("slots", "MaxMigDeviceCount"),
        ("screen", "DisplayActive"),
        ("numa", "NumaNodeId"),
        ("addressing", "AddressingMode"),
    ):
        yield word, value(name)
    fields = value("FieldValues")
    if fields and not fields[0].nvmlReturn:
        yield "recovery", fields[0].value.uiVal
    yield from process_words(lists)
    yield from instance_words(answers)


def process_words(lists: dict[str, list[Any]]) -> Iterator[tuple[str, str]]:
    """Return the processes, with invented pids."""
    pids: dict[int, int] = {}
    for kind, processes in lists.items():
        for process in processes:
            pid = pids.setdefault(process.pid, 4321000 + len(pids))
            size = process.usedGpuMemory
            yield kind, f"{pid} {'-' if size is None else size // MIB}"


def instance_words(answers: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Return the MIG instances."""
    for slot in range(8):
        memory = answers.get(f"nvmlDeviceGetMemoryInfo of slot {slot}")
        if memory is not None:
            yield "instance", slot
            yield "  memory", memory.total // MIB
            yield "  gi", answers.get(f"nvmlDeviceGetGpuInstanceId of slot {slot}")
            yield "  ci", answers.get(f"nvmlDeviceGetComputeInstanceId of slot {slot}")


def environment(*, is_stand_in: bool) -> dict[str, str]:
    """Return the environment for this module."""
    return driver.environment(H100S) if is_stand_in else dict(os.environ)


def main() -> None:
    """Print the answers of NVML for each GPU, and the scenarios."""
    asked = Asked()
    asked.ask("nvmlInit")
    if asked.errors:
        sys.exit(1)
    count = asked.ask("nvmlDeviceGetCount")
    scenarios = []
    for index in range(count or 0):
        each = Asked()
        each.answers["nvmlDeviceGetCount"] = count
        print(f"\nGPU {index}")
        read(each, index)
        scenarios.append(scenario(each))
    for text in scenarios:
        print(f"\n--- scenario\n{text}")


if __name__ == "__main__":
    main()
