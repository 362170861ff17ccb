"""Helpers of tests: status."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import reserve_gpu
from tests.support.machine import Machine

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.machine import Child, Machine


def devices() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = reserve_gpu.status().to_dict()["devices"]
    return rows


def states() -> dict[str, str]:
    return {device["label"]: device["state"] for device in devices()}


def devices_of(child: Child) -> list[dict[str, Any]]:
    """Return the same, as a child sees it."""
    rows: list[dict[str, Any]] = child.run("reserve_gpu.status().to_dict()").value["devices"]
    return rows


# -- since when ------------------------------------------------------------------------------------


def lock_of(machine: Machine) -> Path:
    (lock,) = (path for path in machine.locks.glob("GPU-*.record-*") if path.read_text())
    return lock


def age(lock: Path, seconds: float) -> None:
    """Let a reservation have been made so long ago, and nothing been done since."""
    record = json.loads(lock.read_text())
    for name in ("since", "written"):
        record[name] -= seconds
        record[f"{name}_boot"] -= seconds
    lock.write_text(json.dumps(record))
    os.utime(lock, (record["written"], record["written"]))
