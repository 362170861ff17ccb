"""A child process closes all its descriptors, or uses them up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from reserve_gpu.model.errors import TOO_MANY_FILES

if TYPE_CHECKING:
    from tests.support.machine import Machine

# Code that loads the package without or with a first reservation.
BEFORE = ["reserve_gpu.reserve", "reserve_gpu.reserve(); reserve_gpu.release()"]


def assert_all_are_told(machine: Machine, before: str, options: str) -> None:
    """Check that requests fail with the same error until there are enough free descriptors.

    Args:
        machine: The machine on which the process runs.
        before: Code that the process runs before its descriptors are used up.
        options: The arguments of the requests.
    """
    done = machine.python(
        "import os, resource, reserve_gpu\n"
        "del os.environ['STAND_IN_LOG']\n"
        f"{before}\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
        "taken = [os.open('/dev/null', os.O_RDONLY) for _ in range(64 - 3)]\n"
        "for left in range(60):\n"
        f"    try: reserve_gpu.reserve({options})\n"
        "    except reserve_gpu.ReserveGPUError as error: print(error)\n"
        "    else: break\n"
        "    assert 'CUDA_VISIBLE_DEVICES' not in os.environ\n"
        "    os.close(taken.pop())\n"
    )
    assert done.stderr == ""
    assert {*done.stdout.splitlines()} == {TOO_MANY_FILES}


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("options", ["", "memory='1GB'"])
def test_a_request_without_free_descriptors_changes_nothing(
    machine: Machine, before: str, options: str
) -> None:
    """The error is the same wherever the missing descriptor is noticed first."""
    assert_all_are_told(machine, before, options)
