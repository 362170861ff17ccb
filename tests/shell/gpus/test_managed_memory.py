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

GPU = "gpu\n memory 10000\n"
PID = "PID"  # replaced by the pid of this process, because names of test cases contain no pids
UNLISTED = f" compute {PID} 300\n managed {PID} 3000\n"
LISTED = f" compute {PID} 3300\n"
listed_or_not = pytest.mark.parametrize("lines", [UNLISTED, LISTED], ids=["unlisted", "listed"])


def write_gpu(here: Here, lines: str) -> None:
    """Describe a machine with one GPU, whose scenario has these lines."""
    here.write(f"{GPU}{lines.replace(PID, str(os.getpid()))}")


def device_of(here: Here, lines: str, **part: Any) -> tuple[dict[str, Any], str]:
    """Return GPU 0 as JSON and as text, with a part held by this process."""
    write_gpu(here, lines)
    with here.rival("0", **part):
        status = reserve_gpu.status()
        (device,) = status.to_dict()["devices"]
        return device, of_gpu(str(status))


@listed_or_not
def test_managed_memory_of_a_holder_counts_once(here: Here, lines: str) -> None:
    """It takes up the holder's part, and no other memory."""
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
        (UNLISTED, {"part_mib": 2000}, None, None, "up to 2.0 GiB"),
        (UNLISTED, {"part_mib": 200}, 300, True, "over"),
        (UNLISTED, {}, None, False, "rival.ipynb"),
        (LISTED, {"part_mib": 2000}, 3300, True, "over"),
        (f" compute {PID} 0\n managed {PID} 3000", {"part_mib": 5000}, None, None, "up to 4.9"),
        (f" compute {PID} 300\n managed {PID} 100", {"part_mib": 5000}, 300, False, "0.3 of 4.9"),
        (f"{UNLISTED} compute 5000001 0", {"part_mib": 5000}, None, None, "pid 5000001"),
        (f"{UNLISTED} compute 5000001 20", {"part_mib": 5000}, 300, False, "pid 5000001"),
        (" managed 5000001 3000", {"part_mib": 5000}, 0, False, "no visible process"),
    ],
)
def test_the_use_of_a_holder_is_unknown_if_memory_is_unlisted(
    here: Here,
    lines: str,
    part: dict[str, Any],
    used_mib: float | None,
    words: str,
    *,
    is_over: bool | None,
) -> None:
    """If the holder is the GPU's only process, unlisted memory never makes it exceed its part."""
    device, text = device_of(here, lines, **part)
    (holder,) = device["holders"]
    assert (holder["memory_used_mib"], holder["is_over"]) == (used_mib, is_over)
    assert words in text
    assert ("no visible process" in text) is (words == "no visible process")


def test_a_graphics_process_of_the_holder_changes_nothing(here: Here) -> None:
    """The memory of such a process is known, so the holder's own use is still unknown."""
    with subprocess.Popen(["sleep", "99"]) as child:
        try:
            device, _ = device_of(here, f"{UNLISTED} graphics {child.pid} 20", part_mib=5000)
        finally:
            child.kill()
    assert device["holders"][0]["memory_used_mib"] is None


@listed_or_not
def test_a_refusal_shows_the_same_use_as_the_status(here: Here, lines: str) -> None:
    """Neither of them says that a process without a reservation uses the memory."""
    write_gpu(here, lines)
    with here.rival("0", part_mib=4000):
        status, refusal = of_gpu(str(reserve_gpu.status())), of_gpu(refused(memory="9000MiB"))
    for text in (status, refusal):
        assert ("up to 3.9 GiB" if lines == UNLISTED else "3.2 of 3.9 GiB") in text
        assert "5.8 GiB" in text
    assert "process" not in refusal


def test_unlisted_memory_makes_an_unreserved_gpu_busy(here: Here) -> None:
    here.write(f"{GPU} managed 5000001 3000")
    (row,) = reserve_gpu.status().rows
    assert (row.state, row.promisable_mib) == (State.BUSY, 7000)
    assert "2.9 GiB in use by no visible process" in of_gpu(refused())


@listed_or_not
def test_own_managed_memory_does_not_prevent_a_larger_part(here: Here, lines: str) -> None:
    here.write(GPU)
    assert got(memory="4000MiB") == "0"
    write_gpu(here, lines)
    assert got(memory="10000MiB") == "0"
