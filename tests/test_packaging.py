"""The wheel that pip builds from a checkout."""

from __future__ import annotations

import shutil
import subprocess
import sys
from email import message_from_bytes
from pathlib import Path
from zipfile import ZipFile

import pytest

CHECKOUT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    unwanted = shutil.ignore_patterns(".*", "__pycache__", "build", "*.egg-info")
    shutil.copytree(CHECKOUT, folder / "checkout", ignore=unwanted)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", "."]
    subprocess.run([*command, "./checkout"], cwd=folder, check=True)
    (path,) = folder.glob("*.whl")
    return ZipFile(path)


def test_holds_the_package_and_nothing_else(wheel: ZipFile) -> None:
    """The wheel holds every module of reserve_gpu and py.typed; no tests and no scripts."""
    package = CHECKOUT / "reserve_gpu"
    modules = {str(path.relative_to(CHECKOUT)) for path in package.rglob("*.py")}
    found = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert found == modules | {"reserve_gpu/py.typed"}


def test_metadata(wheel: ZipFile) -> None:
    """The metadata names the licence, the oldest Python, and few dependencies."""
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = message_from_bytes(wheel.read(name))
    assert metadata["Name"] == "reserve_gpu"
    assert metadata["License-Expression"] == "MIT"
    assert metadata["Requires-Python"] == ">=3.10"
    needed = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert needed == ["ipython>=7.34", "nvidia-ml-py>=12.550", "psutil>=5.9"]
    assert metadata.get_payload() == (CHECKOUT / "README.md").read_text()


def test_licence_is_inside(wheel: ZipFile) -> None:
    """The text of the licence travels with the package."""
    (name,) = (name for name in wheel.namelist() if name.endswith("/LICENSE"))
    assert wheel.read(name) == (CHECKOUT / "LICENSE").read_bytes()
