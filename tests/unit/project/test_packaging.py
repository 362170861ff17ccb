"""The wheel that pip builds from a checkout, and what `python -m build` makes to be published."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

from tests.support.packaging import modules

CHECKOUT = Path(__file__).resolve().parents[3]


def test_no_folder_is_left_out() -> None:
    """Every folder of modules is a package: setuptools puts no other into the wheel."""
    for name in modules():
        assert (CHECKOUT / name).with_name("__init__.py").exists(), name


def test_entry_point() -> None:
    """The command `reserve-gpu` is a function that is there."""
    text = (CHECKOUT / "pyproject.toml").read_text()
    ((module, name),) = re.findall(r'^reserve-gpu = "(.+):(.+)"$', text, re.MULTILINE)
    assert callable(getattr(import_module(module), name))
