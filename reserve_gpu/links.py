"""How two GPUs are connected, which only who wants several asks the driver."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from reserve_gpu.bindings import DeviceError

if TYPE_CHECKING:
    from reserve_gpu.bindings import Bindings


class Link:
    """How far two GPUs are from each other; less is closer."""

    NVLINK = 0
    SWITCH = 1
    SOCKET = 2
    SYSTEM = 3


P2P_NVLINK, P2P_OK = 2, 0  # NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK
# NVML_TOPOLOGY_SINGLE and _MULTIPLE: PCIe switches only; _HOSTBRIDGE and _NODE: within a socket.
LEVELS = {0: Link.SWITCH, 10: Link.SWITCH, 20: Link.SWITCH, 30: Link.SOCKET, 40: Link.SOCKET}


def link(driver: Bindings, one: Any, other: Any) -> int:
    """How two GPUs are connected, as far as the driver can tell. one, other: their handles."""
    try:
        return driver.run(_link, driver, one, other)
    except DeviceError:
        return Link.SYSTEM


def _link(driver: Bindings, one: Any, other: Any) -> int:
    with suppress(DeviceError, AttributeError):
        status = driver.ask(driver.pynvml.nvmlDeviceGetP2PStatus, one, other, P2P_NVLINK)
        if status == P2P_OK:
            return Link.NVLINK
    with suppress(DeviceError, AttributeError):
        level = driver.ask(driver.pynvml.nvmlDeviceGetTopologyCommonAncestor, one, other)
        return LEVELS.get(level, Link.SYSTEM)
    return Link.SYSTEM
