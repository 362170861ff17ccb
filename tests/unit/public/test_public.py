"""The functions for other programs, such as the JupyterLab extension."""

from __future__ import annotations

import os

from reserve_gpu import public
from tests.support.holders import a_holder


def test_kernel_of_a_holder() -> None:
    """A holder belongs to the kernel with its pid, or else to the kernel that has started it."""
    holder, pid, above = a_holder(os.getpid(), seen=True), os.getpid(), os.getppid()
    assert public.is_own(holder)
    assert public.kernel_of(holder, {above: "above", pid: "this"}) == "this"
    assert public.kernel_of(holder, {above: "above", "kernel.json": "another"}) == "above"
    assert public.kernel_of(holder, {}) is None
    assert not public.is_own(a_holder(os.getpid()))  # only its record says so
