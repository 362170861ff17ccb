"""What a notebook says whose GPU was released from elsewhere."""

from __future__ import annotations

import os
import time

import pytest

from reserve_gpu.features.remote_requests.handler import released_by
from reserve_gpu.model.devices import Device
from reserve_gpu.system import procfs

GPU0, GPU1 = Device(0, "GPU-a"), Device(1, "GPU-b")


@pytest.mark.parametrize(
    ("user", "text"),
    [
        (procfs.user_name(os.geteuid()), "You released GPU0 and GPU1 at 18:00 with reserve-gpu"),
        ("nobody\x1b", "nobody\ufffd released GPU0 and GPU1 at 18:00 with reserve-gpu"),
    ],
)
def test_who_has_released_it(user: str, text: str) -> None:
    """Who has released a GPU from elsewhere is called you, another one by their name."""
    at = time.mktime((2026, 11, 20, 18, 0, 0, 0, 0, -1))
    said = released_by((GPU0, GPU1), user, at)
    assert said == f"{text} release. To get another one:\n%reserve_gpu"
