"""What a framework's answer comes to: tables of plain values."""

from __future__ import annotations

from typing import Any

import pytest

from reserve_gpu.frameworks.children import End
from reserve_gpu.frameworks.probes import EXPECTED
from reserve_gpu.frameworks.verdict import Answer, Place, Seen, Verdict, answer, is_same, judge
from reserve_gpu.model import Device

ONE, OTHER = (f"{digit * 8}-aaaa-4aaa-8aaa-aaaaaaaaaaaa" for digit in "12")
BUS_ONE, BUS_OTHER = "0000:03:00.0", "0000:04:00.0"
GPU1 = Device(1, f"GPU-{ONE}", bus_id=BUS_ONE)
GPU2 = Device(2, f"GPU-{OTHER}", bus_id=BUS_OTHER)
PART = Device(1, f"MIG-{OTHER}", bus_id=BUS_ONE, instance=0, gpu_uuid=f"GPU-{ONE}")
OLD_PART = Device(1, f"MIG-GPU-{ONE}/1/0", bus_id=BUS_ONE, instance=0, gpu_uuid=f"GPU-{ONE}")

SEEN = [
    (Seen(ONE), GPU1, True),
    (Seen(OTHER), GPU1, False),
    (Seen(ONE, own_uuid=ONE.upper()), GPU1, True),
    (Seen(ONE, own_uuid=f"GPU-{ONE}"), GPU1, True),
    (Seen(ONE, own_bus_id="0000:03:00.0"), GPU1, True),
    (Seen(ONE, own_bus_id="00000000:03:00.0"), GPU1, True),
    (Seen(ONE, own_bus_id=BUS_OTHER), GPU1, False),
    (Seen(ONE, own_uuid=OTHER), GPU1, False),
    (Seen(None, own_uuid=ONE), GPU1, True),
    (Seen(None, own_bus_id=BUS_ONE), GPU1, True),
    (Seen(None, own_bus_id=BUS_OTHER), GPU1, False),
    (Seen(), GPU1, False),
    (Seen(""), Device(0, ""), False),
    (Seen(OTHER), PART, True),
    (Seen(OTHER, own_uuid=f"MIG-{OTHER}"), PART, True),
    (Seen(OTHER, own_uuid=ONE), PART, True),
    (Seen(ONE), PART, False),
    (Seen(ONE), OLD_PART, True),
    (Seen(OTHER), OLD_PART, False),
]


@pytest.mark.parametrize(("seen", "device", "expected"), SEEN)
def test_is_same(seen: Seen, device: Device, *, expected: bool) -> None:
    """A device is the reserved one if all that is known of it says so, and something does."""
    assert is_same(seen, device) is expected


def done(**fields: Any) -> Answer:
    """The answer of a framework with which all is well, but for these fields."""
    well = {
        "version": "1.0",
        "build": "12.4",
        "visible": "1",
        "devices": (Seen(ONE),),
        "results": (EXPECTED,),
        "is_done": True,
    }
    return Answer(**{**well, **fields})


DRIVER = done(version="12.2", build="")
NOTHING = {"devices": (), "results": None}
NO_DEVICE = "RuntimeError: cuInit answers 100 CUDA_ERROR_NO_DEVICE: no CUDA-capable device"
NO_DRIVER = Answer(error="OSError: libcuda.so.1: cannot open", is_done=True)
BOTH = (Seen(ONE), Seen(OTHER))
HELD = Place(reserved=(GPU1,), visible="1", expected="1", driver=DRIVER)
UNHELD = Place(visible="1", driver=DRIVER)

VERDICTS = [
    (done(), HELD, "fits", ""),
    (done(devices=BOTH, results=(EXPECTED,) * 2), HELD._replace(reserved=(GPU1, GPU2)), "fits", ""),
    (
        done(devices=BOTH[::-1], results=(EXPECTED,) * 2),
        HELD._replace(reserved=(GPU1, GPU2)),
        "other devices",
        "the reserved ones in another order",
    ),
    (done(), HELD._replace(reserved=(GPU1, GPU2)), "other devices", "not all that are reserved"),
    (done(devices=BOTH, results=None), HELD, "other devices", ""),
    (done(devices=(Seen(),)), HELD, "other devices", ""),
    (
        done(devices=BOTH[1:], visible="2"),
        HELD._replace(visible="2"),
        "other devices",
        "CUDA_VISIBLE_DEVICES was set to '2' since; reserve again",
    ),
    (
        done(devices=BOTH[1:], visible=None),
        HELD._replace(visible=None),
        "other devices",
        "CUDA_VISIBLE_DEVICES was unset since; reserve again",
    ),
    (
        done(devices=BOTH[1:], visible="2"),
        HELD,
        "other devices",
        "importing it sets CUDA_VISIBLE_DEVICES to '2'",
    ),
    (done(results=None), UNHELD, "unreserved", ""),
    (done(devices=BOTH), UNHELD, "other devices", ""),
    (done(build=None, **NOTHING), HELD, "no device", "a CPU build; install the one for CUDA"),
    (
        done(**NOTHING, visible=""),
        HELD,
        "no device",
        "importing it sets CUDA_VISIBLE_DEVICES to ''",
    ),
    (
        done(**NOTHING, visible=""),
        Place(visible="", driver=done(**NOTHING, error=NO_DEVICE, driver_code=100)),
        "no device",
        "CUDA_VISIBLE_DEVICES is empty",
    ),
    (
        done(**NOTHING, visible="9"),
        Place(visible="9", driver=done(**NOTHING, error=NO_DEVICE, driver_code=100)),
        "no device",
        "CUDA_VISIBLE_DEVICES='9' names no device here",
    ),
    (
        done(**NOTHING),
        HELD._replace(driver=done(**NOTHING, error="RuntimeError: cuInit answers 803 X")),
        "no device",
        "RuntimeError: cuInit answers 803 X",
    ),
    (
        done(**NOTHING, visible=""),
        Place(visible="", driver=done(**NOTHING, error="E: cuInit answers 803 X", driver_code=803)),
        "no device",
        "E: cuInit answers 803 X",
    ),
    (
        done(build="13.0", **NOTHING),
        HELD,
        "no device",
        "the driver is too old: it knows CUDA 12.2, this build is for 13.0",
    ),
    (done(build="12.9", **NOTHING, error="E: no"), HELD, "no device", "E: no"),
    (done(build="", **NOTHING, stderr="W no"), HELD, "no device", "W no"),
    (done(**NOTHING), HELD, "no device", "it gives no reason"),
    (done(**NOTHING), HELD._replace(driver=NO_DRIVER), "no device", "no NVIDIA driver can be used"),
    (NO_DRIVER, HELD._replace(driver=NO_DRIVER), "no device", "libcuda.so.1: cannot open"),
    (Answer(error="ImportError: x", is_done=True), HELD, "fails", "ImportError: x"),
    (done(error="E: memory", doing="computing"), HELD, "fails", "E: memory (while computing)"),
    (done(results=(1.0,)), HELD, "fails", "computes wrongly: 1.0 instead of 328350.0"),
    (done(results=(float("nan"),)), HELD, "fails", "computes wrongly: nan"),
    (done(results=()), HELD, "fails", "computes wrongly: None"),
    (done(is_done=False, code=None, limit_s=9.0), HELD, "fails", "no answer within 9 s"),
    (done(is_done=False, code=-11, stderr="bad"), HELD, "fails", "crashed (SIGSEGV) while"),
    (done(is_done=False, code=-200), HELD, "fails", "crashed (signal 200)"),
    (done(is_done=False, code=7), HELD, "fails", "ended with exit code 7"),
]


@pytest.mark.parametrize(("found", "place", "state", "reason"), VERDICTS)
def test_judge(found: Answer, place: Place, state: str, reason: str) -> None:
    """Each answer has its verdict, and what does not fit its likeliest cause."""
    row = judge("X", found, place)
    assert row.verdict is Verdict(state)
    assert row.reason.startswith(reason) if state == "fails" else reason in row.reason
    assert bool(reason) == bool(row.reason)


def test_what_is_seen_has_its_name() -> None:
    """Known devices go by their label, others by what they say of themselves, shown safely."""
    strangers = (*BOTH, Seen(own_uuid="\x1b[31m<b>" + "x" * 100))
    row = judge("X", done(devices=strangers), HELD._replace(known=(GPU2,)))
    assert row.sees[:2] == (GPU1, GPU2)
    assert "\x1b" not in row.sees[2].label
    assert len(row.sees[2].label) == 40
    assert row.sees[2].uuid is None


NO_ANSWERS: list[dict[str, Any]] = [{}, {"level": "info"}, {"is_done": True, "devices": []}]


@pytest.mark.parametrize("news", NO_ANSWERS)
def test_what_is_no_answer(news: dict[str, Any]) -> None:
    """What names none of an answer is ignored, and nothing fits where something is missing."""
    assert not judge("X", answer(End(news, 0, "\n"), 1.0), HELD).is_well
