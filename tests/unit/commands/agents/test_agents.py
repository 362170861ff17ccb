"""The reasons in refusals."""

from __future__ import annotations

import pkgutil
from contextlib import suppress
from importlib import import_module

import reserve_gpu
from reserve_gpu.model.errors import MutexHeldError, ReserveGPUError
from tests.support.agents import FORMATS


def subclasses(kind: type[ReserveGPUError]) -> list[type[ReserveGPUError]]:
    """Return all direct and indirect subclasses."""
    return [each for child in kind.__subclasses__() for each in (child, *subclasses(child))]


def test_the_reason_and_exit_code_of_each_error_are_documented() -> None:
    for module in pkgutil.walk_packages(reserve_gpu.__path__, "reserve_gpu."):
        with suppress(ImportError):  # a missing extra
            import_module(module.name)
    rows = [line.split("|") for line in FORMATS.splitlines() if line.count("|") == 4]
    for kind in subclasses(ReserveGPUError):
        if not kind.__module__.startswith("reserve_gpu."):
            continue
        values = kind("nothing").to_dict()
        (codes,) = (codes for _, names, codes, *_ in rows if f"`{values['reason']}`" in names)
        assert str(values["exit_code"]) in codes
        assert (values["retry_after_s"] is None, values["next"]) == (kind is not MutexHeldError, [])
