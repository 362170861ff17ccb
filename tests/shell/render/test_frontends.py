"""Hints: what is said to be typed can be typed as it stands, where it stands."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import pytest

from reserve_gpu.model import errors
from reserve_gpu.model.devices import State, Usage
from reserve_gpu.model.holders import DeviceStatus
from reserve_gpu.render.status_view import Status
from tests.support.holders import a_holder

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.here import Here

from tests.support.frontends import GPU0

OWN_ELSEWHERE = DeviceStatus(
    GPU0, State.RESERVED, Usage(), holders=(a_holder(4321, "alice", "old.ipynb", seen=True),)
)
# What to type in a shell, by what shows it.
SHELL_LINES: dict[str, Callable[[], object]] = {
    "reserve-gpu release 4321": lambda: Status((OWN_ELSEWHERE,), user="alice"),
    f"{sys.executable} -m pip install": lambda: errors.install_command("distributed"),
}


@pytest.mark.parametrize("typed", SHELL_LINES)
def test_a_line_for_a_shell_is_typed_behind_a_sign_in_a_cell(here: Here, typed: str) -> None:
    """What a notebook says to type in a shell stands behind `!` there, and bare in a shell."""
    show = SHELL_LINES[typed]
    assert typed in str(show())
    assert f"!{typed}" not in str(show())
    here.shell()
    assert f"!{typed}" in str(show())


def test_a_refusal_is_typed_in_a_cell(here: Here) -> None:
    """A refusal of the magic and of Python says `!reserve-gpu` in a cell, as text and as HTML."""
    with here.rival(notebook="old.ipynb"), here.rival("1"):
        shell = here.shell(is_notebook=True)
        for line in ("%reserve_gpu", "import reserve_gpu; reserve_gpu.reserve()"):
            for form in ("text/plain", "text/html"):
                shown = shell.run(line).values[0][form]
                typed = f"!reserve-gpu release {os.getpid()}"
                assert shown.count("reserve-gpu ") == shown.count(typed)
                assert "!reserve-gpu" in shown
