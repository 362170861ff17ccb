"""Helpers of tests: main."""

from __future__ import annotations

import json
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from tests.support.machine import Child
from tests.support.processes import US

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator

    from tests.support.here import Here

RESERVED = """\
Reserving GPU0: 0000:01:00.0 16x GeForce GTX 1050 Ti (VBIOS 86.07.22.00.A8)
CUDA_DEVICE_MEMORY = '4038'
CUDA_DEVICE_ORDER = 'PCI_BUS_ID'
CUDA_VISIBLE_DEVICES = '0'
"""


def run(here: Here, *words: str, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run `reserve-gpu run WORDS` in a process of its own, to its end."""
    return here.command(*US, "run", *words, **extra)


@contextmanager
def started(here: Here, *options: str, **extra: str) -> Iterator[Child]:
    """Make a Python process started by `reserve-gpu run OPTIONS --`; killed at the end."""
    child = Child(here.environ(**extra), here.folder, *US, "run", *options, "--")
    try:
        yield child
    finally:
        child.kill()


@contextmanager
def both(here: Here) -> Iterator[ExitStack]:
    """Let somebody else have both GPUs, until the end or until the stack is closed: GPU0 first."""
    with ExitStack() as rivals:
        for number in "10":
            rivals.enter_context(here.rival(number))
        yield rivals


HELD: dict[str, Any] = {"before": {}, "written": {}, "record": {}, "reason": None}


def left(**changes: Any) -> dict[str, Any]:
    """Return what a process that held the device GPU-x would leave to its next program."""
    fields = {"devices": [{"index": 0, "uuid": "GPU-x"}], "locks": [["LOCK", "GPU-x.lock"]]}
    return {**HELD, **fields, **changes}


NONE_LEFT = {**HELD, "devices": [], "locks": [], "reason": "No GPU was free."}
DEVICE = {"index": 0, "uuid": "GPU-x"}
UNTRUE = {
    "closed": left(locks=[[999, "GPU-x.lock"]]),
    "another file": left(locks=[["OTHER", "GPU-x.lock"]]),
    "another name": left(locks=[["LOCK", "other.lock"]]),
    "no name": left(locks=[["LOCK", -1]]),
    "not locked": left(locks=[["FREE", "GPU-x.lock"]]),
    "negative": left(locks=[[-1, "GPU-x.lock"]]),
    "enormous": left(locks=[[1 << 80, "GPU-x.lock"]]),
    "no number": left(locks=[["3", "GPU-x.lock"]]),
    "other lengths": left(locks=[]),
    "no device": left(devices=[7]),
    "another field": left(devices=[DEVICE | {"nonsense": 1}]),
    "another type": left(devices=[DEVICE | {"name": 1}]),
    "no text": left(reason=1),
    "a list": [],
    "huge": left(record={"note": "x" * 110_000}),
}
FORGERIES = {name: f"PID {json.dumps(fields)}" for name, fields in UNTRUE.items()} | {
    "empty": "",
    "rubbish": "PID rubbish",
    "deep": "PID " + "[" * 50_000,
    "no pid": json.dumps(left()),
    "another pid": f"1 {json.dumps(left())}",
    "an earlier process": f"PID {json.dumps({'began': 1, **left()})}",
    "no GPU of an earlier process": f"PID {json.dumps({'began': 1, **NONE_LEFT})}",
    "a large pid": "9" * 5000,
    "surrogates": "PID \udcff\udcfe",
}
