"""The documentation of the facts that other users can't forge."""

from __future__ import annotations

import re

from tests.support.locked import RECORD_FIELDS
from tests.support.machine import ROOT


def test_the_table_of_facts_has_every_field_of_a_record() -> None:
    """docs/how.md says for every field of a record which fact decides instead."""
    page = (ROOT / "docs" / "how.md").read_text()
    (table,) = re.findall(r"^\| decision .*?\n\n", page, re.MULTILINE | re.DOTALL)
    assert set(RECORD_FIELDS) <= set(re.findall(r"`(\w+)`", table))
