"""Tables of values for the verdict about a framework; tests/unit/texts has the reasons."""

from __future__ import annotations

import pytest

from reserve_gpu.commands.check.verdict import (
    FrameworkAnswer,
    Verdict,
    cuda_uuid,
    evaluate,
    runs_on,
    with_early_count,
)
from reserve_gpu.model.devices import Device
from tests.support.check import (
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
        (failed_driver(100), "", False),
        (failed_driver(999), "", True),
        (failed_driver(101), "1", False),
        (NO_LIBRARY, "1", True),
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
        (1, (GPU1,), Verdict.FITS),
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


Versions = list[tuple[int, int]]
TARGETS: dict[str, tuple[Versions, Versions]] = {
    "sm_86": ([(8, 6), (8, 9)], [(8, 0), (9, 0)]),
    "compute_86": ([(8, 6), (12, 0)], [(8, 0)]),
    "sm_90a": ([(9, 0)], [(9, 1), (10, 0)]),
    "compute_90a": ([(9, 0)], [(10, 0)]),
    "sm_103f": ([(10, 3), (10, 7)], [(10, 0)]),
    "compute_100f": ([(10, 7)], [(12, 0)]),
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
