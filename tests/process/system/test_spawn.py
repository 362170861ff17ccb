"""Tests that nothing is run or imported from the working directory, which is untrusted."""

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

# posix is built in, so a trap can also replace a module that Python loads first.
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
# The command line as its script starts it, without the working directory in sys.path.
COMMAND = (
    *(sys.executable, "-c"),
    "import sys; del sys.path[0]; from reserve_gpu.__main__ import main; sys.exit(main())",
)
THIS_HOST = platform.node()


class Traps:
    """A folder with modules and programs that log each of their runs."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.folder = machine, machine.folder / "traps"
        self._log = machine.folder / "sprung"
        for name in MODULES:
            write(self.folder / f"{name}.py", TRAP.format(log=str(self._log), name=name))
        for name in PROGRAMS:
            write(self.folder / name, f"#!/bin/sh\necho $$ {name} >>{self._log}\n")

    def run_command(
        self, *words: str, path: str = ":.", cwd: Path | None = None, **extra: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command with a prefix of PATH, by default in this folder."""
        environ = self.machine.environ(**extra)
        return subprocess.run(
            words, env=environ | {"PATH": f"{path}:{environ['PATH']}"}, cwd=cwd or self.folder,
            text=True, capture_output=True, timeout=LIMIT_S, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def sprung(self, *, ignored_pid: int = 0) -> list[str]:
        """Return the names of the traps that ran, except in the ignored process."""
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        return [name for pid, name in map(str.split, lines) if int(pid) != ignored_pid]


def write(path: Path, text: str) -> None:
    """Write an executable file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def traps(machine: Machine) -> Traps:
    """Make a folder of traps."""
    return Traps(machine)


def test_the_traps_work(traps: Traps) -> None:
    """A plain Python or shell runs the modules and programs of the folder."""
    traps.run_command(sys.executable, "-c", "import json")
    traps.run_command(sys.executable, "-c", "", PYTHONPATH=".")
    traps.run_command("/bin/sh", "-c", "ssh lab1")
    assert {"json", "encodings/__init__", "ssh"} <= {*traps.sprung()}


@pytest.mark.promise
def test_the_status_of_hosts_runs_no_trap(traps: Traps) -> None:
    """`status --hosts` with this machine's name imports nothing from the working directory."""
    done = traps.run_command(*COMMAND, "status", "--json", "--hosts", f"{THIS_HOST},localhost")
    assert done.stdout.count('"devices"') == 2, done.stdout + done.stderr
    assert traps.sprung() == []


@pytest.mark.parametrize(
    "line",
    [
        "report --hosts HERE",
        "status --hosts HERE,no-such-host.invalid",
        "run --for 1h -- true",
        "check",
    ],
)
def test_a_command_runs_no_trap(line: str, traps: Traps) -> None:
    """A command that starts other programs does not find them in the working directory."""
    # In a Slurm job, the command also runs squeue and sinfo.
    done = traps.run_command(*COMMAND, *line.replace("HERE", THIS_HOST).split(), SLURM_JOB_ID="1")
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


@pytest.mark.parametrize("entry", ["", "./.", "../traps"])
def test_helpers_ignore_relative_entries_of_pythonpath(entry: str, traps: Traps) -> None:
    """A relative entry of PYTHONPATH does not follow changes of the working directory."""
    words = (sys.executable, "-c", AFTER_CD, str(traps.folder), entry, THIS_HOST)
    done = traps.run_command(*words, cwd=traps.machine.folder)
    assert '"devices"' in done.stdout, done.stderr
    assert traps.sprung() == []


def test_a_helper_imports_the_package_that_starts_it(traps: Traps) -> None:
    """A helper imports the same package even if only its parent's sys.path contains the folder."""
    call = "spawn.python('-c', 'import reserve_gpu; print(reserve_gpu.__file__)')"
    code = f"""
import sys
sys.path[0] = {str(ROOT)!r}
import subprocess
from reserve_gpu.system import spawn
subprocess.run({call}, env=spawn.environment())
"""
    done = traps.run_command(sys.executable, "-c", code, PYTHONPATH="")
    assert done.stdout == f"{ROOT}/reserve_gpu/__init__.py\n", done.stderr
    assert traps.sprung() == []


@pytest.mark.parametrize("options", ["", "--hosts HERE", "--slurm"])
def test_a_kernel_runs_no_trap(options: str, traps: Traps) -> None:
    """A kernelspec's command imports nothing from the notebook's folder before the kernel runs."""
    pytest.importorskip("ipykernel.kernelspec")
    if "--hosts" in options:
        pytest.importorskip("sshpyk", reason="needs the extra `hosts`")
    prefix = traps.machine.folder / "prefix"
    write(prefix / "bin" / "srun", "#!/bin/sh\nexit 1\n")
    path = f":.:{prefix}/bin"
    install = f"kernel install --prefix {prefix} {options.replace('HERE', THIS_HOST)}"
    done = traps.run_command(*COMMAND, *install.split(), path=path)
    assert done.returncode == 0, done.stderr
    (spec,) = prefix.glob("share/jupyter/kernels/*/kernel.json")
    argv = json.loads(spec.read_text())["argv"]
    if "--slurm" in options:
        assert argv[argv.index("--") + 1] == str(prefix / "bin" / "srun")
    end = argv.index("--") + 1 if "--" in argv else len(argv)
    done = traps.run_command(*argv[:end], "true" if "--" in argv else "--help", path=path)
    assert "Traceback" not in done.stderr
    assert traps.sprung() == []


def test_helpers_of_a_notebook_run_no_trap(traps: Traps, machine: Machine) -> None:
    """The notebook's process may import modules from its folder, but its helpers do not."""
    with machine.kernel() as kernel:
        pid = kernel.pid
        kernel.run(f"%cd {traps.folder}\nimport os; os.environ['PATH'] = '.:' + os.environ['PATH']")
        for line in (f"--status --hosts {THIS_HOST}", "--for 1h", "--check", "--release"):
            cell = kernel.run(f"%reserve_gpu {line}")
            assert not cell.error, cell.traceback
    assert traps.sprung(ignored_pid=pid) == []
