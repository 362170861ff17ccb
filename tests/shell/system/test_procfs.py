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
