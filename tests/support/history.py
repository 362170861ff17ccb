"""Helpers of tests: history."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from reserve_gpu.reservation.session import session

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.machine import Machine


def switch_on(machine: Machine, word: str = "true") -> None:
    """Write the user's own file."""
    folder = machine.home / ".config"
    folder.mkdir(exist_ok=True)
    (folder / "reserve_gpu.toml").write_text(f"history = {word}\n")


def folder_of(machine: Machine) -> Path:
    return machine.home / ".local/state/reserve_gpu" / os.uname().nodename


def lines(machine: Machine, pattern: str = "*.jsonl") -> list[dict[str, Any]]:
    """Return what stands in the files of a history, once this process has logged what it did."""
    session().run(session()._step)
    files = sorted(folder_of(machine).glob(pattern))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]
