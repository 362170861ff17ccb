"""The administrator's file: which limit applies to which user, and invalid files."""

from __future__ import annotations

import re

import pytest

from reserve_gpu.allocation import admin_rules
from tests.support.machine import ROOT

FILE = "/etc/reserve_gpu.toml"
TABLES = """
[limits]
gpus = 2
idle = "2h"
after_cuda = "end"
[groups.students]
gpus = 1
[groups.phd]
gpus = 3
after_cuda = "end"
[groups.staff]
after_cuda = "warn"
[users.alice]
gpus = 0
"""


@pytest.mark.parametrize(
    ("user", "groups", "gpus", "after_cuda"),
    [
        ("bob", (), "gpus = 2 [limits]", 'after_cuda = "end" [limits]'),
        ("bob", ("students", "phd"), "gpus = 3 [groups.phd]", 'after_cuda = "end" [groups.phd]'),
        ("bob", ("phd", "staff"), "gpus = 3 [groups.phd]", 'after_cuda = "warn" [groups.staff]'),
        ("alice", ("phd",), "gpus = 0 [users.alice]", 'after_cuda = "end" [groups.phd]'),
    ],
)
def test_the_most_specific_table_sets_each_limit(
    user: str, groups: tuple[str, ...], gpus: str, after_cuda: str
) -> None:
    """A limit is the user's own, else the most generous of the user's groups, else the general."""
    rules = admin_rules.for_user(admin_rules.parse(TABLES.encode(), FILE), user, {user}, groups)
    assert rules.gpus
    assert rules.after_cuda
    assert rules.idle
    assert f"{rules.gpus.text} {rules.gpus.table}" == gpus
    assert f"{rules.after_cuda.text} {rules.after_cuda.table}" == after_cuda
    assert (rules.idle.value, rules.time, rules.problems) == (7200, None, ())


@pytest.mark.parametrize(
    ("added", "place"), [(b"time 24h", "(at line 3"), (b'message = "caf\xe9"', "0xe9")]
)
def test_an_invalid_toml_file_is_refused_with_the_place(added: bytes, place: str) -> None:
    with pytest.raises(admin_rules.MistakeError) as caught:
        admin_rules.parse(b"[limits]\ngpus = 2\n" + added + b"\n", FILE)
    assert str(caught.value).startswith(f"{FILE}: ")
    assert place in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "x = " + "[" * 20_000,
        "x = " + "9" * 50_000,
        "[limits]\n" + "".join(f"k{number} = 1\n" for number in range(3000)),
    ],
    ids=range(3),
)
def test_any_invalid_file_is_refused_in_one_short_line(text: str) -> None:
    with pytest.raises(admin_rules.MistakeError) as caught:
        admin_rules.parse(text.encode(), FILE)
    assert 0 < len(str(caught.value)) < 500
    assert str(caught.value).isprintable()


def test_the_documented_file_is_valid() -> None:
    """The file in docs/rules.md has no mistake, and its limits apply as the page says."""
    page = (ROOT / "docs" / "rules.md").read_text()
    (text,) = re.findall(r"reserve_gpu.toml <<'EOF'\n(.*?)^EOF$", page, re.DOTALL | re.MULTILINE)
    document = admin_rules.parse(text.encode(), FILE)
    alice = admin_rules.for_user(document, "alice", {"alice"}, {"students"})
    bob = admin_rules.for_user(document, "bob", {"bob"}, {"students"})
    assert [rules.gpus and rules.gpus.value for rules in (alice, bob)] == [4, 1]
    assert (alice.message, alice.drained) == ("Maintenance on Friday at 17:00", ("GPU-8f2a",))
