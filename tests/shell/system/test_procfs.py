"""What the system says of processes: their commands, notebooks and directories, and who holds."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import reserve_gpu
from reserve_gpu.render import phrases

if TYPE_CHECKING:
    import pytest

    from tests.support.here import Here


def test_a_notebook(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook is named by its file, and so it is shown; its command is known beside it."""
    monkeypatch.setenv("JPY_SESSION_NAME", "/home/alice/train.ipynb")
    monkeypatch.setattr(sys, "orig_argv", ["/bin/python", "/bin/jupyter", "run"])
    reserve_gpu.reserve("0")
    (holder,) = reserve_gpu.status().rows[0].holders
    assert (holder.notebook, holder.record.who.command) == ("train.ipynb", "jupyter run")
    assert holder.record.who.cwd == str(here.folder)
    assert ", train.ipynb (pid" in phrases.holder(holder)
    assert phrases.person(holder).endswith(" (train.ipynb)")


def test_a_record_of_an_older_version(here: Here) -> None:
    """A record that has the directory for a notebook, and nothing else, is read as it is."""
    with here.rival(notebook="~/thesis"):
        (holder,) = reserve_gpu.status().rows[0].holders
    assert (holder.notebook, holder.record.who.command, holder.record.who.cwd) == (
        "~/thesis",
        None,
        None,
    )
    assert ", ~/thesis (pid" in phrases.holder(holder)
