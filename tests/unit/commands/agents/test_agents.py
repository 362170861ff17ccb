"""`run --json`, `why`, `skill`, and JSON where something can't be had."""

from __future__ import annotations

import pkgutil
from contextlib import suppress
from importlib import import_module

import reserve_gpu
from reserve_gpu.model.errors import MutexHeldError, ReserveGPUError
from tests.support.machine import ROOT

PAGE = (ROOT / "docs" / "formats.md").read_text()


def all_errors(kind: type[ReserveGPUError] = ReserveGPUError) -> list[type[ReserveGPUError]]:
    """Return the kinds of errors, with the one of the command line."""
    return [each for sub in kind.__subclasses__() for each in (sub, *all_errors(sub))]


def test_each_reason_is_documented() -> None:
    """Each error has a reason of its own, which the page has with its exit code."""
    for found in pkgutil.walk_packages(reserve_gpu.__path__, "reserve_gpu."):
        with suppress(ImportError):  # of an extra that is not there
            import_module(found.name)
    for kind in (each for each in all_errors() if each.__module__.startswith("reserve_gpu.")):
        error = kind("nothing")
        values = error.to_dict()
        rows = [line.split("|") for line in PAGE.splitlines() if line.count("|") == 4]
        (code,) = (codes for _, names, codes, *_ in rows if f"`{values['reason']}`" in names)
        assert str(values["exit_code"]) in code
        assert (values["retry_after_s"] is None, values["next"]) == (kind is not MutexHeldError, [])
