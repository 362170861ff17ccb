"""Read the status of the machine, in the test process or in a child."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import reserve_gpu

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.machine import Child, Machine


class Terminal(io.StringIO):
    """A text buffer that claims to be a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def devices() -> list[dict[str, Any]]:
    """Return the devices in the JSON of the status."""
    rows: list[dict[str, Any]] = reserve_gpu.status().to_dict()["devices"]
    return rows


def devices_of(child: Child) -> list[dict[str, Any]]:
    """Return the devices in the JSON of the status that a child reads."""
    rows: list[dict[str, Any]] = child.run("reserve_gpu.status().to_dict()").value["devices"]
    return rows


def device_states() -> dict[str, str]:
    """Return the state of each device by its label."""
    return {device["label"]: device["state"] for device in devices()}


def record_of(machine: Machine) -> Path:
    """Return the file with the only holder's record."""
    (path,) = (path for path in machine.locks.glob("GPU-*.record-*") if path.read_text())
    return path


def parts_of(device: dict[str, Any]) -> list[tuple[float | None, float | None, bool | None]]:
    """Return each holder's promised MiB, its used MiB, and whether it uses more than promised."""
    names = ("memory_promised_mib", "memory_used_mib", "is_over")
    return [tuple(holder[name] for name in names) for holder in device["holders"]]
