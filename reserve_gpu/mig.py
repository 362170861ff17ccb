"""The instances that MIG has split a GPU into: each is a device. Most machines have none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reserve_gpu import bindings
from reserve_gpu.bindings import DeviceError
from reserve_gpu.device import Fault

if TYPE_CHECKING:
    from collections.abc import Callable

    from reserve_gpu.bindings import Bindings
    from reserve_gpu.device import Device


def instances(
    driver: Bindings, board: Any, index: int, read: Callable[[Any, int], Device]
) -> list[Device | Fault]:
    """The instances of a GPU; a Fault for one that is unusable. Raises DeviceError.

    board: the GPU's handle. index: the GPU's. read: the device of an instance's handle and number.
    """
    found: list[Device | Fault] = []
    for slot in range(driver.ask(driver.pynvml.nvmlDeviceGetMaxMigDeviceCount, board)):
        instance = _instance(driver, board, index, slot, read)
        found += [instance] if instance else []
    return found


def _instance(
    driver: Bindings, board: Any, index: int, slot: int, read: Callable[[Any, int], Device]
) -> Device | Fault | None:
    function = driver.pynvml.nvmlDeviceGetMigDeviceHandleByIndex
    gap = frozenset({bindings.NOT_FOUND})  # normal in the numbering
    try:
        handle = driver.ask_if_offered(function, board, slot, absent=gap)
        if handle is None:
            return None
        return read(handle, slot).replace(**_origin(driver, handle, board))
    except DeviceError as error:
        return Fault(index, str(error), slot)


def _origin(driver: Bindings, handle: Any, board: Any) -> dict[str, str]:
    """What GPU an instance is a part of, and its name from before instances had UUIDs."""
    nvml = driver.pynvml
    gpu = bindings.text(driver.ask(nvml.nvmlDeviceGetUUID, board))
    gi = driver.decoration(nvml.nvmlDeviceGetGpuInstanceId, handle)
    ci = driver.decoration(nvml.nvmlDeviceGetComputeInstanceId, handle)
    return {"gpu_uuid": gpu, "old_name": f"MIG-{gpu}/{gi}/{ci}"}
