"""The files of a user's history."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from reserve_gpu.reservation.session import session

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.machine import Machine


def history_folder(machine: Machine) -> Path:
    """Return the default folder of the user's history."""
    return machine.home / ".local/state/reserve_gpu" / os.uname().nodename


def logged_lines(machine: Machine, pattern: str = "*.jsonl") -> list[dict[str, Any]]:
    """Return the lines in the history's files, after this process has logged its changes."""
    session().run(session()._step)
    files = sorted(history_folder(machine).glob(pattern))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def open_lines(machine: Machine) -> list[dict[str, Any]]:
    """Return the lines about current reservations."""
    return logged_lines(machine, "*.open")
