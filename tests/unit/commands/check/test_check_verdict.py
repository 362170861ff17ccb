"""What a framework's answer comes to: tables of plain values."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from reserve_gpu.commands.check.frameworks import Check
from reserve_gpu.commands.check.verdict import (
    Expectation,
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

ONE, OTHER, STRANGER = (f"{digit * 8}-aaaa-4aaa-8aaa-aaaaaaaaaaaa" for digit in "123")
GPU1 = Device(1, f"GPU-{ONE}")
GPU2 = Device(2, f"GPU-{OTHER}")
PART = Device(1, f"MIG-{OTHER}", instance=0, gpu_uuid=f"GPU-{ONE}")
OLD_PART = Device(1, f"MIG-GPU-{ONE}/1/0", instance=0, gpu_uuid=f"GPU-{ONE}")


@pytest.mark.parametrize(("device", "uuid"), [(GPU1, ONE), (PART, OTHER), (OLD_PART, ONE)])
def test_the_uuid_in_cuda(device: Device, uuid: str) -> None:
    """CUDA knows a device by its UUID; an instance of an old driver by that of its GPU."""
    assert cuda_uuid(device) == uuid


def done(**fields: Any) -> FrameworkAnswer:
    """Return the answer of a framework with which all is well, but for these fields."""
    well = {
        "version": "1.0",
        "build": "12.4",
        "visible": "1",
        "devices": [ONE],
        "is_done": True,
    }
    return FrameworkAnswer(**{**well, **fields})


DRIVER = done(version="12.2", build="")
NOTHING: dict[str, Any] = {"devices": []}
NO_DEVICE = "cuInit returned 100 CUDA_ERROR_NO_DEVICE: no CUDA-capable device"
NO_DRIVER = FrameworkAnswer(error="libcuda.so.1: cannot open", driver_code=-1, is_done=True)
BOTH = [ONE, OTHER]
HELD = Expectation(reserved=(GPU1,), visible="1", expected="1", driver=DRIVER)
UNHELD = Expectation(visible="1", driver=DRIVER)

TORCH_OF_CU124 = ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"]
TORCH_OF_CU129 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]

VERDICTS = [
    (done(targets=TORCH_OF_CU124, capabilities=[[8, 9]]), HELD, "fits", ""),
    (
        done(targets=TORCH_OF_CU124, capabilities=[[12, 0]]),
        HELD,
        "fails",
        "no code for sm_120 in this build, only for sm_50, sm_60, ",
    ),
    (
        done(targets=TORCH_OF_CU129, capabilities=[[9, 0], [7, 0]], devices=BOTH),
        HELD._replace(reserved=(GPU1, GPU2)),
        "fails",
        "no code for sm_70 in this build, only for sm_75, ",
    ),
    (
        done(targets=TORCH_OF_CU124, capabilities=[[12, 0]], devices=BOTH),
        HELD,
        "other devices",
        "",
    ),
    (done(), HELD, "fits", ""),
    (done(devices=BOTH), HELD._replace(reserved=(GPU1, GPU2)), "fits", ""),
    (
        done(devices=BOTH[::-1]),
        HELD._replace(reserved=(GPU1, GPU2)),
        "other devices",
        "the reserved devices in another order",
    ),
    (done(), HELD._replace(reserved=(GPU1, GPU2)), "other devices", "not all reserved devices"),
    (done(devices=BOTH), HELD, "other devices", ""),
    (done(devices=[None]), HELD, "other devices", ""),
    (
        done(devices=BOTH[1:], visible="2"),
        HELD._replace(visible="2"),
        "other devices",
        "CUDA_VISIBLE_DEVICES was set to '2' after the reservation; reserve again",
    ),
    (
        done(devices=BOTH[1:], visible=None),
        HELD._replace(visible=None),
        "other devices",
        "CUDA_VISIBLE_DEVICES was unset after the reservation; reserve again",
    ),
    (
        done(devices=BOTH[1:], visible="2"),
        HELD,
        "other devices",
        "importing it sets CUDA_VISIBLE_DEVICES to '2'",
    ),
    (done(), UNHELD, "unreserved", ""),
    (done(devices=BOTH), UNHELD, "other devices", ""),
    (done(build=None, **NOTHING), HELD, "no device", "a CPU build; install the CUDA build"),
    (
        done(**NOTHING, visible=""),
        HELD,
        "no device",
        "importing it sets CUDA_VISIBLE_DEVICES to ''",
    ),
    (
        done(**NOTHING, visible=""),
        Expectation(visible="", driver=done(**NOTHING, error=NO_DEVICE, driver_code=100)),
        "no device",
        "CUDA_VISIBLE_DEVICES is empty",
    ),
    (
        done(**NOTHING, visible="9"),
        Expectation(visible="9", driver=done(**NOTHING, error=NO_DEVICE, driver_code=100)),
        "no device",
        "CUDA_VISIBLE_DEVICES='9' matches no device here",
    ),
    (
        done(**NOTHING),
        HELD._replace(driver=done(**NOTHING, error=NO_DEVICE, driver_code=100)),
        "no device",
        "the CUDA driver does not start",
    ),
    (
        done(**NOTHING),
        HELD._replace(driver=done(**NOTHING, error="cuInit returned 803 X")),
        "no device",
        "the CUDA driver does not start",
    ),
    (
        done(**NOTHING, visible=""),
        Expectation(
            visible="", driver=done(**NOTHING, error="cuInit returned 803 X", driver_code=803)
        ),
        "no device",
        "the CUDA driver does not start",
    ),
    (
        done(build="13.0", **NOTHING),
        HELD,
        "no device",
        "the driver is too old: it supports CUDA 12.2, but this build needs 13.0",
    ),
    (done(build="12.9", **NOTHING, error="E: no"), HELD, "no device", "E: no"),
    (done(build="", **NOTHING, stderr="W no"), HELD, "no device", "W no"),
    (done(**NOTHING), HELD, "no device", "no reason given"),
    (
        done(**NOTHING),
        HELD._replace(driver=NO_DRIVER),
        "no device",
        "the CUDA driver does not start",
    ),
    (NO_DRIVER, HELD._replace(driver=NO_DRIVER), "no device", "libcuda.so.1: cannot open"),
    (FrameworkAnswer(error="ImportError: x", is_done=True), HELD, "fails", "ImportError: x"),
    (done(is_done=False, code=None, limit_s=9.0), HELD, "fails", "no answer within 9 s"),
    (
        done(is_done=False, code=-11, stderr="bad"),
        HELD,
        "fails",
        "crashed (Segmentation fault) while",
    ),
    (done(is_done=False, code=-40), HELD, "fails", "crashed (Real-time signal 6)"),
    (done(is_done=False, code=7), HELD, "fails", "ended with exit code 7"),
]


@pytest.mark.parametrize(("found", "place", "state", "reason"), VERDICTS)
def test_evaluate(found: FrameworkAnswer, place: Expectation, state: str, reason: str) -> None:
    """Each answer has its verdict, and what does not fit its likeliest cause."""
    row = evaluate("X", found, place)
    assert row.verdict is Verdict(state)
    assert row.reason.startswith(reason) if state == "fails" else reason in row.reason
    assert bool(reason) == bool(row.reason)


def failed(code: int, error: str = "cuInit returned X", **fields: Any) -> FrameworkAnswer:
    """Return the answer of a driver that does not start."""
    return done(**{**NOTHING, **fields}, error=error, driver_code=code)


REMEDIES: list[tuple[FrameworkAnswer, str | None, str]] = [
    (failed(34), "1", ".../stubs"),
    (failed(46), "1", "compute_mode"),
    (failed(100), "1", "docker run --gpus all"),
    (failed(100), None, "docker run --gpus all"),
    (failed(100), "", ""),
    (failed(100), "9", ""),
    (failed(101), "1", ""),
    (failed(802), "1", "systemctl status nvidia-fabricmanager"),
    (failed(803), "1", "reboot"),
    (failed(804), "1", "cuda-compat"),
    (failed(999), "1", "/dev/nvidia-uvm"),
    (failed(999), "", "/dev/nvidia-uvm"),
    (failed(801), "1", ""),
    (NO_DRIVER, "1", "NVIDIA_DRIVER_CAPABILITIES"),
    (done(), "1", ""),
]


@pytest.mark.parametrize(("driver", "visible", "remedy"), REMEDIES)
def test_what_to_do_about_the_driver(
    driver: FrameworkAnswer, visible: str | None, remedy: str
) -> None:
    """The driver's row says what to do about its error, where that is known and the cause."""
    driver = driver._replace(visible=visible)
    place = HELD._replace(driver=driver, visible=visible)
    row = evaluate("X", driver, place)
    assert (row.remedy is None) is (not remedy)
    assert remedy in (row.remedy or "")
    assert evaluate("Y", done(**NOTHING, visible=visible), place).remedy is None


FABRIC_MANAGER, SET_READY = (
    "systemctl status nvidia-fabricmanager",
    "nvidia-smi conf-compute -srs 1",
)
COMMANDS: list[tuple[bool | None, list[str]]] = [
    (True, [SET_READY, FABRIC_MANAGER]),
    (False, [FABRIC_MANAGER]),
    (None, [FABRIC_MANAGER, SET_READY]),
]


@pytest.mark.parametrize(("awaits_ready_state", "commands"), COMMANDS)
def test_the_likely_cause_of_a_system_that_is_not_ready_comes_first(
    *, awaits_ready_state: bool | None, commands: list[str]
) -> None:
    """The mode of confidential computing decides which command is suggested first, and alone."""
    driver = failed(802)
    place = HELD._replace(driver=driver, awaits_ready_state=awaits_ready_state)
    lines = (evaluate("CUDA driver", driver, place).remedy or "").splitlines()
    assert lines[1::2] == commands
    assert len(lines) == 2 * len(commands)


def test_only_a_system_that_is_not_ready_is_told_about_the_ready_state() -> None:
    """The advice about other errors does not mention confidential computing."""
    place = HELD._replace(driver=failed(803), awaits_ready_state=True)
    assert SET_READY not in (evaluate("CUDA driver", place.driver, place).remedy or "")


COUNTS: list[tuple[int | None, tuple[Device, ...], str]] = [
    (8, (GPU1,), "other devices"),
    (0, (GPU1,), "other devices"),
    (1, (GPU1,), "fits"),
    (2, (GPU1, GPU2), "fits"),
    (None, (GPU1,), "fits"),
    (8, (), "unreserved"),
]


@pytest.mark.parametrize(("count", "reserved", "state"), COUNTS)
def test_a_count_that_this_process_keeps(
    count: int | None, reserved: tuple[Device, ...], state: str
) -> None:
    """PyTorch fits only if this process does not keep a different number of devices."""
    place = HELD._replace(reserved=reserved)
    answer = done(devices=[cuda_uuid(device) for device in reserved or (GPU1,)])
    row = with_early_count(evaluate("PyTorch", answer, place), count, reserved)
    assert row.verdict is Verdict(state)
    noun = f"{count} GPU" if state == "other devices" else ""
    assert noun in row.reason
    assert bool(row.remedy) is bool(row.reason) is bool(noun)


def test_a_count_does_not_hide_another_cause() -> None:
    """If PyTorch fails for another reason, this reason is shown."""
    row = evaluate("PyTorch", done(build=None, **NOTHING), HELD)
    assert with_early_count(row, 8, (GPU1,)) == row


RUNS: list[tuple[str, tuple[int, int], bool]] = [
    ("sm_86", (8, 6), True),
    ("sm_86", (8, 9), True),
    ("sm_86", (8, 0), False),
    ("sm_86", (9, 0), False),
    ("sm_90", (12, 0), False),
    ("sm_75", (7, 0), False),
    ("sm_120", (12, 1), True),
    ("sm_120", (12, 0), True),
    ("sm_121", (12, 0), False),
    ("compute_86", (8, 6), True),
    ("compute_86", (12, 0), True),
    ("compute_86", (8, 0), False),
    ("compute_120", (7, 0), False),
    ("sm_90a", (9, 0), True),
    ("sm_90a", (10, 0), False),
    ("sm_100a", (10, 3), False),
    ("compute_90a", (9, 0), True),
    ("compute_90a", (10, 0), False),
    ("sm_100f", (10, 0), True),
    ("sm_100f", (10, 3), True),
    ("sm_103f", (10, 0), False),
    ("compute_100f", (10, 7), True),
    ("compute_100f", (12, 0), False),
    ("sm_100z", (8, 0), True),
    ("gfx90a", (8, 0), True),
    ("", (8, 0), True),
]


@pytest.mark.parametrize(("target", "capability", "runs"), RUNS)
def test_what_code_runs_where(target: str, capability: tuple[int, int], *, runs: bool) -> None:
    """Code runs on the GPUs that NVIDIA names for its target; what we can't read may run."""
    assert runs_on(target, capability) is runs


def test_what_is_seen_has_its_name() -> None:
    """Known devices go by their label, others by the UUID that CUDA gives them, if any."""
    row = evaluate("X", done(devices=[*BOTH, STRANGER, None]), HELD._replace(known=(GPU2, PART)))
    seen = ("GPU1", GPU1.uuid), ("GPU2", GPU2.uuid), (STRANGER, STRANGER), ("?", None)
    assert row.sees == seen


class Tty(io.StringIO):
    """A terminal, as far as Python asks."""

    def isatty(self) -> bool:
        return True


def test_a_long_reason_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal a reason is broken between words, below itself; elsewhere a row is one line."""
    reason = " ".join(f"word{number}" for number in range(30))
    driver = evaluate("CUDA driver", DRIVER, HELD)
    found = Check((driver, Finding("PyTorch", Verdict.FAILS, reason=reason)), reserved=(GPU1,))
    whole = str(found).splitlines()
    assert whole[-1].endswith(f"  fails: {reason}")
    assert len(whole) == 4
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stdout", Tty())
    broken = str(found).splitlines()
    assert max(map(len, broken)) <= 80
    assert broken[:3] == whole[:3]
    indent = whole[-1].index("fails")
    assert {line[:indent].strip() for line in broken[4:]} == {""}
    assert " ".join(line[indent:] for line in broken[3:]) == f"fails: {reason}"


def test_what_can_be_typed_stands_alone() -> None:
    """What can be typed, to reserve or to mend the driver, is a line of its own."""
    driver = failed(802)
    place = Expectation(visible="1", driver=driver, awaits_ready_state=False)
    torch = evaluate("PyTorch", done(**NOTHING), place)
    found = Check((evaluate("CUDA driver", driver, place), torch))
    lines = str(found).splitlines()
    assert lines[2] == "reserve_gpu.reserve()"
    assert lines[-1] == "systemctl status nvidia-fabricmanager"
    assert f"<div>{lines[2]}</div>" in found._repr_html_()
    assert f"<div>{lines[-1]}</div>" in found._repr_html_()


@pytest.mark.parametrize("has_torch", [True, False])
def test_only_the_driver(*, has_torch: bool) -> None:
    """Where no framework is installed the check says that it has asked none."""
    torch = evaluate("PyTorch", done(), HELD) if has_torch else Finding("PyTorch", Verdict.ABSENT)
    rows = evaluate("CUDA driver", DRIVER, HELD), torch, Finding("JAX", Verdict.ABSENT)
    assert ("Only the driver was checked." in str(Check(rows, reserved=(GPU1,)))) is not has_torch


NO_ANSWERS: list[dict[str, Any]] = [{}, {"level": "info"}, {"is_done": True, "devices": []}]


@pytest.mark.parametrize("news", NO_ANSWERS)
def test_what_is_no_answer(news: dict[str, Any]) -> None:
    """What names none of an answer is ignored, and nothing fits where something is missing."""
    assert not evaluate("X", parse_answer(json.dumps(news).encode(), b"\n", 0, 1.0), HELD).is_well
