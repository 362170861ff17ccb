"""Dask workers, each with a GPU of its own: real schedulers, nannies and workers."""

from __future__ import annotations

import sys
from importlib import import_module

import pytest


def test_without_dask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Dask is missing, one line tells how to get it."""
    monkeypatch.setitem(sys.modules, "distributed", None)
    monkeypatch.delitem(sys.modules, "reserve_gpu.dask", raising=False)
    with pytest.raises(ImportError) as caught:
        import_module("reserve_gpu.dask")
    command = f"{sys.executable} -m pip install distributed"
    assert str(caught.value) == f"reserve_gpu.dask needs Dask: {command}"
    assert caught.value.__suppress_context__
