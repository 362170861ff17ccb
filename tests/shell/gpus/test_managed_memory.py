"""Managed memory, which some drivers leave out of the sizes of processes.

https://github.com/gpuopenanalytics/pynvml/issues/63
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

import reserve_gpu
from tests.support.platforms import on_a_host
from tests.support.reserving import of_gpu

if TYPE_CHECKING:
    from tests.support.here import Here

pytestmark = on_a_host

GPU = "gpu\n memory 10000\n"
PID = "PID"  # replaced by the pid of this process, because names of test cases contain no pids
UNLISTED = f" compute {PID} 300\n managed {PID} 3000\n"


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


@pytest.mark.parametrize(
    ("lines", "part", "used_mib", "is_over", "words"),
    [
        (UNLISTED, {"part_mib": 2000}, None, None, "up to 2.0 GiB"),
        (UNLISTED, {"part_mib": 200}, 300, True, "over"),
        (f" compute {PID} 0\n managed {PID} 3000", {"part_mib": 5000}, None, None, "up to 4.9"),
        (f" compute {PID} 300\n managed {PID} 100", {"part_mib": 5000}, 300, False, "0.3 of 4.9"),
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
