"""Helpers of tests: check."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import psutil

import reserve_gpu
from tests.support.frameworks import KEYS, NAMES
from tests.support.processes import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.here import Here
    from tests.support.machine import Machine

DRIVER = "CUDA driver"


def check(**arguments: Any) -> dict[str, Any]:
    """Check; the rows by the framework's name, those not installed left out, and `all` of it."""
    told = reserve_gpu.check(**arguments).to_dict()
    rows = {row["name"]: row for row in told["frameworks"] if row["state"] != "not installed"}
    return {**rows, "all": told}


def states(rows: dict[str, Any]) -> dict[str, str]:
    return {name: row["state"] for name, row in rows.items() if name != "all"}


def all_are(state: str, *names: str) -> dict[str, str]:
    """Return the states where the driver and these frameworks are all in that one."""
    return dict.fromkeys((DRIVER, *names), state)


def processes_of(machine: Machine) -> set[int]:
    """Return the processes that were started on the machine and run now."""
    found = set()
    for pid in psutil.pids():
        with suppress(psutil.Error):
            if psutil.Process(pid).environ().get("STAND_IN_SCENARIO") == str(machine.scenario):
                found.add(pid)
    return found


# -- troubles --------------------------------------------------------------------------------------

# What befalls a framework: the state and the reason that its row has then, and who can get into it.
TROUBLES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "cpu": ("no device", "a CPU build", ("torch", "tensorflow", "jax")),
    "ignores": ("other devices", "importing it sets CUDA_VISIBLE_DEVICES to '0'", KEYS),
    "hides": ("no device", "importing it sets CUDA_VISIBLE_DEVICES to ''", KEYS),
    "old": ("no device", "too old", ("torch", "jax", "cupy", "numba")),
    "crashes": (
        "fails",
        "crashed (Segmentation fault) while being imported: terminate called",
        KEYS,
    ),
    "exits": ("fails", "exit code 3", KEYS),
    "raises": ("fails", "ImportError: libcudnn.so.9: cannot open shared object file", KEYS),
    "simulates": ("fails", "NUMBA_ENABLE_CUDASIM is set", ("numba",)),
}


def check_troubles(troubles: dict[str, str]) -> None:
    """Check on a reserved GPU: who is in trouble has a row that says so; those beside it fit."""
    reserve_gpu.reserve("1")
    rows = check()
    for key, name in zip(KEYS, NAMES, strict=True):
        if key in troubles:
            state, reason, _ = TROUBLES[troubles[key]]
            row = rows[name]
            assert row["state"] == state, row
            assert reason in row["reason"]
            assert "\x1b" not in str(row["reason"])
        elif name in rows:
            assert rows[name]["state"] == "fits"
    assert rows[DRIVER]["state"] == "fits"
    assert not rows["all"]["is_well"]


@contextmanager
def left_behind(here: Here) -> Iterator[None]:
    """Check that each process that lives at the end also lived at the beginning.

    SIGKILL is on its way when the check ends; one that is only killed later lives for 600 s.
    """
    before = processes_of(here)
    yield
    wait_for(lambda: processes_of(here) == before, pause_s=0.02)
