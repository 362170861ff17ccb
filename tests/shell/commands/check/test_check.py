"""%reserve_gpu --check: what each framework sees, asked of real child processes.

Each framework costs a child, so most facts are shown on one or two; the layer `full` has all.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

import reserve_gpu
from reserve_gpu.commands.check.probes import is_installed
from tests.support.frameworks import KEYS, NAMES, installed

if TYPE_CHECKING:
    from tests.support.here import Here

from tests.support.check import TROUBLES, all_are, check, check_troubles, left_behind, states

DRIVER = "CUDA driver"

probing = pytest.mark.process  # it starts a child for the driver and for each framework


@probing
@pytest.mark.full
@pytest.mark.parametrize("what", TROUBLES)
def test_trouble(here: Here, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """All frameworks that can get into a trouble say so and why; those beside them fit."""
    troubles = dict.fromkeys(TROUBLES[what][2], what)
    installed(monkeypatch, *KEYS, **troubles)
    check_troubles(troubles)


def test_a_folder_is_no_framework(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder called like a framework, beside the notebook, is not taken for it."""
    monkeypatch.syspath_prepend("")
    (here.folder / "a_folder").mkdir()
    (here.folder / "a_module.py").touch()
    assert not is_installed("a_folder")
    assert is_installed("a_module")


def test_no_process_can_be_started(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no process can be started one line says so."""
    installed(monkeypatch, "torch")
    monkeypatch.setattr(sys, "executable", str(here.folder / "nowhere"))
    with pytest.raises(reserve_gpu.ReserveGPUError) as caught:
        reserve_gpu.check()
    text = str(caught.value)
    assert text.startswith("The check can't start a process: [Errno 2]")
    assert "\n" not in text


@probing
@pytest.mark.full
def test_a_hanging_framework(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that hangs is killed at the limit with all that it started; the others' rows stand."""
    installed(monkeypatch, *KEYS, torch="hangs", cupy="hangs")
    reserve_gpu.reserve()
    with left_behind(here):
        rows = check(limit_s=8)
    assert states(rows) == {**all_are("fits", *NAMES), "PyTorch": "fails", "CuPy": "fails"}
    assert rows["PyTorch"]["reason"] == "no answer within 8 s while being imported"


def test_takes_no_names(here: Here) -> None:
    """--check takes no names of GPUs, and says so in one line."""
    cell = here.shell().run("%reserve_gpu --check 1")
    said = cell.stderr or "\n".join(cell.traceback)
    assert (
        said.strip() == "UsageError: --check checks the GPUs of this kernel and takes no GPU names."
    )


@pytest.mark.full
@pytest.mark.needs("frameworks")
def test_real_builds_for_the_cpu(here: Here) -> None:
    """The real PyTorch and JAX of PyPI for the CPU say so; the real Numba sees the reserved GPU."""
    reserve_gpu.reserve("1")
    rows = check()
    for name in ("PyTorch", "JAX"):
        assert rows[name]["state"] == "no device"
        assert "a CPU build" in rows[name]["reason"]
        assert rows[name]["is_built_for_cuda"] is False
    assert rows["PyTorch"]["version"].startswith("2.13.0")
    assert [device["label"] for device in rows["Numba"]["sees"]] == ["GPU1"]
    assert rows["Numba"]["state"] == "fits"
