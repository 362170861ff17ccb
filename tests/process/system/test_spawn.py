"""The working directory may be another user's: nothing is started or imported from there."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.machine import LIMIT_S, ROOT

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.machine import Machine

# posix is built in, so a trap also works in place of a module that Python loads first.
TRAP = """\
import posix
trap = posix.open({log!r}, posix.O_WRONLY | posix.O_APPEND | posix.O_CREAT)
posix.write(trap, b"%d {name}\\n" % posix.getpid())
posix.close(trap)
"""
MODULES = (
    *("reserve_gpu", "json", "runpy", "site", "os", "sitecustomize", "usercustomize", "typing"),
    *("subprocess", "argparse", "shlex", "select", "ctypes/__init__", "encodings/__init__"),
    *("collections/__init__", "torch", "sshpyk/__init__", "IPython/__init__"),
)
PROGRAMS = ("ssh", "srun", "squeue", "sinfo", "scancel", "python", "python3", "nvidia-smi")
# The command line as its script starts it: without the working directory in sys.path.
US = (
    *(sys.executable, "-c"),
    "import sys; del sys.path[0]; from reserve_gpu.__main__ import main; sys.exit(main())",
)
HERE = platform.node()


class Traps:
    """A folder with modules and programs that log each run."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.folder = machine, machine.folder / "traps"
        self._log = machine.folder / "sprung"
        for name in MODULES:
            write(self.folder / f"{name}.py", TRAP.format(log=str(self._log), name=name))
        for name in PROGRAMS:
            write(self.folder / name, f"#!/bin/sh\necho $$ {name} >>{self._log}\n")

    def run(
        self, *words: str, path: str = ":.", cwd: Path | None = None, **extra: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end, in this folder. path: what stands first in PATH."""
        environ = self.machine.environ(**extra)
        return subprocess.run(
            words, env=environ | {"PATH": f"{path}:{environ['PATH']}"}, cwd=cwd or self.folder,
            text=True, capture_output=True, timeout=LIMIT_S, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def sprung(self, *, but: int = 0) -> list[str]:
        """Return the names of the traps that ran. but: A process to leave out."""
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        return [name for pid, name in map(str.split, lines) if int(pid) != but]


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def traps(machine: Machine) -> Traps:
    return Traps(machine)


def test_the_traps_work(traps: Traps) -> None:
    """A plain Python or shell runs modules and programs of the folder."""
    traps.run(sys.executable, "-m", "reserve_gpu", "status")
    assert traps.sprung()  # which module comes first depends on what Python loaded before
    traps.run(sys.executable, "-c", "import json")
    traps.run(sys.executable, "-c", "", PYTHONPATH=".")
    traps.run("/bin/sh", "-c", "ssh lab1")
    assert {"json", "encodings/__init__", "ssh"} <= {*traps.sprung()}


@pytest.mark.promise
def test_a_status_of_hosts_runs_nothing_of_the_folder(traps: Traps) -> None:
    """`status --hosts` with this machine's name runs no module of the working directory."""
    done = traps.run(*US, "status", "--json", "--hosts", f"{HERE},localhost")
    assert done.stdout.count('"devices"') == 2, done.stdout + done.stderr
    assert traps.sprung() == []


@pytest.mark.parametrize(
    "line",
    [
        "list --hosts HERE",
        "report --hosts HERE",
        "status --hosts HERE,no-such-host.invalid",
        "run --for 1h -- true",
        "run --json -- true",
        "check",
    ],
)
def test_a_command_runs_nothing_of_the_folder(line: str, traps: Traps) -> None:
    """A command that starts other programs takes none of them from the working directory."""
    # In a job of Slurm it also asks squeue and sinfo.
    done = traps.run(*US, *line.replace("HERE", HERE).split(), SLURM_JOB_ID="1")
    assert "Traceback" not in done.stderr
    assert traps.sprung() == []


AFTER_CD = """
import os, sys, reserve_gpu
from reserve_gpu.cli import main
del sys.path[0]  # with -c, the working directory
os.chdir(sys.argv[1])
os.environ["PYTHONPATH"] += os.pathsep + sys.argv[2]
reserve_gpu.check()
sys.exit(main.main(["status", "--json", "--hosts", sys.argv[3]]))
"""


@pytest.mark.parametrize("entry", ["", ".", "./.", "../traps"])
def test_a_relative_entry_of_pythonpath_counts_for_no_helper(entry: str, traps: Traps) -> None:
    """An entry that meant another folder when Python started does not mean this one later."""
    words = (sys.executable, "-c", AFTER_CD, str(traps.folder), entry, HERE)
    done = traps.run(*words, cwd=traps.machine.folder)
    assert '"devices"' in done.stdout, done.stderr
    assert traps.sprung() == []


def test_a_helper_finds_the_package_that_starts_it(traps: Traps) -> None:
    """A helper imports this very package, also from a folder that no new Python knows."""
    started = "spawn.python('-c', 'import reserve_gpu; print(reserve_gpu.__file__)')"
    code = f"""
import sys
sys.path[0] = {str(ROOT)!r}
import subprocess
from reserve_gpu.system import spawn
subprocess.run({started}, env=spawn.environment())
"""
    done = traps.run(sys.executable, "-c", code, PYTHONPATH="")
    assert done.stdout == f"{ROOT}/reserve_gpu/__init__.py\n", done.stderr
    assert traps.sprung() == []


@pytest.mark.parametrize("options", ["", "--hosts HERE", "--slurm"])
def test_a_kernel_starts_with_nothing_of_the_folder(options: str, traps: Traps) -> None:
    """The command of a kernelspec imports nothing from the notebook's folder before the kernel."""
    pytest.importorskip("ipykernel.kernelspec")
    if "--hosts" in options:
        pytest.importorskip("sshpyk", reason="needs the extra `hosts`")
    prefix = traps.machine.folder / "prefix"
    write(prefix / "bin" / "srun", "#!/bin/sh\nexit 1\n")
    path = f":.:{prefix}/bin"
    install = f"kernel install --prefix {prefix} {options.replace('HERE', HERE)}"
    done = traps.run(*US, *install.split(), path=path)
    assert done.returncode == 0, done.stderr
    (spec,) = prefix.glob("share/jupyter/kernels/*/kernel.json")
    argv = json.loads(spec.read_text())["argv"]
    if "--slurm" in options:
        assert argv[argv.index("--") + 1] == str(prefix / "bin" / "srun")
    end = argv.index("--") + 1 if "--" in argv else len(argv)
    done = traps.run(*argv[:end], "true" if "--" in argv else "--help", path=path)
    assert "Traceback" not in done.stderr
    assert traps.sprung() == []


def test_a_notebook_starts_nothing_of_its_folder(traps: Traps, machine: Machine) -> None:
    """Helpers of a notebook import nothing of its folder; its own process may."""
    with machine.kernel() as kernel:
        pid = kernel.pid
        kernel.run(f"%cd {traps.folder}\nimport os; os.environ['PATH'] = '.:' + os.environ['PATH']")
        for line in (f"--status --hosts {HERE}", "--for 1h", "--check", "--release"):
            cell = kernel.run(f"%reserve_gpu {line}")
            assert not cell.error, cell.traceback
    assert traps.sprung(but=pid) == []
