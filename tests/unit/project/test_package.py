"""The public names of the package, its folders, and its entry point."""

from __future__ import annotations

import inspect
import re

import reserve_gpu
from reserve_gpu import public
from tests.support.machine import ROOT

EXTENSION = ROOT / "labextension" / "jupyterlab_reserve_gpu"


def test_every_exported_name_exists() -> None:
    """Each name in `__all__` exists, and any other name raises AttributeError."""
    assert all(getattr(reserve_gpu, name) for name in reserve_gpu.__all__)
    assert set(reserve_gpu.__all__) <= set(dir(reserve_gpu))
    assert not hasattr(reserve_gpu, "nonsense")


def test_extension_uses_only_public_functions() -> None:
    """The JupyterLab extension calls all of `public` except `html`, and only exported names."""
    text = "\n".join(path.read_text() for path in EXTENSION.glob("*.py"))
    functions = {
        name
        for name, function in inspect.getmembers(public, inspect.isfunction)
        if function.__module__ == public.__name__
    }
    assert set(re.findall(r"\bpublic\.(\w+)", text)) == functions - {"html"}  # for other programs
    assert set(re.findall(r"\breserve_gpu\.(\w+)", text)) <= set(reserve_gpu.__all__)
