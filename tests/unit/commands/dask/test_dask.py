"""The plugin for Dask without Dask."""

from __future__ import annotations

import sys
from importlib import import_module

import pytest


def test_without_dask_the_error_shows_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    monkeypatch.delitem(sys.modules, "reserve_gpu.dask", raising=False)
    with pytest.raises(ImportError) as caught:
        import_module("reserve_gpu.dask")
    assert str(caught.value).endswith(f"{sys.executable} -m pip install distributed")
    assert caught.value.__suppress_context__
