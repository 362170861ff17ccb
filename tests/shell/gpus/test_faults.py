"""A fault matrix: every driver function that a reservation calls, with every error code.

The functions come from the stand-in driver's log of each kind of reservation, and the codes from
NVML's bindings. A sample runs by default, and the rest with `-m full`.
"""

from __future__ import annotations

import os
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pynvml
import pytest

import reserve_gpu
from tests import driver
from tests.support.here import Here
from tests.support.reserving import variables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path
    from typing import Any

# -- machines and requests -------------------------------------------------------------------------

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
MULTI_INSTANCE_DRIVER = "driver 570.86.15\n"  # the first that allows a process several instances


def four_devices(template: str, *, busy: str, mib: int) -> str:
    """Return a scenario with devices a to d, and a process with that memory on the busy ones."""
    process = f" compute 4321000 {mib}\n"
    return "".join(template.format(x) + (process if x in busy else "") for x in "abcd")


WHOLE = four_devices(GPU, busy="b", mib=30720)
MIG = four_devices(SPLIT, busy="b", mib=15360)


@dataclass(frozen=True)
class Kind:
    """A kind of reservation. Devices 0 and 3 are idle, 1 is busy, and 2 is reserved.

    Attributes:
        arguments: The arguments of `reserve`.
        scenario: The machine.
        expected: The devices that are reserved if no function fails.
        has_instances: Whether the devices are MIG instances.
    """

    arguments: dict[str, Any] = field(default_factory=dict)
    scenario: str = WHOLE
    expected: str = "0"
    has_instances: bool = False

    def names(self, indices: str) -> list[str]:
        """Return the names of the devices with these indices."""
        return [f"{index}:0" if self.has_instances else index for index in indices]

    def labels(self, indices: str) -> list[str]:
        """Return the labels of the devices with these indices."""
        return [f"GPU{name}" for name in self.names(indices)]


KINDS = {
    "any": Kind(),
    "two instances": Kind(
        {"count": 2}, MULTI_INSTANCE_DRIVER + MIG, expected="03", has_instances=True
    ),
}

# -- error codes and functions ---------------------------------------------------------------------

NOT_SUPPORTED, INSUFFICIENT_SIZE, FUNCTION_NOT_FOUND = 3, 7, 13
UNASSIGNED_CODE = 555
CODES = sorted(
    {code for name, code in vars(pynvml).items() if name.startswith("NVML_ERROR_")}
    | {UNASSIGNED_CODE}
)
GPU_DOWN = {8, 11, 15, 16, 28}  # no power, IRQ issue, GPU lost, reset required, GPU not found
NO_DRIVER = {9, 12}  # driver not loaded, library not found

# A device can't be identified, or told from another one, without these functions.
IDENTIFYING = {
    "nvmlDeviceGetHandleByIndex_v2",
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetMaxMigDeviceCount",
    "nvmlDeviceGetMigDeviceHandleByIndex",
}
# These functions compare devices or list processes, so their errors say nothing about a device.
COMPARING = ("P2PStatus", "TopologyCommonAncestor", "RunningProcesses_v2")
# A driver that lacks MIG has no instances, so these errors are impossible if there are some.
IMPOSSIBLE = {("nvmlDeviceGetMigMode", NOT_SUPPORTED), ("nvmlDeviceGetMigMode", FUNCTION_NOT_FOUND)}
# A reservation does not depend on these functions, unless the code means that the GPU is down.
OPTIONAL = {
    "nvmlDeviceGetRemappedRows", "nvmlDeviceGetFieldValues", "nvmlDeviceGetDisplayActive",
    "nvmlDeviceGetNumaNodeId", "nvmlDeviceGetPciInfo_v3", "nvmlDeviceGetVbiosVersion",
    "nvmlDeviceGetCurrPcieLinkWidth", "nvmlDeviceGetName", "nvmlDeviceGetMemoryLimits_v1",
    "nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetMPSComputeRunningProcesses_v3",
    "nvmlDeviceGetGpuInstanceId", "nvmlDeviceGetComputeInstanceId", "nvmlDeviceGetP2PStatus",
    "nvmlDeviceGetTopologyCommonAncestor", "nvmlDeviceGetGraphicsRunningProcesses_v2",
}  # fmt: skip
# If all readings of one of these kinds fail, the device is unreadable.
READINGS = ("MemoryInfo", "ComputeRunningProcesses")

# -- cases -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """Functions that fail with a code for one device (`0` or `0:0`) or all devices (`*`)."""

    functions: tuple[str, ...] = ()
    where: str = "*"
    code: int = 0

    def __str__(self) -> str:
        return "".join(f"fail {function} {self.where} {self.code}\n" for function in self.functions)

    def affects(self, label: str) -> bool:
        """Return whether calls for that device fail."""
        return self.where == "*" or label in (f"GPU{self.where}", f"GPU{self.where}:0")


@dataclass(frozen=True)
class Case:
    """A fault, and the result of a reservation under it.

    Attributes:
        fault: The fault.
        devices: The labels of the reserved devices.
        error: The exception, if the reservation failed.
        is_restored: Whether release() restored all variables.
    """

    fault: Fault
    devices: list[str]
    error: Exception | None
    is_restored: bool

    @property
    def function(self) -> str:
        """The only function that fails."""
        (function,) = self.fault.functions
        return function


class Bench:
    """A machine on which one kind of reservation is repeated under different faults."""

    def __init__(self, here: Here, kind: Kind) -> None:
        self._here, self.kind = here, kind

    def reserve(self, fault: Fault) -> Case:
        """Make a reservation under the fault, and release it."""
        self._here.write(f"{self.kind.scenario}{fault}")
        before = variables()
        devices, error = [], None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", reserve_gpu.ReserveGPUWarning)
            try:
                reservation = reserve_gpu.reserve(**self.kind.arguments)
                devices = [device.label for device in reservation.devices]
            except Exception as raised:
                error = raised
        reserve_gpu.release()
        if fault.functions == ("nvmlShutdown",):  # the stand-in driver is still initialized
            self._here.write(self.kind.scenario)
            assert driver.load().nvmlShutdown() == 0
        return Case(fault, devices, error, before == variables())

    def called(self) -> dict[str, set[str]]:
        """Return the functions that a reservation calls, each with its devices.

        The stand-in driver writes no log afterwards, because that takes half of the time.
        """
        self.reserve(Fault())
        del os.environ["STAND_IN_LOG"]
        called: dict[str, set[str]] = {}
        for call in self._here.calls():
            function, *where = call.split()
            called.setdefault(function, set()).update(where)
        return called


@contextmanager
def bench_of(folder: Path, kind: Kind) -> Iterator[Bench]:
    """Make a machine for a kind of reservation, on which a neighbour holds device 2."""
    with Here(folder) as here:
        here.write(kind.scenario)
        with here.rival(*kind.names("2")):
            yield Bench(here, kind)


@dataclass(frozen=True)
class Matrix:
    """Every function, for one device and all, with each code, for one kind of reservation.

    Attributes:
        kind: The kind of reservation.
        codes: The error codes.
        plain: The reservation without a fault.
        called: The functions that a reservation calls, each with its devices.
        cases: The reservations under each fault.
    """

    kind: Kind
    codes: list[int]
    plain: Case
    called: dict[str, set[str]]
    cases: list[Case]


def matrix_of(name: str, codes: list[int], *marks: pytest.MarkDecorator) -> Any:
    """Return a parameter of the fixture; its tests share one process, because it takes seconds."""
    group = pytest.mark.xdist_group(f"faults {name} {len(codes)}")
    label = f"{name}, {len(codes) if codes != CODES else 'all'} codes"
    return pytest.param((KINDS[name], codes), marks=[group, *marks], id=label)


@pytest.fixture(
    params=[
        # These two kinds call every function between them.
        matrix_of("any", [NOT_SUPPORTED, 15, 999]),
        matrix_of("two instances", [NOT_SUPPORTED, 999]),
        *(matrix_of(name, CODES, pytest.mark.full) for name in ("any", "two instances")),
    ],
    scope="module",
)
def matrix(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    """Make a reservation under each fault."""
    kind, codes = request.param
    with bench_of(tmp_path_factory.mktemp("faults"), kind) as bench:
        called = bench.called()
        faults = [
            Fault((function,), where, code)
            for function, devices in called.items()
            for where in sorted({"*"} | devices & {"0", "0:0"})
            for code in codes
            if (function, code) not in IMPOSSIBLE or not kind.has_instances
        ]
        cases = [bench.reserve(fault) for fault in faults]
        return Matrix(kind, codes, bench.reserve(Fault()), called, cases)


def check(cases: Iterable[Case], is_right: Callable[[Case], bool]) -> None:
    """Fail with every case that is not right."""
    cases = list(cases)
    assert cases
    if wrong := [str(case) for case in cases if not is_right(case)]:
        pytest.fail(f"{len(wrong)} of {len(cases)} cases:\n" + "\n".join(wrong), pytrace=False)


# -- tests -----------------------------------------------------------------------------------------


def test_without_a_fault(matrix: Matrix) -> None:
    """Without a fault, the expected devices are reserved."""
    assert matrix.plain.devices == matrix.kind.labels(matrix.kind.expected)


def test_errors_are_of_the_package(matrix: Matrix) -> None:
    """Every failure raises an error of this package, and release() restores all variables."""
    check(
        matrix.cases,
        lambda case: (
            isinstance(case.error, reserve_gpu.ReserveGPUError | None) and case.is_restored
        ),
    )


def test_busy_and_reserved_devices_are_not_chosen(matrix: Matrix) -> None:
    """No fault makes a busy or reserved device available."""
    allowed = set(matrix.kind.labels("03"))
    check(matrix.cases, lambda case: allowed >= set(case.devices))


def test_faulty_devices_are_not_chosen(matrix: Matrix) -> None:
    """A device that can't be identified, or reports that it is down, is not chosen."""

    def is_right(case: Case) -> bool:
        is_down = case.fault.code in GPU_DOWN and not case.function.endswith(COMPARING)
        fails = matrix.called[case.function] and (case.function in IDENTIFYING or is_down)
        return not (fails and any(map(case.fault.affects, case.devices)))

    check(matrix.cases, is_right)


def test_another_device_replaces_a_faulty_one(matrix: Matrix) -> None:
    """If a function fails for one device, another suitable device is reserved."""
    if len(matrix.kind.expected) > 1:
        pytest.skip("no other device is suitable")
    either = [[label] for label in matrix.kind.labels("03")]
    cases = [case for case in matrix.cases if case.fault.where != "*"]
    check(cases, lambda case: case.devices in either)


def test_unsupported_and_optional_functions_change_nothing(matrix: Matrix) -> None:
    """A function that is not supported, or that is optional and fails, changes no choice."""

    def changes_nothing(case: Case) -> bool:
        if case.fault.code == NOT_SUPPORTED and matrix.called[case.function]:
            return case.function not in IDENTIFYING
        has_processes = "RunningProcesses" in case.function and case.fault.code == INSUFFICIENT_SIZE
        return case.function in OPTIONAL and case.fault.code not in GPU_DOWN and not has_processes

    expected = matrix.kind.labels(matrix.kind.expected)
    check(filter(changes_nothing, matrix.cases), lambda case: case.devices == expected)


def test_driver_errors(matrix: Matrix) -> None:
    """If NVML does not start or count the GPUs, the error's class says whether a driver exists."""

    def is_right(case: Case) -> bool:
        is_missing = case.function == "nvmlInitWithFlags" and case.fault.code in NO_DRIVER
        return type(case.error).__name__ == ("NoDriverError" if is_missing else "DriverError")

    starting = ("nvmlInitWithFlags", "nvmlDeviceGetCount_v2")
    cases = [c for c in matrix.cases if c.fault.where == "*" and c.function in starting]
    assert len(cases) == 2 * len(matrix.codes)
    check(cases, is_right)


@pytest.mark.parametrize("codes", [[999], pytest.param(CODES, marks=pytest.mark.full)])
def test_an_unreadable_device_is_not_idle(tmp_path: Path, codes: list[int]) -> None:
    """A device without readings of memory and processes is skipped."""
    with bench_of(tmp_path, KINDS["any"]) as bench:
        functions = (*bench.called(), "nvmlDeviceGetMemoryInfo")
        readings = tuple(name for name in functions if any(part in name for part in READINGS))
        of_first, of_all = (
            [bench.reserve(Fault(readings, where, code)) for code in codes] for where in "0*"
        )
    check(of_first, lambda case: case.devices == ["GPU3"])
    check(of_all, lambda case: isinstance(case.error, reserve_gpu.NoFreeDeviceError))
