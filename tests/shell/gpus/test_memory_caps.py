"""Tests of the memory limits that a reservation of a part sets and restores."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import pytest

import reserve_gpu
from reserve_gpu.gpus import cuda_environment
from reserve_gpu.gpus.cuda_environment import (
    CUPY_LIMIT,
    OLD_XLA_FRACTION,
    TORCH_ALLOCATOR,
    XLA_FRACTION,
)
from reserve_gpu.model import errors
from reserve_gpu.model.devices import MIB
from tests.support.locked import held

if TYPE_CHECKING:
    from tests.support.here import Here

TENSORFLOW = "tensorflow-2.19.0.dist-info"


def limits() -> dict[str, str]:
    """Return the memory limits that are set in this process."""
    now = cuda_environment.read(cuda_environment.CAPS)
    return {name: value for name, value in now.items() if value is not None}


def test_limits_of_a_part(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits are set for a part, change with its size, and are restored by a release."""
    monkeypatch.setenv(TORCH_ALLOCATOR, "expandable_segments:True")
    monkeypatch.setenv(CUPY_LIMIT, "")
    before = limits()
    reserve_gpu.reserve(memory="3GB")
    assert limits()[CUPY_LIMIT] == str(int(3e9) - 768 * MIB)
    reserve_gpu.reserve(memory="2GB")
    assert limits()[CUPY_LIMIT] == str(int(2e9) - 768 * MIB)
    reserve_gpu.release()
    assert limits() == before


def test_one_fraction_for_gpus_of_different_sizes(here: Here) -> None:
    """The fraction for several GPUs is that of the largest one."""
    here.write("gpu\n memory 8192\ngpu\n memory 16384\n")
    reserve_gpu.reserve("0,1", memory="4864MiB")
    assert os.environ[XLA_FRACTION] == "0.250000"


def test_a_limit_of_the_user(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit that the user has set is kept, with a warning at the caller's line."""
    monkeypatch.setenv(CUPY_LIMIT, "1000")
    with pytest.warns(reserve_gpu.ReserveGPUWarning, match=CUPY_LIMIT) as caught:
        reserve_gpu.reserve(memory="3GB")
    assert {each.filename for each in caught} == {__file__}
    assert os.environ[CUPY_LIMIT] == "1000"


def test_a_limit_that_the_user_changes(here: Here) -> None:
    """A limit that the user sets after a reservation is kept by later calls."""
    reserve_gpu.reserve(memory="3GB")
    os.environ[XLA_FRACTION] = "0.01"
    with pytest.warns(reserve_gpu.ReserveGPUWarning, match=XLA_FRACTION):
        reserve_gpu.reserve(memory="2GB")
    assert os.environ[XLA_FRACTION] == "0.01"
    reserve_gpu.release()
    assert os.environ[XLA_FRACTION] == "0.01"
    del os.environ[XLA_FRACTION]


def test_limits_are_set_again(here: Here) -> None:
    """A repeated reservation sets missing limits, but keeps limits that the user has set since.

    JAX raises an error if both of its variables are set.
    """
    first = reserve_gpu.reserve(memory="3GB")
    del os.environ[CUPY_LIMIT]
    os.environ[OLD_XLA_FRACTION] = "0.01"
    os.environ[TORCH_ALLOCATOR] = "expandable_segments:True"
    with pytest.warns(reserve_gpu.ReserveGPUWarning, match=OLD_XLA_FRACTION):
        assert reserve_gpu.reserve(memory="3GB") is first
    assert limits()[CUPY_LIMIT] == str(int(3e9) - 768 * MIB)
    assert XLA_FRACTION not in limits()
    assert {**os.environ, **first.environ} == os.environ
    assert XLA_FRACTION not in str(first)
    assert reserve_gpu.reserve(memory="3GB") is first
    reserve_gpu.release()
    assert limits() == {OLD_XLA_FRACTION: "0.01", TORCH_ALLOCATOR: "expandable_segments:True"}
    del os.environ[OLD_XLA_FRACTION], os.environ[TORCH_ALLOCATOR]


def test_an_invalid_allowance(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """An invalid allowance is refused without any change."""
    monkeypatch.setenv("RESERVE_GPU_CONTEXT_MEMORY", "much")
    before = dict(os.environ)
    with pytest.raises(errors.RequestError, match="RESERVE_GPU_CONTEXT_MEMORY"):
        reserve_gpu.reserve(memory="2GB")
    assert (dict(os.environ), held(here)) == (before, [])


def test_a_whole_gpu_has_no_limit(here: Here) -> None:
    """A whole GPU has no memory limit."""
    reservation = reserve_gpu.reserve()
    assert limits() == {}
    assert reservation.environ.keys() == {*cuda_environment.CUDA}


@pytest.mark.parametrize("is_notebook", [True, False], ids=["notebook", "terminal"])
def test_the_line_of_code_is_shown(here: Here, packages: Any, *, is_notebook: bool) -> None:
    """The line of code to type is on a line of its own, in a notebook and in a terminal."""
    path = [*sys.path]
    packages(TENSORFLOW)
    sys.path += path
    shell = here.shell(is_notebook=is_notebook)
    cell = shell.run("%reserve_gpu --memory 3GB")
    assert cell.error is None
    shown = cell.values[0]["text/html"] if is_notebook else cell.stderr
    start = "<div>" if is_notebook else "\n"
    end = "</div>" if is_notebook else ""
    assert f"{end}{start}for gpu in tf." in shown
    assert "memory_limit=2093)" in shown
