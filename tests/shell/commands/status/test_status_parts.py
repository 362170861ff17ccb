"""Parts of GPUs in the status: what each sharer was promised and uses, and what is left."""

from __future__ import annotations

import json
import os
import re
from typing import TYPE_CHECKING, Any

import pytest

import reserve_gpu
from tests.support.locked import have
from tests.support.processes import own_name
from tests.support.reserving import of_gpu, refused
from tests.support.status import devices

if TYPE_CHECKING:
    from tests.support.here import Here

from tests.support.status_parts import numbers

ME = own_name()


def test_parts_and_what_is_left(here: Here) -> None:
    """Each sharer has its promise and its use; what is left is less the greater of the two."""
    here.write("gpu\n memory 40960\n reserved 500\ngpu\n memory 40960\n used 1000")
    with here.rival(part_mib=10240):
        first, second = devices()
        assert numbers(first) == [(10240, 0, False)]
        assert first["memory_promisable_mib"] == 40960 - 500 - 10240
        assert (second["state"], second["memory_promisable_mib"]) == ("free", 39960)
        here.write(f"gpu\n memory 40960\n reserved 500\n compute {os.getpid()} 12000")
        (first,) = devices()
        assert numbers(first) == [(10240, 12000, True)]
        assert first["memory_promisable_mib"] == 40960 - 500 - 12000
        assert (first["state"], first["is_used_without_reservation"]) == ("reserved", False)
        assert " 11.7 of 10.0 GiB: over, for " in str(reserve_gpu.status())
        assert "27.7 GiB still available" in str(reserve_gpu.status())


@pytest.mark.ipython
def test_the_part_that_a_refusal_offers(here: Here) -> None:
    """The line that a refusal offers reserves part of the shared GPU, and names no other GPU."""
    here.write("gpu\n memory 81920\ngpu\n memory 81920\ngpu\n memory 81920\n compute 4321000 9000")
    with here.rival("0"), here.rival("1", part_mib=48000):
        shell = here.shell()
        refusal = shell.run("%reserve_gpu")
        typed = "%reserve_gpu --memory 30GB"
        assert refusal.error == "NoFreeDeviceError"
        assert f"33.1 GiB of GPU1 is available now: {typed}\n" in refusal.shown
        granted = shell.run(typed)
    assert granted.stdout.startswith("Reserving GPU1: ")


@pytest.mark.parametrize("unit", ["GB", "MiB", "parsec", 3])
def test_a_promise_is_told_in_gib(here: Here, unit: object) -> None:
    """Whatever the unit that somebody has asked in, all of a picture is in GiB."""
    with here.rival(part_mib=1e10 / 2**20, part_unit=unit):
        assert " 0.0 of 9.3 GiB for " in str(reserve_gpu.status())


def test_who_uses_a_part_without_a_reservation(here: Here) -> None:
    """What strangers use of a GPU in parts is not left to promise, and is no sharer's."""
    here.write("gpu\n memory 40960\n compute 4321000 3000")
    with here.rival(part_mib=10240):
        (device,) = devices()
    assert numbers(device) == [(10240, 0, False)]
    assert device["memory_promisable_mib"] == 40960 - 10240 - 3000
    assert device["is_used_without_reservation"] is True


@pytest.mark.parametrize("about", [{}, {"part_mib": None}], ids=["whole", "an older version"])
def test_who_gave_no_size(here: Here, about: dict[str, Any]) -> None:
    """Of a GPU that somebody may use all of nothing can be promised; what they use is known.

    Older versions write lock files of sharers without a size.
    """
    here.write(f"gpu\n compute {os.getpid()} 300")
    with here.rival(**about):
        (device,) = devices()
    assert numbers(device) == [(None, 300, False)]
    assert device["memory_promisable_mib"] == 0


@pytest.mark.parametrize(
    "memory_limit_mib",
    [9e8, 1e-9, float("nan"), -5, "10", True, [7], 10**400],
    ids=lambda size: str(size)[:9],
)
def test_hostile_promises(here: Here, memory_limit_mib: object) -> None:
    """Whatever size a record claims, one device has one row, and nothing below zero is promised."""
    here.write("gpu\ngpu")
    with here.rival(part_mib=memory_limit_mib):
        status = reserve_gpu.status()
        device, other = status.to_dict()["devices"]
        assert 0 <= device["memory_promisable_mib"] <= 8192
        assert other["memory_promisable_mib"] == 8192
        assert json.loads(json.dumps(status.to_dict(), allow_nan=False))
        assert str(status).count("rival.ipynb") == 1
        assert 0 <= len(re.findall("[\u2588\u2592]", str(status).splitlines()[3])) <= 6
        assert status._repr_html_()


def test_parts_where_memory_can_not_be_read(here: Here) -> None:
    """Where a GPU does not say how much memory is in use, what is left to promise is not known."""
    here.write("gpu\nfail nvmlDeviceGetMemoryInfo 0 4\nfail nvmlDeviceGetMemoryInfo_v2 0 4")
    with here.rival(part_mib=1024):
        (device,) = devices()
        assert " 0.0 of 1.0 GiB for " in str(reserve_gpu.status())
    assert device["memory_promisable_mib"] is None


@pytest.mark.parametrize("memory_limit_mib", [1, 8192])
def test_a_size_in_the_lock_of_a_whole_gpu(here: Here, memory_limit_mib: float) -> None:
    """Who has the whole GPU has no part to exceed, whatever anybody wrote into that lock's file."""
    here.write(f"gpu\n compute {os.getpid()} 300")
    with have(here.locks / f"{here.uuid('0')}.lock", b'{"part_mib": %d}' % memory_limit_mib):
        (device,) = devices()
    assert numbers(device) == [(None, 300, False)]
    assert device["memory_promisable_mib"] == 0


def test_a_refusal_names_who_has_parts(here: Here) -> None:
    """Where a GPU is full the system's word for its sharers is told, and who else uses it."""
    here.write("gpu\n memory 40960\n compute 5000001 3000")
    with here.rival(part_mib=30720):
        text = refused(memory="20GiB")
    assert text.startswith("No GPU has room for 20.0 GiB: the most is 7.0 GiB on GPU0.\n")
    assert re.match(
        rf"full: {ME}, rival.ipynb \(pid {os.getpid()}\) 0.0 of 30.0 GiB ", of_gpu(text)
    )
    assert "without a reservation: pid 5000001, 7.0 GiB still available" in of_gpu(text)
    assert "\n7.0 GiB is available now: reserve_gpu.reserve(memory='7GiB')" in text
