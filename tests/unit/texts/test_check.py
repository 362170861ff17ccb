"""Texts of the framework check: verdicts with their reasons, advice, and whole tables."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from reserve_gpu.commands.check.frameworks import Check
from reserve_gpu.commands.check.verdict import (
    REMEDIES,
    Expectation,
    Finding,
    FrameworkAnswer,
    Verdict,
    evaluate,
    with_early_count,
)
from reserve_gpu.model.requests import Size
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

if TYPE_CHECKING:
    from syrupy.assertion import SnapshotAssertion

BUILT_FOR = ["sm_75", "sm_80", "sm_86", "sm_90", "compute_90"]
HELD_BOTH = HELD._replace(reserved=(GPU1, GPU2))
REMOVED = "libcudnn.so.9: cannot open shared object file"

ANSWERS: dict[str, tuple[FrameworkAnswer, Expectation]] = {
    "fits": (answer(), HELD),
    "has code for a later minor version": (
        answer(targets=BUILT_FOR, capabilities=[[8, 9]]), HELD,
    ),
    "has code for the first GPU only": (
        answer(targets=BUILT_FOR, capabilities=[[9, 0], [7, 0]], devices=[ONE, OTHER]), HELD_BOTH,
    ),
    "sees both GPUs in the other order": (answer(devices=[OTHER, ONE]), HELD_BOTH),
    "also sees an unreserved GPU": (answer(devices=[ONE, OTHER]), HELD),
    "variable changed after the reservation": (
        answer(devices=[OTHER], visible="2"), HELD._replace(visible="2"),
    ),
    "import changes the variable": (answer(devices=[OTHER], visible="2"), HELD),
    "import hides all GPUs": (answer(devices=[], visible=""), HELD),
    "CPU build": (answer(build=None, devices=[]), HELD),
    "variable is empty": (
        answer(devices=[], visible=""), Expectation(visible="", driver=failed_driver(100)),
    ),
    "variable matches no GPU": (
        answer(devices=[], visible="9"), Expectation(visible="9", driver=failed_driver(100)),
    ),
    "driver opens no GPU": (answer(devices=[]), HELD._replace(driver=failed_driver(100))),
    "driver's own row without its library": (NO_LIBRARY, HELD._replace(driver=NO_LIBRARY)),
    "driver is too old": (answer(build="13.0", devices=[]), HELD),
    "error of the framework": (answer(build="12.9", devices=[], error="E: no"), HELD),
    "no device and no reason": (answer(devices=[]), HELD),
    "import fails": (FrameworkAnswer(error=f"ImportError: {REMOVED}", is_done=True), HELD),
    "timeout": (answer(is_done=False, code=None, limit_s=9.0), HELD),
    "crash": (answer(is_done=False, code=-11, stderr="bad"), HELD),
    "early exit": (answer(is_done=False, code=0), HELD),
}  # fmt: skip


@pytest.mark.parametrize("name", ANSWERS)
def test_verdict(name: str, snapshot: SnapshotAssertion) -> None:
    """Each answer of a framework has a verdict and its likeliest cause."""
    row = evaluate("PyTorch", *ANSWERS[name])
    assert f"{row.verdict.value}: {row.reason}" == snapshot


@pytest.mark.parametrize("code", REMEDIES)
def test_advice(code: int, snapshot: SnapshotAssertion) -> None:
    """Each known error of the driver has advice; commands are on lines of their own."""
    driver = failed_driver(code)
    assert evaluate("", driver, HELD._replace(driver=driver)).remedy == snapshot


@pytest.mark.parametrize(
    ("code", "awaits_ready_state"),
    [
        pytest.param(802, True, id="GPUs await the ready state"),
        pytest.param(803, True, id="another error"),
    ],
)
def test_advice_about_confidential_computing(
    code: int, *, awaits_ready_state: bool, snapshot: SnapshotAssertion
) -> None:
    """The mode of confidential computing decides which command is suggested first, and alone."""
    driver = failed_driver(code)
    place = HELD._replace(driver=driver, awaits_ready_state=awaits_ready_state)
    assert evaluate("CUDA driver", driver, place).remedy == snapshot


DRIVER = evaluate("CUDA driver", DRIVER_ANSWER, HELD)
TORCH = evaluate("PyTorch", answer(), HELD)
ABSENT = Finding("JAX", Verdict.ABSENT), Finding("Numba", Verdict.ABSENT)
NOT_READY = HELD._replace(driver=failed_driver(802))
CHECKS = {
    "none is installed": Check((DRIVER, *ABSENT), (GPU1,), "1", "/opt/python"),
    "nothing is reserved and the driver is not ready": Check(
        (evaluate("CUDA driver", NOT_READY.driver, NOT_READY),
         evaluate("PyTorch", answer(devices=[], build=None), NOT_READY)),
        (), None, "/opt/python",
    ),
    "part of a GPU": Check(
        (DRIVER, TORCH._replace(cap="PYTORCH_ALLOC_CONF=per_process_memory_fraction:0.4"),
         TORCH._replace(name="TensorFlow", to_type="tf.config.limit()")),
        (GPU1,), "1", "/opt/python", Size(3072.0),
    ),
    "PyTorch keeps a number of GPUs": Check(
        (DRIVER, with_early_count(TORCH, 8, (GPU1,))), (GPU1,), "1", "/opt/python"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHECKS)
def test_table(name: str, snapshot: SnapshotAssertion) -> None:
    """The table has a row for each installed framework; below it is advice."""
    assert str(CHECKS[name]) == snapshot


def test_html(snapshot: SnapshotAssertion) -> None:
    """In a notebook, each command and each line of advice has its own element."""
    html = CHECKS["nothing is reserved and the driver is not ready"]._repr_html_()
    assert re.sub(' style="[^"]*"', "", html).replace("</", "\n</") == snapshot
