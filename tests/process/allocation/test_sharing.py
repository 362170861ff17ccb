"""Sharing takes two: who may be on a GPU together, and how each of them is known."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from reserve_gpu.locks.holders import MOST_OF_ONE_USER
from tests.support.locked import have, locked, needs_root
from tests.support.reserving import got

if TYPE_CHECKING:
    from tests.support.here import Here
    from tests.support.machine import Machine

from tests.support.sharing import holders_of, sharers

BUSY = "gpu\n  compute 4321000 3500\n"
UID = os.geteuid()
WHOLE_OR_SHARED = pytest.mark.parametrize("memory", [None, "1GB"], ids=["whole", "shared"])


# -- how each is known -----------------------------------------------------------------------------


@pytest.fixture
def one(here: Here) -> Here:
    """Make a machine with one idle GPU, and the test process is on it."""
    here.write("gpu")
    return here


@pytest.mark.promise
def test_each_sharer_has_a_record_and_a_pid(machine: Machine) -> None:
    """Every sharer is listed with its own pid and note; one that is killed takes no other along."""
    machine.write("gpu")
    holders = "[(h.pid, h.note, h.confirmed) for h in reserve_gpu.status().rows[0].holders]"
    with machine.child() as first, machine.child() as second, machine.child() as third:
        for child, note in ((first, "one"), (second, "two")):
            assert child.reserve(f"memory='1GB', note={note!r}").value == "0"
        assert third.run(holders).value == [[first.pid, "one", True], [second.pid, "two", True]]
        assert f"pid {first.pid}" in third.reserve().text
        first.kill()
        assert third.run(holders).value == [[second.pid, "two", True]]
        assert f"pid {second.pid}" in third.reserve("0").text
        assert third.reserve("memory='1GB', note='three'").value == "0"
        both = [[second.pid, "two", True], [third.pid, "three", True]]  # its own first
        assert second.run(holders).value == both


# -- what else may stand there ---------------------------------------------------------------------


@needs_root
@pytest.mark.parametrize("state", ["locked", "not locked"])
def test_names_that_others_have_taken(one: Here, state: str) -> None:
    """Files of others that bear this user's number are passed by: they take no place of ours."""
    with ExitStack() as stack:
        for number in range(3):
            path = one.locks / f"{one.uuid('0')}.share-{UID}-{number}.lock"
            about = b'{"user": "root", "pid": 1, "part_mib": 1}'
            with have(path, about):
                os.chown(path, 65534, 65534)
            if state == "locked":
                stack.enter_context(have(path, about))
        assert got(memory="1GB") == "0"
        assert f"{one.uuid('0')}.share-{UID}-3.lock" in locked(one.locks)


@needs_root
def test_many_files_of_another_user(one: Here) -> None:
    """However many files a user makes, those of others still count."""
    with sharers(one, MOST_OF_ONE_USER + 6, 65534), sharers(one, 2):
        assert holders_of(one) == MOST_OF_ONE_USER + 2
