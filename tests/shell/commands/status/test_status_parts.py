"""The status of GPUs in parts: what each holder was promised and uses, and what is available."""

from __future__ import annotations

import json
import os
import re
from typing import TYPE_CHECKING

import pytest

import reserve_gpu
from tests.support.status import devices, parts_of

if TYPE_CHECKING:
    from tests.support.here import Here


def test_the_greater_of_promise_and_use_is_not_available(here: Here) -> None:
    here.write("gpu\n memory 40960\n reserved 500\ngpu\n memory 40960\n used 1000")
    with here.rival(part_mib=10240):
        first, second = devices()
        assert parts_of(first) == [(10240, 0, False)]
        assert first["memory_promisable_mib"] == 40960 - 500 - 10240
        assert (second["state"], second["memory_promisable_mib"]) == ("free", 39960)
        here.write(f"gpu\n memory 40960\n reserved 500\n compute {os.getpid()} 12000")
        (first,) = devices()
        assert parts_of(first) == [(10240, 12000, True)]
        assert first["memory_promisable_mib"] == 40960 - 500 - 12000
        assert (first["state"], first["is_used_without_reservation"]) == ("reserved", False)
        assert " 11.7 of 10.0 GiB: over" in str(reserve_gpu.status())


@pytest.mark.parametrize(
    "size", [9e8, float("nan"), -5, "10", 10**400], ids=lambda size: str(size)[:9]
)
def test_an_invalid_size_in_a_record_affects_one_device(here: Here, size: object) -> None:
    here.write("gpu\ngpu")
    with here.rival(part_mib=size):
        status = reserve_gpu.status()
        device, other = status.to_dict()["devices"]
        assert 0 <= device["memory_promisable_mib"] <= 8192
        assert other["memory_promisable_mib"] == 8192
        assert json.dumps(status.to_dict(), allow_nan=False)
        assert str(status).count("rival.ipynb") == 1
        assert len(re.findall("[\u2588\u2592]", str(status).splitlines()[3])) <= 6
