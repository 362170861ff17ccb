"""A fault matrix: every driver function that a reservation calls x every error code there is.

Generated: the functions come from the stand-in driver's log of each kind of reservation, the codes
from the bindings. All of it happens in the test process, as the stand-in driver reads its scenario
again at every call. A sample of the kinds and codes is tried at every run; with `pytest -m full`
that sample of kinds with all codes, and all kinds with that sample of codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pynvml
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    Fault = tuple[tuple[str, ...], str, int]  # functions, where (`0`, `0:0`, `*`), code

from typing import TYPE_CHECKING

from tests.support.faults import GPU, KINDS, SPLIT, Case, Kind, bench_of, check, machine_of

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


def unreadable(asked: Iterable[str]) -> tuple[str, ...]:
    functions = (*asked, "nvmlDeviceGetMemoryInfo")
    return tuple(name for name in functions if any(reading in name for reading in READINGS))


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
# What tells use: if all of a row fail, the device is unreadable.
READINGS = ("MemoryInfo", "ComputeRunningProcesses")
BUSY = " compute 4321000 {}\n"


WHOLE = machine_of(GPU, busy="b", mib=30720)
FULL = machine_of(GPU, busy="abcd", mib=30720)
MIG = machine_of(SPLIT, busy="b", mib=15360)


UUIDS = {"CUDA_VISIBLE_DEVICES": "GPU-d,GPU-c,GPU-b,GPU-a"}
SEVERAL = "driver 570.86.15\n"  # the first that allow several instances in a process
# Kinds that between them call every function, and codes that mean different things: tried with each
# other at every run, and each with all of the others in the layer `full`.
SAMPLE = ("any", "two instances")
SAMPLE_CODES = [NOT_SUPPORTED, 15, 17, 999]


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


@pytest.mark.parametrize("codes", [SAMPLE_CODES, pytest.param(CODES, marks=pytest.mark.full)])
def test_unreadable_is_not_idle(tmp_path: Path, codes: list[int]) -> None:
    """With neither memory nor processes readable a device is not given, but the next one is."""
    with bench_of(tmp_path, KINDS["any"]) as bench:
        readings = unreadable(bench.asked())
        of_first, of_all = ([bench.run((readings, where, c)) for c in codes] for where in "0*")
    check(of_first, lambda case: case.devices == ["GPU3"])
    check(of_all, lambda case: case.error == "NoFreeDeviceError")
