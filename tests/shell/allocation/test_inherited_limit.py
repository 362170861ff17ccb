"""Managed memory, which some drivers leave out of the sizes of processes.

https://github.com/gpuopenanalytics/pynvml/issues/63
"""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

import reserve_gpu
from reserve_gpu.model.devices import State
from tests.support.platforms import on_a_host
from tests.support.reserving import got, of_gpu, refused

if TYPE_CHECKING:
    from tests.support.here import Here

pytestmark = on_a_host

TOTAL_MIB = 10000
GPU = f"gpu\n memory {TOTAL_MIB}\n"
PID = "PID"  # replaced by the pid of this process: names of test cases must not contain pids


def of_this_process(lines: str) -> str:
    """Return lines of a scenario with this process's pid."""
    return lines.replace(PID, str(os.getpid()))


def device_of(here: Here, lines: str, **part: Any) -> tuple[dict[str, Any], str]:
    """Return GPU 0 as JSON and as text, with a part held by this process."""
    here.write(f"{GPU}{of_this_process(lines)}")
    with here.rival("0", **part):
        status = reserve_gpu.status()
        (device,) = status.to_dict()["devices"]
        return device, of_gpu(str(status))


OUTSIDE = f" compute {PID} 300\n managed {PID} 3000\n"
INSIDE = f" compute {PID} 3300\n"
BOTH = {"outside the process's size": OUTSIDE, "inside the process's size": INSIDE}


@pytest.mark.parametrize("lines", BOTH.values(), ids=BOTH.keys())
def test_it_counts_once(here: Here, lines: str) -> None:
    """A holder's managed memory takes up the holder's part, and no other memory."""
    device, text = device_of(here, lines, part_mib=5000)
    assert device["memory_used_mib"] == 3300
    assert device["memory_promisable_mib"] == 5000
    assert device["is_used_without_reservation"] is False
    assert "visible process" not in text
    with here.rival("0", part_mib=5000):
        assert "4.8 GiB" in refused(memory="5001MiB")
        assert got(memory="5000MiB") == "0"


@pytest.mark.parametrize(
    ("lines", "part", "used_mib", "is_over", "words"),
    [
        (OUTSIDE, {"part_mib": 2000}, None, None, "up to 2.0 GiB"),
        (OUTSIDE, {"part_mib": 5000}, None, None, "up to 4.9 GiB"),
        (OUTSIDE, {"part_mib": 200}, 300, True, ": over"),
        (OUTSIDE, {}, None, False, "rival.ipynb"),
        (INSIDE, {"part_mib": 2000}, 3300, True, ": over"),
        (f" compute {PID} 0\n managed {PID} 3000", {"part_mib": 5000}, None, None, "up to 4.9"),
        (f" compute {PID} 300\n managed {PID} 100", {"part_mib": 5000}, 300, False, "0.3 of 4.9"),
        (
            f"{OUTSIDE} compute 5000001 0",
            {"part_mib": 5000}, None, None, "no memory: pid 5000001",
        ),
        (
            f"{OUTSIDE} compute 5000001 20",
            {"part_mib": 5000}, 300, False, "without a reservation: pid 5000001",
        ),
        (" managed 5000001 3000", {"part_mib": 5000}, 0, False, "in use by no visible process"),
    ],
)  # fmt: skip
def test_its_share_is_unknown(
    here: Here,
    lines: str,
    part: dict[str, Any],
    used_mib: float | None,
    words: str,
    *,
    is_over: bool | None,
) -> None:
    """The use of a GPU's only process is unknown if unlisted memory is in use, and never over."""
    device, text = device_of(here, lines, **part)
    (holder,) = device["holders"]
    assert (holder["memory_used_mib"], holder["is_over"]) == (used_mib, is_over)
    assert words in text
    assert ("no visible process" in text) is ("no visible process" in words)


def test_its_share_is_unknown_next_to_a_window(here: Here) -> None:
    """A small graphics process of the holder changes nothing: its own memory is known."""
    with subprocess.Popen(["sleep", "99"]) as child:
        try:
            device, text = device_of(here, f"{OUTSIDE} graphics {child.pid} 20", part_mib=5000)
        finally:
            child.kill()
    assert device["holders"][0]["memory_used_mib"] is None
    assert "up to 4.9 GiB" in text


@pytest.mark.parametrize("lines", BOTH.values(), ids=BOTH.keys())
def test_a_refusal_says_the_same(here: Here, lines: str) -> None:
    """A refusal shows the same use of a part as the status, and accuses no other process."""
    here.write(f"{GPU}{of_this_process(lines)}")
    with here.rival("0", part_mib=4000):
        status, text = of_gpu(str(reserve_gpu.status())), of_gpu(refused(memory="9000MiB"))
    words = "up to 3.9 GiB" if "managed" in lines else "3.2 of 3.9 GiB"
    assert words in status
    assert words in text
    assert "5.8 GiB still available" in status
    assert "5.8 GiB still available" in text
    assert "process" not in text


def test_without_a_holder(here: Here) -> None:
    """Without a reservation, memory that belongs to no listed process makes a GPU busy."""
    here.write(f"{GPU} managed 5000001 3000")
    (row,) = reserve_gpu.status().rows
    assert (row.state, row.promisable_mib) == (State.BUSY, 7000)
    assert "2.9 GiB in use by no visible process" in of_gpu(refused())


@pytest.mark.parametrize("lines", BOTH.values(), ids=BOTH.keys())
def test_a_larger_part(here: Here, lines: str) -> None:
    """A process's own managed memory does not count against a larger part of the same GPU."""
    here.write(GPU)
    assert got(memory="4000MiB") == "0"
    here.write(f"{GPU}{of_this_process(lines)}")
    assert got(memory="10000MiB") == "0"
