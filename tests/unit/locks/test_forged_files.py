"""Forged files of another user in the lock directory change no decision."""

from __future__ import annotations

import json
import os
import re
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from reserve_gpu.model.holders import ProcessInfo, Record
from reserve_gpu.model.requests import Lease
from tests.support.locked import have
from tests.support.machine import ROOT
from tests.support.offers import Waiters
from tests.support.users import UUIDS

if TYPE_CHECKING:
    from pathlib import Path


# Every field that a record has in its file.
OF_PROMISE = ("note", "part_mib", "part_unit")
OF_WAITERS = ("asks", "needs", "wants", "behind")
FIELDS = (*ProcessInfo._fields, *Lease._fields, *Record._fields[3:], *OF_PROMISE, *OF_WAITERS)
VALUES = (0, 1e-9, 4e9, "GPU1", [UUIDS[1]])


def test_the_table_of_facts_is_complete() -> None:
    """docs/how.md says of every field of a record what decides in its place."""
    page = (ROOT / "docs" / "how.md").read_text()
    (table,) = re.findall(r"^\| decision .*?\n\n", page, re.MULTILINE | re.DOTALL)
    assert set(FIELDS) <= set(re.findall(r"`(\w+)`", table))


@pytest.mark.parametrize("field", FIELDS)
def test_a_forged_ticket_does_not_pass_earlier_waiters(tmp_path: Path, field: str) -> None:
    """A waiter cannot pass earlier waiters with any field of its own ticket."""
    with ExitStack() as stack:
        waiters = Waiters(tmp_path / "locks", stack)
        first = waiters.join()
        path = tmp_path / "locks" / f"queue-{os.geteuid()}-1.lock"
        for value in VALUES:
            with have(path, json.dumps({field: value}).encode()):
                os.utime(path, ns=(1, 1))
                with waiters.directory.mutex():
                    assert first.ahead() == []
