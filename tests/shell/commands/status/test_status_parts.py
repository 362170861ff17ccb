"""The status of GPUs in parts: what each holder was promised and uses, and what is available."""

from __future__ import annotations

import json
import os
import re
from typing import TYPE_CHECKING, Any

import pytest

import reserve_gpu
from tests.support.locked import have
from tests.support.reserving import refused
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


@pytest.mark.ipython
def test_the_command_that_a_refusal_suggests_reserves_a_part(here: Here) -> None:
    here.write("gpu\n memory 81920\ngpu\n memory 81920\ngpu\n memory 81920\n compute 4321000 9000")
    with here.rival("0"), here.rival("1", part_mib=48000):
        shell = here.shell()
        refusal = shell.run("%reserve_gpu")
        assert refusal.error == "NoFreeDeviceError"
        (command,) = re.findall(r"%reserve_gpu --memory \w+", refusal.shown)
        assert command.endswith(" 30GB")
        granted = shell.run(command)
    assert granted.stdout.startswith("Reserving GPU1: ")


@pytest.mark.parametrize("unit", ["GB", "parsec", 3])
def test_a_promise_in_any_unit_is_shown_in_gib(here: Here, unit: object) -> None:
    with here.rival(part_mib=1e10 / 2**20, part_unit=unit):
        assert " 0.0 of 9.3 GiB " in str(reserve_gpu.status())


def test_memory_used_without_a_reservation_is_not_available(here: Here) -> None:
    here.write("gpu\n memory 40960\n compute 4321000 3000")
    with here.rival(part_mib=10240):
        (device,) = devices()
        text = refused(memory="30GiB")
    assert parts_of(device) == [(10240, 0, False)]
    assert device["memory_promisable_mib"] == 40960 - 10240 - 3000
    assert device["is_used_without_reservation"] is True
    assert "pid 4321000" in text
    assert "rival.ipynb" in text
    assert "reserve_gpu.reserve(memory='27GiB')" in text


@pytest.mark.parametrize("about", [{}, {"part_mib": None}], ids=["whole", "an older version"])
def test_a_holder_without_a_size_leaves_nothing(here: Here, about: dict[str, Any]) -> None:
    """Older versions write lock files of sharers without a size."""
    here.write(f"gpu\n compute {os.getpid()} 300")
    with here.rival(**about):
        (device,) = devices()
    assert parts_of(device) == [(None, 300, False)]
    assert device["memory_promisable_mib"] == 0


@pytest.mark.parametrize(
    "size", [9e8, 1e-9, float("nan"), -5, "10", True, [7], 10**400], ids=lambda size: str(size)[:9]
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


def test_available_memory_is_unknown_if_memory_can_not_be_read(here: Here) -> None:
    here.write("gpu\nfail nvmlDeviceGetMemoryInfo 0 4\nfail nvmlDeviceGetMemoryInfo_v2 0 4")
    with here.rival(part_mib=1024):
        (device,) = devices()
    assert parts_of(device) == [(1024, 0, False)]
    assert device["memory_promisable_mib"] is None


def test_the_lock_of_a_whole_gpu_has_no_part(here: Here) -> None:
    """A size in its record is ignored."""
    here.write(f"gpu\n compute {os.getpid()} 300")
    with have(here.locks / f"{here.uuid('0')}.lock", b'{"part_mib": 1}'):
        (device,) = devices()
    assert parts_of(device) == [(None, 300, False)]
    assert device["memory_promisable_mib"] == 0
