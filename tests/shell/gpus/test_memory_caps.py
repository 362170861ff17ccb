"""What keeps frameworks within a part of a GPU: the variables, and lines for people to type."""

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


# -- with a reservation ----------------------------------------------------------------------------


def _set() -> dict[str, str]:
    now = cuda_environment.read(cuda_environment.CAPS)
    return {name: value for name, value in now.items() if value is not None}


def test_set_and_given_back(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caps come with a part, change with its size, and go with it; the user's own stays."""
    monkeypatch.setenv(TORCH_ALLOCATOR, "expandable_segments:True")
    monkeypatch.setenv(CUPY_LIMIT, "")
    before = _set()
    reserve_gpu.reserve(memory="3GB")
    assert _set()[CUPY_LIMIT] == str(int(3e9) - 768 * MIB)
    reserve_gpu.reserve(memory="2GB")
    assert _set()[CUPY_LIMIT] == str(int(2e9) - 768 * MIB)
    reserve_gpu.release()
    assert _set() == before


def test_one_fraction_for_gpus_of_different_sizes(here: Here) -> None:
    """Where one number has to do for several GPUs it is that of the largest."""
    here.write("gpu\n memory 8192\ngpu\n memory 16384\n")
    reserve_gpu.reserve("0,1", memory="4864MiB")
    assert os.environ[XLA_FRACTION] == "0.250000"


def test_a_users_cap_is_said(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has set a cap is told that it stands."""
    monkeypatch.setenv(CUPY_LIMIT, "1000")
    said = "CUPY_GPU_MEMORY_LIMIT is already set"
    with pytest.warns(reserve_gpu.ReserveGPUWarning, match=said) as caught:
        reserve_gpu.reserve(memory="3GB")
    assert {each.filename for each in caught} == {__file__}  # where it was asked for
    assert os.environ[CUPY_LIMIT] == "1000"


def test_a_cap_that_the_user_changes_is_theirs(here: Here) -> None:
    """A cap that the user sets after the reservation stays over the next call and the release."""
    reserve_gpu.reserve(memory="3GB")
    os.environ[XLA_FRACTION] = "0.01"
    with pytest.warns(reserve_gpu.ReserveGPUWarning, match=XLA_FRACTION):
        reserve_gpu.reserve(memory="2GB")
    assert os.environ[XLA_FRACTION] == "0.01"
    reserve_gpu.release()
    assert os.environ[XLA_FRACTION] == "0.01"
    del os.environ[XLA_FRACTION]


def test_caps_that_were_changed_are_mended(here: Here) -> None:
    """Asked for the same again, caps that are gone are set; what is said to be set is there.

    JAX raises where both of its names are set, so the user's own goes before.
    """
    first = reserve_gpu.reserve(memory="3GB")
    del os.environ[CUPY_LIMIT]
    os.environ[OLD_XLA_FRACTION] = "0.01"
    os.environ[TORCH_ALLOCATOR] = "expandable_segments:True"
    with pytest.warns(reserve_gpu.ReserveGPUWarning, match=OLD_XLA_FRACTION):
        assert reserve_gpu.reserve(memory="3GB") is first
    assert _set()[CUPY_LIMIT] == str(int(3e9) - 768 * MIB)
    assert XLA_FRACTION not in _set()
    assert {**os.environ, **first.environ} == os.environ
    assert XLA_FRACTION not in str(first)
    assert reserve_gpu.reserve(memory="3GB") is first
    reserve_gpu.release()
    assert _set() == {OLD_XLA_FRACTION: "0.01", TORCH_ALLOCATOR: "expandable_segments:True"}
    del os.environ[OLD_XLA_FRACTION], os.environ[TORCH_ALLOCATOR]


def test_a_small_part(here: Here) -> None:
    """Of a part that a CUDA context might fill half is the cap."""
    reserve_gpu.reserve(memory="512MiB")
    assert _set()[CUPY_LIMIT] == str(256 * MIB)


def test_an_allowance_that_is_no_size(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """A setting that is no size is said before anything is reserved or changed."""
    monkeypatch.setenv("RESERVE_GPU_CONTEXT_MEMORY", "much")
    before = dict(os.environ)
    with pytest.raises(errors.RequestError, match="CONTEXT_MEMORY: 'much' is not a valid size"):
        reserve_gpu.reserve(memory="2GB")
    assert (dict(os.environ), held(here)) == (before, [])


def test_a_whole_gpu_has_no_cap(here: Here) -> None:
    """Without a size no cap is set."""
    reservation = reserve_gpu.reserve()
    assert _set() == {}
    assert reservation.environ.keys() == {*cuda_environment.CUDA}


@pytest.mark.parametrize("is_notebook", [True, False], ids=["notebook", "terminal"])
def test_a_line_to_type_is_shown(here: Here, packages: Any, *, is_notebook: bool) -> None:
    """What is to be typed stands on a line of its own, in a notebook and in a terminal."""
    path = [*sys.path]
    packages(TENSORFLOW)
    sys.path += path
    shell = here.shell(is_notebook=is_notebook)
    cell = shell.run("%reserve_gpu --memory 3GB")
    assert cell.error is None
    shown = cell.values[0]["text/html"] if is_notebook else cell.stderr
    start = "<div>" if is_notebook else "\n"
    end = "</div>" if is_notebook else ""
    assert f"right after importing it:{end}{start}for gpu in tf." in shown
    assert "memory_limit=2093)" in shown
