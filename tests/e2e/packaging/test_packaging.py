"""The wheel that pip builds, and the distributions that `python -m build` creates."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from email import message_from_bytes
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from zipfile import ZipFile

import pytest

if TYPE_CHECKING:
    from tests.support.machine import Machine


CHECKOUT = Path(__file__).resolve().parents[3]
VERSIONS = ("3.10", "3.11", "3.12", "3.13")
ENDS = (VERSIONS[0], VERSIONS[-1])
PIP = ("-m", "pip", "--disable-pip-version-check")


def modules() -> set[str]:
    """Return the paths of the package's modules."""
    package = CHECKOUT / "reserve_gpu"
    return {str(path.relative_to(CHECKOUT)) for path in package.rglob("*.py")}


class Built(NamedTuple):
    """The published distributions."""

    sdist: Path
    wheel: Path


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the checkout, because a build leaves files behind."""
    folder = tmp_path_factory.mktemp("checkout") / "reserve_gpu"
    # Parallel tests write to .hypothesis.
    names = (".git", ".*_cache", ".hypothesis", "__pycache__", "build", "*.egg-info")
    unwanted = shutil.ignore_patterns(*names)
    shutil.copytree(CHECKOUT, folder, ignore=unwanted)
    return folder


@pytest.fixture(scope="module")
def wheel(checkout: Path) -> ZipFile:
    folder = checkout.parent / "wheel"
    command = [sys.executable, *PIP, "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder)]
    subprocess.run([*command, str(checkout)], check=True)
    (path,) = folder.glob("*.whl")
    return ZipFile(path)


@pytest.fixture(scope="module")
def built(checkout: Path) -> Built:
    """Build a source distribution, and a wheel from it."""
    folder = checkout.parent / "dist"
    run_command(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, checkout)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return Built(sdist, wheel)


def run_command(*command: str | Path) -> str:
    """Run a command outside the checkout, and return its output.

    In the checkout, pip would take files of a build for an installed package.
    """
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, text=True, capture_output=True, check=False, cwd="/", env=environ
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


PAGE = "reserve_gpu/commands/agents/SKILL.md"
DATA_FILES = {"reserve_gpu/py.typed", *([PAGE] if (CHECKOUT / PAGE).exists() else [])}


@pytest.mark.xdist_group("wheel")
def test_files_of_the_wheel(wheel: ZipFile) -> None:
    """The wheel contains all modules of reserve_gpu and two data files, and no tests."""
    assert files_of_package(wheel) == modules() | DATA_FILES


@pytest.mark.xdist_group("wheel")
def test_metadata(wheel: ZipFile) -> None:
    """The metadata has the license, the Python versions and the dependencies."""
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = message_from_bytes(wheel.read(name))
    assert metadata["Name"] == "reserve_gpu"
    assert metadata["License-Expression"] == "MIT"
    assert metadata["Requires-Python"] == ">=3.10"
    python = "Programming Language :: Python :: 3."
    named = [line for line in metadata.get_all("Classifier", []) if line.startswith(python)]
    assert [line.removeprefix(python[:-2]) for line in named] == list(VERSIONS)
    needed = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    tomli = 'tomli>=2; python_version < "3.11"'  # in the standard library since 3.11
    assert needed == ["ipython>=7.34", "nvidia-ml-py>=12.550", tomli]


@pytest.mark.xdist_group("wheel")
def test_entry_points(wheel: ZipFile) -> None:
    """The entry points are the command `reserve-gpu` and the kernel provisioners."""
    (name,) = (name for name in wheel.namelist() if name.endswith("/entry_points.txt"))
    assert wheel.read(name).decode().splitlines() == [
        "[console_scripts]",
        "reserve-gpu = reserve_gpu.__main__:main",
        "",
        "[jupyter_client.kernel_provisioners]",
        "reserve-gpu-hosts = reserve_gpu.commands.hosts.provisioner:HostsProvisioner",
        "reserve-gpu-slurm = reserve_gpu.commands.slurm.slurm_provisioner:SlurmProvisioner",
    ]


@pytest.mark.needs("build")
def test_files_of_the_source_distribution(built: Built) -> None:
    """The source distribution contains all files of the repository."""
    if not (CHECKOUT / ".git").exists():
        pytest.skip("needs a repository")
    tracked = set(run_command("git", "-C", CHECKOUT, "ls-files").splitlines())
    with tarfile.open(built.sdist) as archive:
        found = {path.partition("/")[2] for path in archive.getnames()}
    assert tracked - found == {".gitignore"}


@pytest.mark.needs("build")
@pytest.mark.parametrize("version", ENDS)
def test_other_python_versions(
    built: Built, version: str, machine: Machine, tmp_path: Path
) -> None:
    """The wheel works on the oldest and the newest Python, with pip's choice of dependencies."""
    found = find_python(version)
    if found is None:
        pytest.skip(f"needs Python {version}")
    folder = tmp_path / "environment"
    run_command(found, "-m", "venv", folder)
    python = folder / "bin" / "python"
    run_command(python, *PIP, "install", "--quiet", built.wheel)
    assert_reserves(python, machine, folder)


def files_of_package(wheel: ZipFile) -> set[str]:
    return {name for name in wheel.namelist() if ".dist-info/" not in name}


def find_python(version: str) -> str | None:
    """Return a Python of this version from PATH or pyenv, or None."""
    pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    for name in (f"python{version}", *map(str, pyenv)):
        asks = [name, "-c", "import ensurepip, venv"]
        if (
            shutil.which(name)
            and not subprocess.run(asks, capture_output=True, check=False).returncode
        ):
            return name
    return None


def assert_reserves(python: Path, machine: Machine, inside: Path) -> None:
    """Assert that the package in the environment reserves a GPU."""
    code = "%reserve_gpu\nimport reserve_gpu; print(reserve_gpu.__file__)"
    done = machine.command(
        str(python), "-m", "IPython", "--no-banner", "--colors=NoColor", "--ext=reserve_gpu",
        "-c", code, PYTHONPATH="",
    )  # fmt: skip
    assert "CUDA_VISIBLE_DEVICES = '0'" in done.stdout, done
    assert str(inside) in done.stdout.splitlines()[-1]
