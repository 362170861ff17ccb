"""A fault matrix: every driver function that a reservation calls x every error code there is.

Generated: the functions come from the stand-in driver's log of each kind of reservation, the codes
from the bindings. All of it happens in the test process, as the stand-in driver reads its scenario
again at every call. A sample of the kinds and codes is tried at every run; with `pytest -m full`
that sample of kinds with all codes, and all kinds with that sample of codes.
"""

from __future__ import annotations

import os
import re
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pynvml
import pytest

import reserve_gpu
from tests import driver
from tests.here import Here
from tests.reserving import of_gpu, refused, variables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path
    from typing import Any

    Fault = tuple[tuple[str, ...], str, int]  # functions, where (`0`, `0:0`, `*`), code

NO_FAULT: Fault = ((), "*", 0)
UNHEARD_OF = 555
CODES = sorted({v for k, v in vars(pynvml).items() if k.startswith("NVML_ERROR_")} | {UNHEARD_OF})
NOT_SUPPORTED, NOT_FOUND, INSUFFICIENT_SIZE, FUNCTION_NOT_FOUND = 3, 6, 7, 13
# INSUFFICIENT_POWER, IRQ_ISSUE, GPU_IS_LOST, RESET_REQUIRED, GPU_NOT_FOUND: the GPU is down.
IN_TROUBLE = {8, 11, 15, 16, 28}
NO_DRIVER = {9, 12}  # DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND

# Without an answer of these there is no device, or none that could be told from another.
IDENTIFYING = {
    "nvmlDeviceGetHandleByIndex_v2",
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetMaxMigDeviceCount",
    "nvmlDeviceGetMigDeviceHandleByIndex",
}
# These compare devices or list processes; that one fails says nothing against a device.
ASIDE = ("P2PStatus", "TopologyCommonAncestor", "RunningProcesses_v2")
# A driver that does not know MIG has no instances: where there are some, it would be a lie.
UNTRUE = {("nvmlDeviceGetMigMode", NOT_SUPPORTED), ("nvmlDeviceGetMigMode", FUNCTION_NOT_FOUND)}
# Without these a reservation can still be made: any code is accepted that does not say "down".
DECORATING = {
    "nvmlDeviceGetRemappedRows", "nvmlDeviceGetFieldValues", "nvmlDeviceGetDisplayActive",
    "nvmlDeviceGetNumaNodeId", "nvmlDeviceGetPciInfo_v3", "nvmlDeviceGetVbiosVersion",
    "nvmlDeviceGetCurrPcieLinkWidth", "nvmlDeviceGetName", "nvmlDeviceGetMemoryLimits_v1",
    "nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetMPSComputeRunningProcesses_v3",
    "nvmlDeviceGetGpuInstanceId", "nvmlDeviceGetComputeInstanceId", "nvmlDeviceGetP2PStatus",
    "nvmlDeviceGetTopologyCommonAncestor", "nvmlDeviceGetGraphicsRunningProcesses_v2",
}  # fmt: skip
# These codes are answers: what is said instead of the error.
ANSWERS = [
    ("nvmlDeviceGetComputeRunningProcesses", INSUFFICIENT_SIZE, "process"),
    ("nvmlDeviceGetMPSComputeRunningProcesses", INSUFFICIENT_SIZE, "MPS client"),
    ("nvmlDeviceGetMigDeviceHandleByIndex", NOT_FOUND, "no MIG instances"),
]
# What tells use: if all of a row fail, the device is unreadable.
READINGS = ("MemoryInfo", "ComputeRunningProcesses")

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
# Kinds that between them call every function, and codes that mean different things: tried with each
# other at every run, and each with all of the others in the layer `full`.
SAMPLE = ("any", "two instances")
SAMPLE_CODES = [NOT_SUPPORTED, 15, 17, 999]


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


@dataclass(frozen=True)
class Matrix:
    """Every function x the codes x one device and all, for one kind of reservation.

    plain: what it comes to without a fault. asked: the functions, each with its devices.
    errors: what the driver calls each code.
    """

    kind: Kind
    codes: list[int]
    plain: Case
    asked: dict[str, set[str]]
    errors: dict[int, str]
    cases: list[Case]


@contextmanager
def bench_of(folder: Path, kind: Kind) -> Iterator[Bench]:
    with Here(folder) as here:
        here.write(kind.scenario)
        os.environ.update(kind.environ)
        (neighbours,) = kind.numbers("2")
        with here.rival(neighbours):
            yield Bench(here, kind)


def texts(codes: Iterable[int]) -> dict[int, str]:
    """Return what the driver calls each error."""
    pynvml.nvmlInit()
    try:
        return {code: str(pynvml.NVMLError(code)).rstrip(".") for code in codes}
    finally:
        pynvml.nvmlShutdown()


def of_kind(name: str, codes: list[int], *marks: pytest.MarkDecorator) -> Any:
    """Return a matrix to try; its tests run in one process, as making it takes time."""
    group = pytest.mark.xdist_group(f"faults {name} {len(codes)}")
    label = name if codes == CODES else f"{name}, sample"
    return pytest.param((KINDS[name], codes), marks=[group, *marks], id=label)


@pytest.fixture(
    params=[
        *(of_kind(name, SAMPLE_CODES) for name in SAMPLE),
        *(of_kind(name, CODES, pytest.mark.full) for name in SAMPLE),
        *(of_kind(name, SAMPLE_CODES, pytest.mark.full) for name in KINDS if name not in SAMPLE),
    ],
    scope="module",
)
def matrix(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    kind, codes = request.param
    with bench_of(tmp_path_factory.mktemp("faults"), kind) as bench:
        asked = bench.asked()
        faults = [
            ((function,), where, code)
            for function, places in asked.items()
            for where in sorted({"*"} | places & {"0", "0:0"})
            for code in codes
            if (function, code) not in UNTRUE or not kind.instances
        ]
        cases = [bench.run(fault) for fault in faults]
        return Matrix(kind, codes, bench.run(), asked, texts(codes), cases)


def check(cases: Iterable[Case], is_right: Callable[[Case], bool]) -> None:
    """Fail with every case that is not right."""
    cases = list(cases)
    assert cases
    if wrong := [str(case) for case in cases if not is_right(case)]:
        pytest.fail(f"{len(wrong)} of {len(cases)} cases:\n" + "\n".join(wrong), pytrace=False)


def test_matrix_means_something(matrix: Matrix) -> None:
    """Without a fault it is given what it should, and it asks for what makes and tells a device."""
    assert matrix.plain.devices == matrix.kind.labels(matrix.kind.serves)
    assert set(matrix.asked) >= {
        "nvmlInitWithFlags", "nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetUUID"
    }  # fmt: skip
    for reading in READINGS:
        assert any(reading in function for function in matrix.asked)


def test_errors_are_ours(matrix: Matrix) -> None:
    """Whatever fails, a reservation is made or an error of ours raised, and release undoes it."""
    check(matrix.cases, lambda case: case.ours and case.restored)


def test_never_what_others_have(matrix: Matrix) -> None:
    """Whatever fails, a device that is busy or reserved is not chosen."""
    may = set(matrix.kind.labels(matrix.kind.may))
    check(matrix.cases, lambda case: may >= set(case.devices))


def test_never_what_fails(matrix: Matrix) -> None:
    """A device that can't be identified, or a GPU that says it is in trouble, is not chosen."""

    def is_right(case: Case) -> bool:
        (function,) = case.functions
        is_down = case.code in IN_TROUBLE and not function.endswith(ASIDE)
        fails = matrix.asked[function] and (function in IDENTIFYING or is_down)
        return not (fails and any(map(case.hits, case.devices)))

    check(matrix.cases, is_right)


def test_others_are_served(matrix: Matrix) -> None:
    """Where one device fails and another will do, that one is given."""
    if len(matrix.kind.may) < 2 or len(matrix.kind.serves) > 1:
        pytest.skip("no other will do")
    either = [[label] for label in matrix.kind.labels("03")]
    cases = [case for case in matrix.cases if case.where != "*"]
    check(cases, lambda case: case.devices in either)


def test_what_is_not_offered_costs_nothing(matrix: Matrix) -> None:
    """A reading that the driver does not offer changes nothing of what is given."""
    cases = [
        case
        for case in matrix.cases
        for function in case.functions
        if case.code == NOT_SUPPORTED and matrix.asked[function]
        if function not in IDENTIFYING and function not in matrix.kind.needs
    ]
    given = matrix.kind.labels(matrix.kind.serves)
    check(cases, lambda case: case.devices == given)


def test_decoration_that_fails_costs_nothing(matrix: Matrix) -> None:
    """A reading without which the GPU can be used may fail with any code but "the GPU is down"."""
    cases = [
        case
        for case in matrix.cases
        for function in case.functions
        if function in DECORATING - {*matrix.kind.needs} and case.code not in IN_TROUBLE
        if not (
            case.code == INSUFFICIENT_SIZE and "RunningProcesses" in function
        )  # "there are some"
    ]
    given = matrix.kind.labels(matrix.kind.serves)
    check(cases, lambda case: case.devices == given)


def test_messages(matrix: Matrix) -> None:
    """A failure names each device that was considered, and the cause where it is a fault."""
    kind = matrix.kind
    considered = [f"GPU{number}" for number in kind.considers]

    def is_right(case: Case) -> bool:
        error = matrix.errors[case.code]
        if case.error in ("DriverError", "NoDriverError"):
            return error in case.text
        return all(case.lines_of(label) for label in considered) and (
            not kind.serves or case.is_told("GPU0", error)
        )

    check([case for case in matrix.cases if case.error], is_right)


def test_variables(matrix: Matrix) -> None:
    """Where nothing is free no device is visible; any other error leaves the variables alone."""

    def is_right(case: Case) -> bool:
        if case.error == "NoFreeDeviceError":
            return case.visible == ""
        return not case.changed

    check([case for case in matrix.cases if case.error], is_right)


def test_driver_errors(matrix: Matrix) -> None:
    """Where NVML does not start or count, that is the error, and whether there is no driver."""

    def is_right(case: Case) -> bool:
        is_missing = case.functions == ("nvmlInitWithFlags",) and case.code in NO_DRIVER
        return case.error == ("NoDriverError" if is_missing else "DriverError")

    cases = [
        case
        for case in matrix.cases
        if case.where == "*" and case.functions[0] in ("nvmlInitWithFlags", "nvmlDeviceGetCount_v2")
    ]
    assert len(cases) == 2 * len(matrix.codes)
    check(cases, is_right)


def unreadable(asked: Iterable[str]) -> tuple[str, ...]:
    functions = (*asked, "nvmlDeviceGetMemoryInfo")
    return tuple(name for name in functions if any(reading in name for reading in READINGS))


@pytest.mark.parametrize("codes", [SAMPLE_CODES, pytest.param(CODES, marks=pytest.mark.full)])
def test_unreadable_is_not_idle(tmp_path: Path, codes: list[int]) -> None:
    """With neither memory nor processes readable a device is not given, but the next one is."""
    with bench_of(tmp_path, KINDS["any"]) as bench:
        readings = unreadable(bench.asked())
        of_first, of_all = ([bench.run((readings, where, c)) for c in codes] for where in "0*")
    check(of_first, lambda case: case.devices == ["GPU3"])
    check(of_all, lambda case: case.error == "NoFreeDeviceError")


def test_no_count(here: Here) -> None:
    """A driver without a GPU, and one that counts more than it lets us open, are told apart."""
    here.write("count 0\n")
    with pytest.raises(reserve_gpu.DriverError, match="no GPU"):
        reserve_gpu.reserve()
    here.write(f"count 3\n{GPU.format('a')}{BUSY.format(9000)}")
    text = refused()
    assert of_gpu(text, "0").startswith("busy: ")
    for number in "12":
        assert of_gpu(text, number).startswith("no permission: Insufficient Permissions")
