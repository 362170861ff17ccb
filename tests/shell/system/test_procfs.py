"""Tests of the notebooks, commands and directories of holders."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import reserve_gpu
from reserve_gpu.render import phrases

if TYPE_CHECKING:
    import pytest

    from tests.support.here import Here


def test_a_notebook(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook's holder is shown with its file name, and also has a command."""
    monkeypatch.setenv("JPY_SESSION_NAME", "/home/alice/train.ipynb")
    monkeypatch.setattr(sys, "orig_argv", ["/bin/python", "/bin/jupyter", "run"])
    reserve_gpu.reserve("0")
    (holder,) = reserve_gpu.status().rows[0].holders
    assert (holder.notebook, holder.record.who.command) == ("train.ipynb", "jupyter run")
    assert holder.record.who.cwd == str(here.folder)
    assert "train.ipynb" in phrases.holder(holder)
    assert "train.ipynb" in phrases.person(holder)


def test_a_record_of_an_older_version(here: Here) -> None:
    """The record of an older version has only a notebook, which may be a directory."""
    with here.rival(notebook="~/thesis"):
        (holder,) = reserve_gpu.status().rows[0].holders
    who = holder.record.who
    assert (holder.notebook, who.command, who.cwd) == ("~/thesis", None, None)
    assert "~/thesis" in phrases.holder(holder)
