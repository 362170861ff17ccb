"""Helpers of tests: faults."""

from __future__ import annotations

import os
import re
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

import reserve_gpu
from tests import driver
from tests.support.here import Here
from tests.support.reserving import variables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path
    from typing import Any

    Fault = tuple[tuple[str, ...], str, int]  # functions, where (`0`, `0:0`, `*`), code

NO_FAULT: Fault = ((), "*", 0)
NOT_SUPPORTED, NOT_FOUND, INSUFFICIENT_SIZE, FUNCTION_NOT_FOUND = 3, 6, 7, 13
# These codes are answers: what is said instead of the error.
ANSWERS = [
    ("nvmlDeviceGetComputeRunningProcesses", INSUFFICIENT_SIZE, "process"),
    ("nvmlDeviceGetMPSComputeRunningProcesses", INSUFFICIENT_SIZE, "MPS client"),
    ("nvmlDeviceGetMigDeviceHandleByIndex", NOT_FOUND, "no MIG instances"),
]

GPU = """
gpu
  name NVIDIA A100-SXM4-40GB
  memory 40960
  uuid GPU-{0}0000000-0000-4000-8000-000000000000
"""
SPLIT = f"""{GPU}
  mig on
  slots 2
  instance 0
    memory 19968
    uuid MIG-{{0}}0000000-0000-4000-8000-000000000000
"""
BUSY = " compute 4321000 {}\n"
OLD = """
driver 470.57.02
missing nvmlDeviceGetMemoryInfo_v2
missing nvmlDeviceGetComputeRunningProcesses_v3
missing nvmlDeviceGetMPSComputeRunningProcesses_v3
missing nvmlDeviceGetGraphicsRunningProcesses_v3
missing nvmlDeviceGetMigMode
"""


def machine_of(gpu: str, *, busy: str, mib: int) -> str:
    """Return four devices, of which those in `busy` have a process that holds so much."""
    return "".join(gpu.format(x) + (BUSY.format(mib) if x in busy else "") for x in "abcd")


WHOLE = machine_of(GPU, busy="b", mib=30720)
FULL = machine_of(GPU, busy="abcd", mib=30720)
MIG = machine_of(SPLIT, busy="b", mib=15360)


@dataclass(frozen=True)
class Kind:
    """A kind of reservation. Devices 0 and 3 are idle, 1 is busy, 2 is reserved by a neighbour.

    serves: the devices that it gets where nothing fails. may: those that it may get at all.
    considers: those that a failure must speak of. needs: functions that the choice rests on.
    """

    wishes: dict[str, Any] = field(default_factory=dict)
    scenario: str = WHOLE
    serves: str = "0"
    may: str = "03"
    considers: str = "0123"
    needs: tuple[str, ...] = ()
    instances: bool = False
    environ: dict[str, str] = field(default_factory=dict)

    def labels(self, numbers: str) -> list[str]:
        return [f"GPU{number}" for number in self.numbers(numbers)]

    def numbers(self, numbers: str) -> list[str]:
        return [f"{number}:0" if self.instances else number for number in numbers]


UUIDS = {"CUDA_VISIBLE_DEVICES": "GPU-d,GPU-c,GPU-b,GPU-a"}
SEVERAL = "driver 570.86.15\n"  # the first that allow several instances in a process

KINDS = {
    "any": Kind(),
    "two": Kind({"count": 2}, serves="03"),
    "filtered": Kind(
        {"min_memory": "30GB", "name": "a100"},
        needs=("nvmlDeviceGetName",),
    ),
    "index": Kind({"devices": "0"}, may="0", considers="0"),
    "uuid": Kind({"devices": "GPU-a"}, may="0", considers="0"),
    "nothing free": Kind(scenario=FULL, serves="", may=""),
    "old driver": Kind(scenario=OLD + WHOLE),
    "limit": Kind(environ=UUIDS),
    "instance": Kind(scenario=MIG, instances=True),
    "two instances": Kind({"count": 2}, SEVERAL + MIG, serves="03", instances=True),
}


@dataclass(frozen=True)
class Case:
    """What failed, and what a reservation came to.

    ours: whether the error is one of reserve_gpu's. visible: CUDA_VISIBLE_DEVICES then.
    changed: whether any variable was; restored: whether release() undid that.
    """

    functions: tuple[str, ...]
    where: str
    code: int
    devices: list[str]
    error: str
    text: str
    visible: str | None
    changed: bool
    restored: bool
    ours: bool = True

    def __str__(self) -> str:
        came_to = f"{self.error}: {self.text!r}" if self.error else f"{self.devices}"
        return (
            f"fail {'+'.join(self.functions)} {self.where} {self.code} -> {came_to}, "
            f"CUDA_VISIBLE_DEVICES={self.visible!r}"
        )

    def hits(self, label: str) -> bool:
        """Tell whether calls about that device fail, if they are made."""
        return self.where == "*" or label in (f"GPU{self.where}", f"GPU{self.where}:0")

    def lines_of(self, label: str) -> list[str]:
        """Return what the message says of the device, its line in the picture if there is one."""
        number = label.removeprefix("GPU")
        of_device = re.compile(rf" *{number}(:\d+)?  |.*\b{label}\b|Of \d+ GPUs, none ")
        return [line for line in self.text.splitlines() if of_device.match(line)]

    def is_told(self, label: str, error: str) -> bool:
        """Tell whether the message names this error or function as the cause for the device."""
        lines = [x for line in self.lines_of(label) for x in line.split("; ")]
        named = [function.removesuffix("_v2").removesuffix("_v3") for function in self.functions]
        answers = [words for name, code, words in ANSWERS if name in named and code == self.code]
        answers += ["without a name"] if "nvmlDeviceGetName" in named else []
        return any(cause in line for line in lines for cause in [error, *named, *answers])


class Bench:
    """A machine on which one kind of reservation is made again and again."""

    def __init__(self, here: Here, kind: Kind) -> None:
        self._here, self.kind = here, kind

    def run(self, fault: Fault = NO_FAULT) -> Case:
        """Make a reservation under the fault, and release it."""
        functions, where, code = fault
        fails = "".join(f"fail {function} {where} {code}\n" for function in functions)
        self._here.write(self.kind.scenario + fails)
        before = variables()
        devices, error, text, ours = [], "", "", True
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", reserve_gpu.ReserveGPUWarning)
            try:
                reservation = reserve_gpu.reserve(**self.kind.wishes)
                devices = [device.label for device in reservation.devices]
            except Exception as raised:
                ours = isinstance(raised, reserve_gpu.ReserveGPUError)
                error, text = type(raised).__name__, str(raised)
        visible, is_changed = os.environ.get("CUDA_VISIBLE_DEVICES"), before != variables()
        reserve_gpu.release()
        if functions == ("nvmlShutdown",) and code:  # what failed once is done after it
            self._here.write(self.kind.scenario)
            assert driver.load().nvmlShutdown() == 0
        return Case(*fault, devices, error, text, visible, is_changed, before == variables(), ours)

    def asked(self) -> dict[str, set[str]]:
        """Return the functions that such a reservation calls, each with its devices.

        No log is written after this one: it would take as long as the rest.
        """
        self.run()
        del os.environ["STAND_IN_LOG"]
        asked: dict[str, set[str]] = {}
        for call in self._here.calls():
            function, *where = call.split()
            asked.setdefault(function, set()).update(where)
        return asked


@contextmanager
def bench_of(folder: Path, kind: Kind) -> Iterator[Bench]:
    with Here(folder) as here:
        here.write(kind.scenario)
        os.environ.update(kind.environ)
        (neighbours,) = kind.numbers("2")
        with here.rival(neighbours):
            yield Bench(here, kind)


def check(cases: Iterable[Case], is_right: Callable[[Case], bool]) -> None:
    """Fail with every case that is not right."""
    cases = list(cases)
    assert cases
    if wrong := [str(case) for case in cases if not is_right(case)]:
        pytest.fail(f"{len(wrong)} of {len(cases)} cases:\n" + "\n".join(wrong), pytrace=False)
