"""install.sh, and the errors that a clone next to the notebook causes."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.support.machine import ROOT
from tests.support.profiles import Home

SHELL = shutil.which("dash") or "/bin/sh"


def install_sh(
    home: Home, *words: str, script: Path = ROOT / "install.sh", **environ: str | Path
) -> subprocess.CompletedProcess[str]:
    """Run install.sh in a new session, with the default signal handlers."""
    env = home.environ(**environ)
    del env["PYTHONPATH"]
    return subprocess.run(
        ["env", "--default-signal", "setsid", "-w", SHELL, str(script), *words],
        env=env, cwd=home.path, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        check=False,
    )  # fmt: skip


def make_environment(folder: Path) -> Path:
    """Make an environment with the packages of this one, except reserve_gpu; return its Python."""
    venv.create(folder, symlinks=True)
    target = folder / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    for source in (Path(entry) for entry in sys.path if entry.endswith("-packages")):
        for entry in source.iterdir():
            is_ours = entry.name.startswith(("reserve_gpu", "__editable__", "__pycache__"))
            if not (is_ours or entry.suffix == ".pth" or (target / entry.name).exists()):
                (target / entry.name).symlink_to(entry)
    return folder / "bin" / "python"


def make_program(path: Path, *lines: str) -> Path:
    """Make a shell script that takes the place of Python."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(("#!/bin/sh", *lines, "")))
    path.chmod(0o755)
    return path


@pytest.mark.full
def test_install_and_uninstall(home: Home, tmp_path: Path) -> None:
    """install.sh installs the package and runs setup; --uninstall undoes both."""
    checkout = tmp_path / "a checkout [with] 100% odd 'name'"
    unwanted = shutil.ignore_patterns(".*", "__pycache__", "tests", "build", "*.egg-info")
    shutil.copytree(ROOT, checkout, ignore=unwanted)
    before = Home(checkout).files()
    python = make_environment(tmp_path / "environment")
    done = install_sh(home, script=checkout / "install.sh", PYTHON=python, PIP_NO_DEPS="1")
    assert (done.returncode, done.stderr) == (0, "")
    assert str(python) in done.stdout
    assert str(home.config) in done.stdout
    assert Home(checkout).files() == before
    code = "print('loaded:', get_ipython().find_line_magic('reserve_gpu') is not None)"
    command = [str(python), "-m", "IPython", "--no-banner", "-c", code]
    env = home.environ(PYTHONPATH="", TERM="dumb")
    assert "loaded: True" in subprocess.check_output(command, env=env, cwd="/", text=True)
    # The files that a build leaves in the checkout are not the installed package.
    (checkout / "reserve_gpu.egg-info").mkdir()
    (checkout / "reserve_gpu.egg-info" / "PKG-INFO").write_text("Name: reserve_gpu\nVersion: 2\n")
    for text in ("Successfully uninstalled reserve_gpu", "no added lines"):
        done = install_sh(home, "--uninstall", script=checkout / "install.sh", PYTHON=python)
        assert done.returncode == 0
        assert text in done.stdout
    assert not home.config.exists()


def test_failure_of_pip(home: Home, tmp_path: Path) -> None:
    """Without PYTHON, the first python3 on PATH is used; if pip fails, nothing else is changed."""
    program = make_program(tmp_path / "bin" / "python3", "echo no network >&2", "exit 3")
    done = install_sh(home, PATH=f"{program.parent}:/usr/bin:/bin")
    assert str(program) in done.stdout
    assert done.stderr.splitlines()[0] == "no network"
    assert done.returncode == 1
    assert home.files() == {}


def test_failure_of_setup(home: Home, tmp_path: Path) -> None:
    """If setup fails, the error states that the package is installed."""
    lines = 'if [ "$3" = setup ]; then echo "no home" >&2; exit 73; fi'
    done = install_sh(home, PYTHON=make_program(tmp_path / "python", lines))
    assert done.returncode == 1
    assert done.stderr.splitlines()[0] == "no home"
    assert "reserve_gpu is installed" in done.stderr


@pytest.mark.parametrize("name", ["HUP", "INT", "TERM"])
def test_signal_while_pip_runs_leaves_no_file(name: str, home: Home, tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    program = make_program(tmp_path / "python", f"kill -s {name} 0; sleep 60")
    done = install_sh(home, PYTHON=program, TMPDIR=temporary)
    assert done.returncode == 128 + signal.Signals[f"SIG{name}"]
    assert home.files() == {}
    assert list(temporary.iterdir()) == []
