"""The wheel that pip builds from a checkout, and what `python -m build` makes to be published."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
from email import message_from_bytes
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from zipfile import ZipFile

import pytest

if TYPE_CHECKING:
    from tests.support.machine import Machine

from tests.support.packaging import modules

CHECKOUT = Path(__file__).resolve().parents[3]
VERSIONS = ("3.10", "3.11", "3.12", "3.13")
ENDS = (VERSIONS[0], VERSIONS[-1])
PIP = ("-m", "pip", "--disable-pip-version-check")


class Built(NamedTuple):
    """What is published."""

    sdist: Path
    wheel: Path


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a copy to build from, as a build leaves files behind."""
    folder = tmp_path_factory.mktemp("checkout") / "reserve_gpu"
    # Other tests write into .hypothesis meanwhile.
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
    """Make a source distribution, and the wheel made of that."""
    folder = checkout.parent / "dist"
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, checkout)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return Built(sdist, wheel)


def run(*command: str | Path) -> str:
    """Run a command to its end; what it said is in the error if it fails.

    Outside of the checkout: pip would take what a build left there for an installed package.
    """
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, text=True, capture_output=True, check=False, cwd="/", env=environ
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


PAGE = "reserve_gpu/commands/agents/SKILL.md"
BESIDE = {"reserve_gpu/py.typed", *([PAGE] if (CHECKOUT / PAGE).exists() else [])}


@pytest.mark.xdist_group("wheel")
def test_holds_the_package_and_nothing_else(wheel: ZipFile) -> None:
    """The wheel holds every module of reserve_gpu, and two files beside; no tests, no scripts."""
    assert files_of_package(wheel) == modules() | BESIDE


@pytest.mark.xdist_group("wheel")
def test_metadata(wheel: ZipFile) -> None:
    """The metadata names the licence, the Pythons, and few dependencies."""
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = message_from_bytes(wheel.read(name))
    assert metadata["Name"] == "reserve_gpu"
    assert metadata["License-Expression"] == "MIT"
    assert metadata["Requires-Python"] == ">=3.10"
    python = "Programming Language :: Python :: 3."
    named = [line for line in metadata.get_all("Classifier", []) if line.startswith(python)]
    assert [line.removeprefix(python[:-2]) for line in named] == list(VERSIONS)
    needed = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    tomli = 'tomli>=2; python_version < "3.11"'  # which Python itself has from there on
    assert needed == ["ipython>=7.34", "nvidia-ml-py>=12.550", tomli]


@pytest.mark.xdist_group("wheel")
def test_an_index_shows_the_readme_with_its_pictures(wheel: ZipFile) -> None:
    """What a package index shows is README.md, with addresses that lead to the repository."""
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    text = str(message_from_bytes(wheel.read(name)).get_payload())
    addresses = re.findall(r"]\(([^)#]+)", text)
    readme = (CHECKOUT / "README.md").read_text()
    (repository,) = re.findall(r"git clone (\S+)", readme)
    there = re.compile(rf"{re.escape(repository)}/(raw|blob)/main/")
    own = {address: match[1] for address in addresses if (match := there.match(address))}
    assert [address for address in addresses if "://" not in address] == []
    assert {kind for address, kind in own.items() if address.endswith(".png")} == {"raw"}
    assert all((CHECKOUT / there.sub("", address)).exists() for address in own)
    assert there.sub("", text) == readme


@pytest.mark.xdist_group("wheel")
def test_licence_is_inside(wheel: ZipFile) -> None:
    """The text of the licence travels with the package."""
    (name,) = (name for name in wheel.namelist() if name.endswith("/LICENSE"))
    assert wheel.read(name) == (CHECKOUT / "LICENSE").read_bytes()


@pytest.mark.xdist_group("wheel")
def test_command(wheel: ZipFile) -> None:
    """The package brings the command `reserve-gpu` and kernel provisioners, and nothing else."""
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
def test_can_be_published(built: Built) -> None:
    """`twine check --strict` finds nothing wrong with the description and the metadata."""
    said = run(sys.executable, "-m", "twine", "--no-color", "check", "--strict", *built)
    assert said.count("PASSED") == 2


@pytest.mark.needs("build")
def test_the_wheel_of_the_source_distribution(built: Built) -> None:
    """The wheel made of the source distribution holds the package, and no test."""
    with ZipFile(built.wheel) as wheel:
        assert files_of_package(wheel) == modules() | BESIDE


@pytest.mark.needs("build")
def test_the_source_distribution_is_the_repository(built: Built) -> None:
    """Who packages it finds the tests, the documents and the scripts in the source distribution."""
    if not (CHECKOUT / ".git").exists():
        pytest.skip("this is no repository")
    tracked = set(run("git", "-C", CHECKOUT, "ls-files").splitlines())
    with tarfile.open(built.sdist) as archive:
        found = {path.partition("/")[2] for path in archive.getnames()}
    assert tracked - found == {".gitignore"}


@pytest.mark.needs("build")
@pytest.mark.parametrize("kind", Built._fields)
def test_reserves_when_installed(built: Built, kind: str, machine: Machine, tmp_path: Path) -> None:
    """Installed from either into a fresh environment, the magic reserves a GPU."""
    folder = tmp_path / "environment"
    venv.create(folder, with_pip=True, symlinks=True)
    python = folder / "bin" / "python"
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))  # the dependencies
    install = (*PIP, "install", "--quiet", "--ignore-installed", "--no-deps")
    run(python, *install, getattr(built, kind))
    assert_reserves(python, machine, folder)


@pytest.mark.needs("build")
@pytest.mark.parametrize("version", ENDS)
def test_reserves_on_other_pythons(
    built: Built, version: str, machine: Machine, tmp_path: Path
) -> None:
    """With the dependencies that pip chooses, the wheel works on the oldest and newest Python."""
    found = find_python(version)
    if found is None:
        pytest.skip(f"there is no Python {version} here")
    folder = tmp_path / "environment"
    run(found, "-m", "venv", folder)
    python = folder / "bin" / "python"
    run(python, *PIP, "install", "--quiet", built.wheel)
    assert_reserves(python, machine, folder)


@pytest.mark.needs("build")
@pytest.mark.parametrize("version", ENDS)
def test_dependencies_need_no_compiler(built: Built, version: str, tmp_path: Path) -> None:
    """For the oldest and newest Python there are binary packages of all dependencies."""
    said = run(
        sys.executable, *PIP, "install", "--dry-run", "--ignore-installed", "--python-version",
        version, "--only-binary=:all:", "--target", tmp_path / "nowhere", built.wheel,
    )  # fmt: skip
    for name in ("reserve-gpu", "ipython", "nvidia-ml-py"):
        assert f"{name}-" in said.replace("_", "-").lower()


def files_of_package(wheel: ZipFile) -> set[str]:
    return {name for name in wheel.namelist() if ".dist-info/" not in name}


def find_python(version: str) -> str | None:
    """Return a Python of a version: by its name on the PATH, else one that pyenv has installed."""
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
    """Return the package in an environment, and no other one, reserves a GPU of the machine."""
    code = "%reserve_gpu\nimport reserve_gpu; print(reserve_gpu.__file__)"
    done = machine.command(
        str(python), "-m", "IPython", "--no-banner", "--colors=NoColor", "--ext=reserve_gpu",
        "-c", code, PYTHONPATH="",
    )  # fmt: skip
    assert "CUDA_VISIBLE_DEVICES = '0'" in done.stdout, done
    assert str(inside) in done.stdout.splitlines()[-1]
