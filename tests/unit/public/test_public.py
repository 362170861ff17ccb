"""What other programs may import: the extension for JupyterLab builds on it."""

from __future__ import annotations

import os

from reserve_gpu import public
from tests.support.holders import a_holder


def test_the_nearest_kernel_has_a_holder() -> None:
    """A holder is the kernel with its pid, else the one that has started it, else none of them."""
    holder, pid, above = a_holder(os.getpid(), seen=True), os.getpid(), os.getppid()
    assert public.is_own(holder)
    assert public.kernel_of(holder, {above: "above", pid: "this"}) == "this"
    assert public.kernel_of(holder, {above: "above", "kernel.json": "another"}) == "above"
    assert public.kernel_of(holder, {}) is None
    assert not public.is_own(a_holder(os.getpid()))  # by its record's word alone
