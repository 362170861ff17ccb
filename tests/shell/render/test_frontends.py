"""Commands for a shell start with `!` in a cell."""

from __future__ import annotations

import os
import shlex
import sys
from typing import TYPE_CHECKING

import pytest

from reserve_gpu.model import errors
from reserve_gpu.render.status_view import Status
from tests.support.pictures import RESERVED

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.here import Here

# Commands, and what shows them.
COMMANDS: dict[str, Callable[[], object]] = {
    "reserve-gpu release 4321000": lambda: Status((RESERVED,), user="alice"),
    f"{shlex.quote(sys.executable)} -m pip install six": lambda: errors.install_command("six"),
}


@pytest.mark.parametrize("command", COMMANDS, ids=["release", "install"])
def test_command_starts_with_an_exclamation_mark_only_in_a_cell(here: Here, command: str) -> None:
    show = COMMANDS[command]
    assert command in str(show())
    assert f"!{command}" not in str(show())
    here.shell()
    assert f"!{command}" in str(show())


def test_refusal_in_a_cell(here: Here) -> None:
    """A refusal suggests `!reserve-gpu` in a cell, as text and as HTML."""
    with here.rival(notebook="old.ipynb"), here.rival("1"):
        shell = here.shell(is_notebook=True)
        for line in ("%reserve_gpu", "import reserve_gpu; reserve_gpu.reserve()"):
            for form in ("text/plain", "text/html"):
                shown = shell.run(line).values[0][form]
                typed = f"!reserve-gpu release {os.getpid()}"
                assert shown.count("reserve-gpu ") == shown.count(typed)
                assert "!reserve-gpu" in shown
