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


@pytest.fixture
def home(tmp_path: Path) -> Home:
    (tmp_path / "home").mkdir()
    return Home(tmp_path / "home")


def install_sh(
    home: Home, *words: str, script: Path = ROOT / "install.sh", **environ: str | Path
) -> subprocess.CompletedProcess[str]:
    env = home.environ(**environ)
    del env["PYTHONPATH"]
    # In a session of its own, with the signals that a shell ignores in the background.
    prefix = ("env", "--default-signal", "setsid", "-w")
    return subprocess.run(
        [*prefix, SHELL, str(script), *words],
        env=env,
        cwd=home.path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


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
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(("#!/bin/sh", *lines, "")))
    path.chmod(0o755)
    return path


@pytest.mark.full
def test_install_and_uninstall(home: Home, tmp_path: Path) -> None:
    """It installs the checkout, which stays as it is, and runs setup; --uninstall undoes both."""
    checkout = tmp_path / "a checkout [with] 100% odd 'name'"
    unwanted = shutil.ignore_patterns(".*", "__pycache__", "tests", "build", "*.egg-info")
    shutil.copytree(ROOT, checkout, ignore=unwanted)
    before = Home(checkout).files()
    python = make_environment(tmp_path / "environment")
    done = install_sh(home, script=checkout / "install.sh", PYTHON=python, PIP_NO_DEPS="1")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        f"Installing reserve_gpu into {python} ...",
        f"Added lines to {home.config}",
        f"Whenever IPython or a Jupyter kernel of {python} starts, it loads the extension.",
        f"Try it: {python} -m IPython -c '%reserve_gpu'",
    ]
    assert Home(checkout).files() == before
    code = "print('loaded:', get_ipython().find_line_magic('reserve_gpu') is not None)"
    command = [str(python), "-m", "IPython", "--no-banner", "-c", code]
    env = home.environ(PYTHONPATH="", TERM="dumb")
    assert "loaded: True" in subprocess.check_output(command, env=env, cwd="/", text=True)
    # What a build leaves in the checkout is not the installed package.
    (checkout / "reserve_gpu.egg-info").mkdir()
    (checkout / "reserve_gpu.egg-info" / "PKG-INFO").write_text("Name: reserve_gpu\nVersion: 2\n")
    done = install_sh(home, "--uninstall", script=checkout / "install.sh", PYTHON=python)
    assert done.returncode == 0
    assert f"Removed {home.config}" in done.stdout
    assert "Successfully uninstalled reserve_gpu" in done.stdout
    done = install_sh(home, "--uninstall", script=checkout / "install.sh", PYTHON=python)
    assert done.returncode == 0
    assert f"{home.config} contains no added lines." in done.stdout


@pytest.mark.parametrize(("option", "code"), [("-h", 0), ("--help", 0), ("uninstall", 2)])
def test_usage(option: str, code: int, home: Home) -> None:
    """The usage is printed if it is requested or an argument is unknown; nothing is installed."""
    done = install_sh(home, option)
    assert done.returncode == code
    assert "Usage: sh install.sh" in (done.stderr if code else done.stdout)
    assert home.files() == {}


def test_no_such_python(home: Home) -> None:
    """A PYTHON that does not exist is one line that names it."""
    done = install_sh(home, PYTHON="no-such-python")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == ("install.sh: no-such-python: not found. Install Python 3.10 or newer.\n")


def test_pip_fails(home: Home, tmp_path: Path) -> None:
    """Without PYTHON, the first python3 on PATH is used; if pip fails, nothing else is changed."""
    program = make_program(tmp_path / "bin" / "python3", "echo no network >&2", "exit 3")
    done = install_sh(home, PATH=f"{program.parent}:/usr/bin:/bin")
    assert done.stdout == f"Installing reserve_gpu into {program} ...\n"
    assert done.stderr.splitlines() == [
        "no network",
        "install.sh: pip could not install reserve_gpu (see above). Nothing else was changed.",
    ]
    assert done.returncode == 1
    assert home.files() == {}


def test_setup_fails(home: Home, tmp_path: Path) -> None:
    """If setup fails, install.sh says that the package is installed."""
    lines = 'if [ "$3" = setup ]; then echo "no home" >&2; exit 73; fi'
    done = install_sh(home, PYTHON=make_program(tmp_path / "python", lines))
    assert done.returncode == 1
    assert done.stderr.splitlines()[0] == "no home"
    assert "reserve_gpu is installed, but" in done.stderr


@pytest.mark.parametrize("name", ["HUP", "INT", "TERM"])
def test_a_signal_while_pip_runs(name: str, home: Home, tmp_path: Path) -> None:
    """A signal to install.sh and pip leaves no file at home or in the temporary directory."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    program = make_program(tmp_path / "python", f"kill -s {name} 0; sleep 60")
    done = install_sh(home, PYTHON=program, TMPDIR=temporary)
    assert done.returncode == 128 + signal.Signals[f"SIG{name}"]
    assert home.files() == {}
    assert list(temporary.iterdir()) == []


# -- a clone next to the notebook ------------------------------------------------------------------


@pytest.fixture
def above(tmp_path: Path) -> Path:
    """Return the folder above a clone called reserve_gpu."""
    (tmp_path / "work" / "reserve_gpu" / "reserve_gpu").mkdir(parents=True)
    (tmp_path / "work" / "reserve_gpu" / "reserve_gpu" / "__init__.py").touch()
    return tmp_path / "work"


def test_the_errors_of_a_clone_next_to_the_notebook_are_explained(
    above: Path, home: Home, tmp_path: Path
) -> None:
    """docs/install.md names what Python and IPython say if they take a clone for the package."""
    python = make_environment(tmp_path / "environment")
    page = (ROOT / "docs" / "install.md").read_text()
    for line, said in [
        (["-m", "IPython", "-c", "%load_ext reserve_gpu"], "not an IPython extension"),
        (["-c", "import reserve_gpu; reserve_gpu.reserve()"], "has no attribute 'reserve'"),
        (["-m", "reserve_gpu"], "No module named reserve_gpu.__main__"),
        (["-c", "import reserve_gpu.system"], "No module named 'reserve_gpu.system'"),
    ]:
        command = [str(python), *line]
        result = subprocess.run(
            command,
            env=home.environ(PYTHONPATH=""),
            cwd=above,
            capture_output=True,
            text=True,
            check=False,
        )
        assert said in result.stdout + result.stderr
        assert said in page
