"""Tests of a package that is updated or removed while a kernel that has loaded it runs."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import reserve_gpu

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.here import Here
    from tests.support.machine import Kernel

is_editable = any("Editable" in str(finder) for finder in sys.meta_path)
pytestmark = [
    pytest.mark.ipython,
    pytest.mark.skipif(is_editable, reason="an editable installation finds its modules elsewhere"),
]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Copy the package to a folder from which a kernel loads it."""
    folder = tmp_path / "site" / "reserve_gpu"
    source = Path(reserve_gpu.__file__).parent
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture
def kernel(here: Here, package: Path) -> Iterator[Kernel]:
    """Start a kernel that has loaded the copy of the package."""
    with here.kernel(PYTHONPATH=str(package.parent)) as kernel:
        cell = kernel.run("import reserve_gpu; print(reserve_gpu.__file__)")
        assert cell.stdout == f"{package / '__init__.py'}\n"
        yield kernel


def test_removed_before_the_first_use(kernel: Kernel, package: Path) -> None:
    """Without its package, the magic and the API fail with one line, and other cells work."""
    shutil.rmtree(package)
    for code in ("%reserve_gpu", "reserve_gpu.reserve()"):
        assert "The package reserve_gpu was removed" in kernel.run(code).traceback[-1]
    assert "Traceback" not in kernel.run("%reserve_gpu --status").all
    assert kernel.run("1 + 1").all.strip() == "2"


def test_removed_before_a_refusal_is_displayed(kernel: Kernel, package: Path, here: Here) -> None:
    """A refusal whose table can't be loaded is displayed as one line."""
    here.write("gpu\n used 6000\n")
    code = (
        "try: reserve_gpu.reserve()\nexcept reserve_gpu.NoFreeDeviceError as error: refusal = error"
    )
    assert not kernel.run(code).error
    shutil.rmtree(package)
    text = kernel.run("print(refusal)").stdout
    assert text.startswith("No device is available.")
    assert text.count("\n") == 1


def test_removed_while_a_gpu_is_held(kernel: Kernel, package: Path, here: Here) -> None:
    """A kernel keeps its GPU without the package, and its cells print nothing else."""
    assert not kernel.run("%reserve_gpu 1").error
    shutil.rmtree(package)
    assert kernel.run("1 + 1").all.strip() == "2"
    assert "CUDA_VISIBLE_DEVICES = '1'" in kernel.run("%reserve_gpu").stdout
    with here.child() as child:
        assert child.reserve("1").error == "NoFreeDeviceError"


def test_updated(kernel: Kernel, package: Path) -> None:
    """An import error is explained by an update only if the package's version has changed."""
    (package / "ipython/magic.py").write_text("raise ImportError('of another version')\n")
    assert "of another version" in kernel.run("%reserve_gpu").all
    init = package / "__init__.py"
    text = init.read_text()
    init.unlink()
    init.write_text(text.replace('"2.0.0"', '"9.0.0"'))
    cell = kernel.run("%reserve_gpu")
    assert "The package reserve_gpu was updated" in cell.traceback[-1]
    assert "Traceback" not in cell.all
