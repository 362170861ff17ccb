"""The package is updated or removed while a kernel that has loaded it goes on."""

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

REMOVED = (
    "The package reserve_gpu was removed while this kernel was running. Install it again and "
    "restart the kernel. The GPUs that it holds stay reserved until then."
)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Return a copy of the package, which a kernel with PYTHONPATH loads."""
    folder = tmp_path / "site" / "reserve_gpu"
    source = Path(reserve_gpu.__file__).parent
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture
def kernel(here: Here, copy: Path) -> Iterator[Kernel]:
    with here.kernel(PYTHONPATH=str(copy.parent)) as kernel:
        assert kernel.run("import reserve_gpu; print(reserve_gpu.__file__)").stdout == (
            f"{copy / '__init__.py'}\n"
        )
        yield kernel


def test_removed_before_the_first_use(kernel: Kernel, copy: Path) -> None:
    """%reserve_gpu without its package is one line, and other cells go on."""
    shutil.rmtree(copy)
    assert kernel.run("%reserve_gpu").traceback[-1].endswith(REMOVED)
    assert "Traceback" not in kernel.run("%reserve_gpu --status").all
    assert kernel.run("1 + 1").all.strip() == "2"


def test_removed_before_a_refusal_is_displayed(kernel: Kernel, copy: Path, here: Here) -> None:
    """A refusal whose table can't be loaded is one line that says why."""
    here.write("gpu\n used 6000\n")
    code = (
        "try: reserve_gpu.reserve()\nexcept reserve_gpu.NoFreeDeviceError as error: refusal = error"
    )
    assert not kernel.run(code).error
    shutil.rmtree(copy)
    told = kernel.run("print(refusal)").stdout
    assert told.startswith("No device is available. The devices can't be displayed: ")
    assert told.count("\n") == 1


def test_removed_while_a_gpu_is_held(kernel: Kernel, copy: Path, here: Here) -> None:
    """A kernel keeps its GPU without the package, and its cells say nothing."""
    assert not kernel.run("%reserve_gpu 1").error
    shutil.rmtree(copy)
    assert kernel.run("1 + 1").all.strip() == "2"
    assert "CUDA_VISIBLE_DEVICES = '1'" in kernel.run("%reserve_gpu").stdout
    assert "Traceback" not in kernel.run("%reserve_gpu --status").all
    with here.child() as child:
        assert child.reserve("1").error == "NoFreeDeviceError"


def test_updated(kernel: Kernel, copy: Path) -> None:
    """A package of which another version was installed is told from one with an error."""
    (copy / "ipython/magic.py").write_text("raise ImportError('of another version')\n")
    assert "of another version" in kernel.run("%reserve_gpu").all
    init = copy / "__init__.py"
    text = init.read_text()
    init.unlink()
    init.write_text(text.replace('"2.0.0"', '"9.0.0"'))
    told = kernel.run("%reserve_gpu")
    assert told.traceback[-1].endswith(
        "The package reserve_gpu was updated while this kernel was running. Restart the kernel. "
        "The GPUs that it holds stay reserved until then."
    )
    assert "Traceback" not in told.all


def test_python_without_its_package(kernel: Kernel, copy: Path) -> None:
    """A script whose package was removed reads what to do in the last line."""
    shutil.rmtree(copy)
    told = kernel.run("reserve_gpu.reserve()").traceback[-1]
    assert "The package reserve_gpu was removed while this process was running." in told
