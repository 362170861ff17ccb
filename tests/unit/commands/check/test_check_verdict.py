"""Tables of values for the verdict about a framework; tests/unit/texts has the reasons."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from reserve_gpu.commands.check.frameworks import Check
from reserve_gpu.commands.check.verdict import (
    Finding,
    FrameworkAnswer,
    Verdict,
    cuda_uuid,
    evaluate,
    parse_answer,
    runs_on,
    with_early_count,
)
from reserve_gpu.model.devices import Device
from tests.support.check import (
    DRIVER_ANSWER,
    GPU1,
    GPU2,
    HELD,
    NO_LIBRARY,
    ONE,
    OTHER,
    answer,
    failed_driver,
)

STRANGER = "33333333-aaaa-4aaa-8aaa-aaaaaaaaaaaa"
INSTANCE = Device(1, f"MIG-{OTHER}", instance=0, gpu_uuid=f"GPU-{ONE}")
OLD_INSTANCE = Device(1, f"MIG-GPU-{ONE}/1/0", instance=0, gpu_uuid=f"GPU-{ONE}")


@pytest.mark.parametrize(
    ("device", "uuid"), [(GPU1, ONE), (INSTANCE, OTHER), (OLD_INSTANCE, ONE)], ids=str
)
def test_cuda_identifies_an_instance_of_an_old_driver_by_its_gpu(device: Device, uuid: str) -> None:
    assert cuda_uuid(device) == uuid


@pytest.mark.parametrize(
    ("driver", "visible", "has_advice"),
    [
        (failed_driver(100), "1", True),
        (failed_driver(100), None, True),
        (failed_driver(100), "", False),
        (failed_driver(100), "9", False),
        (failed_driver(999), "", True),
        (failed_driver(101), "1", False),
        (NO_LIBRARY, "1", True),
        (answer(), "1", False),
    ],
)
def test_advice_is_in_the_driver_s_row_if_its_error_is_the_cause(
    driver: FrameworkAnswer, visible: str | None, *, has_advice: bool
) -> None:
    driver = driver._replace(visible=visible)
    place = HELD._replace(driver=driver, visible=visible)
    assert bool(evaluate("CUDA driver", driver, place).remedy) is has_advice
    assert evaluate("PyTorch", answer(devices=[], visible=visible), place).remedy is None


@pytest.mark.parametrize(
    ("count", "reserved", "verdict"),
    [
        (8, (GPU1,), Verdict.OTHER),
        (0, (GPU1,), Verdict.OTHER),
        (1, (GPU1,), Verdict.FITS),
        (2, (GPU1, GPU2), Verdict.FITS),
        (None, (GPU1,), Verdict.FITS),
        (8, (), Verdict.UNRESERVED),
    ],
)
def test_pytorch_fits_unless_this_process_keeps_another_number_of_gpus(
    count: int | None, reserved: tuple[Device, ...], verdict: Verdict
) -> None:
    seen = answer(devices=[cuda_uuid(device) for device in reserved or (GPU1,)])
    finding = evaluate("PyTorch", seen, HELD._replace(reserved=reserved))
    row = with_early_count(finding, count, reserved)
    assert row.verdict is verdict
    assert bool(row.remedy) is bool(row.reason) is (verdict is Verdict.OTHER)


def test_a_kept_number_of_gpus_does_not_hide_another_cause() -> None:
    row = evaluate("PyTorch", answer(build=None, devices=[]), HELD)
    assert with_early_count(row, 8, (GPU1,)) == row


Versions = list[tuple[int, int]]
TARGETS: dict[str, tuple[Versions, Versions]] = {
    "sm_86": ([(8, 6), (8, 9)], [(8, 0), (9, 0)]),
    "sm_120": ([(12, 0), (12, 1)], [(7, 0)]),
    "compute_86": ([(8, 6), (12, 0)], [(8, 0)]),
    "sm_90a": ([(9, 0)], [(9, 1), (10, 0)]),
    "compute_90a": ([(9, 0)], [(10, 0)]),
    "sm_103f": ([(10, 3), (10, 7)], [(10, 0)]),
    "compute_100f": ([(10, 7)], [(12, 0)]),
    "sm_100z": ([(8, 0)], []),
    "gfx90a": ([(8, 0)], []),
}


@pytest.mark.parametrize("target", TARGETS)
def test_code_runs_on_the_versions_that_nvidia_documents(target: str) -> None:
    """Code for an unknown target is assumed to run."""
    runs, fails = TARGETS[target]
    assert [version for version in runs + fails if runs_on(target, version)] == runs


def test_known_devices_are_named_by_their_label_and_others_by_their_uuid() -> None:
    place = HELD._replace(known=(GPU2, INSTANCE))
    row = evaluate("PyTorch", answer(devices=[ONE, OTHER, STRANGER, None]), place)
    seen = ("GPU1", GPU1.uuid), ("GPU2", GPU2.uuid), (STRANGER, STRANGER), ("?", None)
    assert row.sees == seen


@pytest.mark.parametrize("fields", [{}, {"level": "info"}, {"is_done": True, "devices": []}])
def test_an_incomplete_answer_does_not_fit(fields: dict[str, Any]) -> None:
    """Unknown fields are ignored."""
    found = parse_answer(json.dumps(fields).encode(), b"\n", 0, 1.0)
    assert not evaluate("PyTorch", found, HELD).is_well


class Terminal(io.StringIO):
    """A text buffer that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_long_reason_is_wrapped_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lines are aligned with the column; without a terminal, a row is one line."""
    reason = " ".join(f"word{number}" for number in range(30))
    driver = evaluate("CUDA driver", DRIVER_ANSWER, HELD)
    check = Check((driver, Finding("PyTorch", Verdict.FAILS, reason=reason)), reserved=(GPU1,))
    whole = str(check).splitlines()
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stdout", Terminal())
    wrapped = str(check).splitlines()
    start = whole[-1].index("fails")
    assert max(map(len, wrapped)) <= 80
    assert {line[:start].strip() for line in wrapped[len(whole) :]} == {""}
    assert [*wrapped[: len(whole) - 1], wrapped[len(whole) - 1][:start]] == [
        *whole[:-1],
        whole[-1][:start],
    ]
    assert " ".join(line[start:] for line in wrapped[len(whole) - 1 :]) == f"fails: {reason}"
