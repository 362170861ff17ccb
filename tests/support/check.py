"""Run the framework check, and values that its verdicts are made of."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import psutil

import reserve_gpu
from reserve_gpu.commands.check.verdict import Expectation, FrameworkAnswer
from reserve_gpu.model.devices import Device
from tests.support.frameworks import KEYS, NAMES
from tests.support.processes import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.here import Here
    from tests.support.machine import Machine

DRIVER = "CUDA driver"

# -- values ----------------------------------------------------------------------------------------

ONE, OTHER = (f"{digit * 8}-aaaa-4aaa-8aaa-aaaaaaaaaaaa" for digit in "12")
GPU1 = Device(1, f"GPU-{ONE}")
GPU2 = Device(2, f"GPU-{OTHER}")


def answer(**changes: Any) -> FrameworkAnswer:
    """Return the answer of a framework that fits GPU1, with these changes."""
    fits = {"version": "1.0", "build": "12.4", "visible": "1", "devices": [ONE], "is_done": True}
    return FrameworkAnswer(**{**fits, **changes})


def failed_driver(code: int) -> FrameworkAnswer:
    """Return the answer of a driver whose cuInit returns an error."""
    return answer(devices=[], error=f"cuInit returned {code}", driver_code=code)


DRIVER_ANSWER = answer(version="12.2", build="")
NO_LIBRARY = FrameworkAnswer(error="libcuda.so.1: cannot open", driver_code=-1, is_done=True)
HELD = Expectation(reserved=(GPU1,), visible="1", expected="1", driver=DRIVER_ANSWER)


# -- real checks -----------------------------------------------------------------------------------


def check_rows(**arguments: Any) -> dict[str, Any]:
    """Run the check; return the rows of installed frameworks by name, and the whole as `all`."""
    result = reserve_gpu.check(**arguments).to_dict()
    rows = {row["name"]: row for row in result["frameworks"] if row["state"] != "not installed"}
    return {**rows, "all": result}


def states(rows: dict[str, Any]) -> dict[str, str]:
    """Return the verdict of each row."""
    return {name: row["state"] for name, row in rows.items() if name != "all"}


def all_are(state: str, *names: str) -> dict[str, str]:
    """Return the same verdict for the driver and these frameworks."""
    return dict.fromkeys((DRIVER, *names), state)


def processes_of(machine: Machine) -> set[int]:
    """Return the pids of the machine's running processes."""
    found = set()
    for pid in psutil.pids():
        with suppress(psutil.Error):
            if psutil.Process(pid).environ().get("STAND_IN_SCENARIO") == str(machine.scenario):
                found.add(pid)
    return found


@contextmanager
def no_process_left(here: Here) -> Iterator[None]:
    """Require that the processes at the end are those at the beginning.

    The check may end before SIGKILL takes effect. A process that was not killed lives for 600 s.
    """
    before = processes_of(here)
    yield
    wait_for(lambda: processes_of(here) == before, pause_s=0.02)


# -- troubles --------------------------------------------------------------------------------------

# By the name of a fault: the verdict, a key of the reason, and the frameworks that can have it.
TROUBLES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "cpu": ("no device", "CPU build", ("torch", "tensorflow", "jax")),
    "ignores": ("other devices", "CUDA_VISIBLE_DEVICES to '0'", KEYS),
    "hides": ("no device", "CUDA_VISIBLE_DEVICES to ''", KEYS),
    "old": ("no device", "too old", ("torch", "jax", "cupy", "numba")),
    "crashes": ("fails", "terminate called", KEYS),
    "exits": ("fails", "exit code 3", KEYS),
    "raises": ("fails", "libcudnn.so.9", KEYS),
    "simulates": ("fails", "NUMBA_ENABLE_CUDASIM", ("numba",)),
}


def check_troubles(troubles: dict[str, str]) -> None:
    """Require the verdict of each framework's fault, and that the other frameworks fit.

    Args:
        troubles: The name of the fault, by framework.
    """
    reserve_gpu.reserve("1")
    rows = check_rows()
    assert rows[DRIVER]["state"] == "fits"
    for key, name in zip(KEYS, NAMES, strict=True):
        if key in troubles:
            state, reason, _ = TROUBLES[troubles[key]]
            assert rows[name]["state"] == state, rows[name]
            assert reason in rows[name]["reason"]
            assert "\x1b" not in rows[name]["reason"]
        elif name in rows:
            assert rows[name]["state"] == "fits"
    assert not rows["all"]["is_well"]
