"""Each line that a message suggests is typed in the state in which it appeared."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.machine import Cell, Kernel, Machine

US = (sys.executable, "-m", "reserve_gpu")
# A line of ours at the end of a sentence, or on a line of its own.
IN_A_CELL = re.compile(r"(?:^|: )([%!]\S.*|import os; .+)$", re.MULTILINE)
IN_A_SHELL = re.compile(r"(?:^|: )((?:env |sed |\S*/|'/|reserve-gpu ).*)$", re.MULTILINE)
OURS = re.compile(r"reserve.gpu|^sed ")
# What a shell or a parser says about a line that it does not understand.
NOT_UNDERSTOOD = ("not found", "No such file", "No module", "Usage", "usage:", "There is no ")
MAY_FAIL = {None, "NoFreeDeviceError", "WaitTimeoutError", "TooLateError"}
AWAY = "/usr/bin:/bin"  # PATH without the scripts of this Python


class Scene(NamedTuple):
    """A state in which a request is refused.

    Attributes:
        machine: The scenario of the stand-in driver.
        ask: The words of the request.
        holder: The arguments of another process's `reserve()`; None if no other process runs.
        first: The cell that runs before.
        visible: The user's CUDA_VISIBLE_DEVICES.
        helps: A part of the line after which the request succeeds, or which asks for less (`-`)
            and succeeds; empty if no line can.
    """

    machine: str
    ask: str = ""
    holder: str | None = None
    first: str = ""
    visible: str | None = None
    helps: str = ""

    @property
    def environ(self) -> dict[str, str]:
        """Return the variables that the user has set."""
        return {} if self.visible is None else {"CUDA_VISIBLE_DEVICES": self.visible}


START_CUDA = "import ctypes; ctypes.CDLL('libcuda.so.1').cuInit(0)"
SCENES = {
    "busy": Scene("gpu\n used 6000"),
    "waited": Scene("gpu\n used 6000", "--wait 0.1s"),
    "reserved by another notebook": Scene("gpu", holder="", helps="reserve-gpu release"),
    "reserved by a process that uses it": Scene("gpu\n compute {holder} 300", holder=""),
    "one of two": Scene("gpu\ngpu\n used 6000", "-n 2", helps="-n 1"),
    "too many": Scene("gpu", "-n 9"),
    "a part is too large": Scene("gpu", "--memory 7GB", "memory='4GB'", helps="-.*memory 4.2GiB"),
    "a part where all is taken": Scene("gpu", "--memory 7GB", ""),
    "limited": Scene("gpu\n used 6000\ngpu", visible="0"),
    "hidden": Scene("gpu\ngpu", visible="-1", helps="pop|env -u"),
    "hidden and named": Scene("gpu\ngpu", "1", visible="-1", helps="pop|env -u"),
    "MIG": Scene("gpu\n mig on\n instance 0\n  used 4000\n instance 1\n  used 4000"),
    "a broken GPU": Scene("gpu\nfail nvmlDeviceGetHandleByIndex_v2 0 15"),
    "CUDA has started": Scene("gpu\ngpu", first=START_CUDA),
    "no driver": Scene("fail nvmlInit_v2 * 9"),
    "not lent to this process": Scene("count 0"),
}


def bounded(line: str) -> str:
    """Return a suggested line without long waits and placeholders."""
    line = re.sub(r"--wait( \d\S*)?", "--wait 0.2s", line)
    return line.replace("COMMAND ...", "true")


def in_order(lines: list[str]) -> list[str]:
    """Return each suggested line once, waits first: what they wait for is not released yet."""
    return sorted(dict.fromkeys(lines), key=lambda line: "--wait" not in line)


@pytest.fixture
def path() -> dict[str, str]:
    """Return an environment in which a shell does not find `reserve-gpu`."""
    return {"PATH": AWAY}


def held_by_another(machine: Machine, scene: Scene, stack: ExitStack) -> None:
    """Set the scene: the machine, and another notebook's reservation."""
    machine.write("gpu")
    pid = 0
    if scene.holder is not None:
        child = stack.enter_context(machine.child(JPY_SESSION_NAME="other.ipynb"))
        assert not child.run(f"reserve_gpu.reserve({scene.holder})").error
        pid = child.pid
    machine.write(scene.machine.replace("{holder}", str(pid)))


# -- in a notebook ---------------------------------------------------------------------------------


def typed_in(kernel: Kernel, shown: str, depth: int = 2) -> Iterator[tuple[str, str]]:
    """Type each line that a cell suggests, and what its answer suggests; yield the answers."""
    for line in in_order(IN_A_CELL.findall(shown)):
        cell = kernel.run(bounded(line))
        answer = plain(cell)
        assert not [each for each in NOT_UNDERSTOOD if each in answer], (line, answer)
        assert cell.error in MAY_FAIL, (line, answer)
        yield line, answer
        if depth and line.startswith("!"):  # a program below a cell suggests lines for a shell
            nested = [f"!{each}" for each in IN_A_SHELL.findall(answer) if OURS.search(each)]
            yield from typed_in(kernel, "\n".join(nested), depth - 1)


def plain(cell: Cell) -> str:
    return re.sub(r"\x1b\[[0-9;]*m|\r", "", cell.all)


@pytest.mark.parametrize("scene", SCENES.values(), ids=SCENES.keys())
def test_in_a_notebook(machine: Machine, path: dict[str, str], scene: Scene) -> None:
    """Each line that a refused notebook reads can be typed there, and the right one helps."""
    with ExitStack() as stack:
        held_by_another(machine, scene, stack)
        kernel = stack.enter_context(machine.kernel(**path, **scene.environ))
        kernel.run(scene.first)
        refused = plain(kernel.run(f"%reserve_gpu {scene.ask}"))
        assert "Reserving GPU" not in refused
        typed = dict(typed_in(kernel, refused))
        if scene.helps:
            (answer,) = [typed[line] for line in typed if re.search(scene.helps, line)][-1:]
            if not scene.helps.startswith("-"):
                answer = plain(kernel.run(f"%reserve_gpu {scene.ask}"))
            assert "Reserving GPU" in answer, refused


# -- in a shell ------------------------------------------------------------------------------------

IN_SHELLS = {name: scene for name, scene in SCENES.items() if not scene.first}
# Words behind `reserve-gpu` with a mistake in them.
LINES = {
    "an assignment": "run -- A=1 true",
    "a GPU by the variable": "run -- CUDA_VISIBLE_DEVICES=0 true",
    "a line in quotes": "run -- 'true x'",
    "two commands": "run -- 'cd / && true'",
    "cd": "run -- cd / '&&' true",
    "a script with Windows' line ends": "run -- ./crlf.sh",
    "a script of another Python": "run -- ./stale.sh",
    "a script that may not be run": "run -- ./plain.sh",
    "a command without a sign": "run 0 true",
    "a GPU without a command": "0",
    "options without run": "-n 1 -- true",
    "a program without run": "env true",
    "a check without a reservation": "check",
}


def assert_runs(machine: Machine, line: str, environ: dict[str, str]) -> int:
    """Type a suggested line in a shell; returns its exit code."""
    done = machine.command("sh", "-c", bounded(line), **environ)
    said = done.stdout + done.stderr
    assert done.returncode in (0, 1, 69, 75), (line, said)
    assert not [each for each in NOT_UNDERSTOOD[:5] if each in said], (line, said)
    return done.returncode


@pytest.mark.parametrize("scene", IN_SHELLS.values(), ids=IN_SHELLS.keys())
def test_in_a_shell(machine: Machine, path: dict[str, str], scene: Scene) -> None:
    """Each line that a refused command suggests can be typed there, also `next` of its JSON."""
    environ = {**path, **scene.environ}
    ask = [*US, "run", *scene.ask.split(), "--", "true"]
    with ExitStack() as stack:
        held_by_another(machine, scene, stack)
        told = machine.command(*ask[:4], "--json", *ask[4:], **environ)
        assert told.returncode in (2, 69, 75), told.stderr
        for line in json.loads(told.stderr.splitlines()[-1])["next"]:
            assert_runs(machine, line, environ)
        done = machine.typed(*ask, **environ)
        found = in_order([line for line in IN_A_SHELL.findall(done.stderr) if OURS.search(line)])
        helped = [line for line in found if assert_runs(machine, line, environ) == 0]
        # A process that is no kernel is released by its end alone, which the next line says.
        if scene.helps and "release" not in scene.helps:
            assert [line for line in helped if re.search(scene.helps, line)], done.stderr


@pytest.mark.parametrize("line", LINES.values(), ids=LINES.keys())
def test_a_mistake_in_a_shell(machine: Machine, path: dict[str, str], line: str) -> None:
    """A line with a mistake is answered with one that works."""
    for name, first in {"crlf": "#!/bin/sh\r", "stale": "#!/gone/sh", "plain": "#!/bin/sh"}.items():
        script = machine.folder / f"{name}.sh"
        script.write_bytes(f"{first}\ntrue\n".encode())
        script.chmod(0o644 if name == "plain" else 0o755)
    done = machine.command("sh", "-c", f"{sys.executable} -m reserve_gpu {line}", **path)
    said = done.stdout + done.stderr
    typed = [each for each in IN_A_SHELL.findall(said) if OURS.search(each)][-1]
    # A framework that is a build for CPUs makes the check end with 1.
    assert assert_runs(machine, typed, path) in ({0, 1} if "check" in line else {0}), said


# -- which reserve-gpu it is -----------------------------------------------------------------------

ASK = "from reserve_gpu.model import errors; print(errors.program_command())"
SCRIPT = "#!{}\nimport sys\nfrom reserve_gpu.__main__ import main\nsys.exit(main())\n"
LONG = "#!/bin/sh\n'''exec' {} \"$0\" \"$@\"\n' '''\n" + SCRIPT.partition("\n")[2]


def environment(folder: Path, script: str | None = SCRIPT) -> Path:
    """Return the Python of an environment, with or without the script of this package."""
    python = folder / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(os.path.realpath(sys.executable))
    (folder / "pyvenv.cfg").write_text(
        f"home = {os.path.dirname(os.path.realpath(sys.executable))}\n"
    )
    if script:
        path = folder / "bin" / "reserve-gpu"
        quoted = f"'{python}'" if " " in str(python) else str(python)
        path.write_text(script.format(quoted))
        path.chmod(0o755)
    return python


def own_command(machine: Machine, python: Path, path: str, **environ: str) -> str:
    """Start the command that this Python's hints name, and return it."""
    extra = {"PATH": path, **environ}
    done = machine.command(str(python), "-c", ASK, **extra)
    assert done.returncode == 0, done.stderr
    command = done.stdout.removesuffix("\n")
    started = machine.command("sh", "-c", f"{command} --version", **extra)
    assert started.stdout.startswith("reserve-gpu"), started.stderr
    return command


def test_the_script_of_this_environment(machine: Machine) -> None:
    """The name alone is printed if PATH leads to this Python's script, else the script's path."""
    mine, other = environment(machine.folder / "mine"), environment(machine.folder / "other")
    (machine.home / "bin").mkdir()
    (machine.home / "bin" / "reserve-gpu").symlink_to(mine.parent / "reserve-gpu")
    script = f"{mine.parent}/reserve-gpu"
    assert own_command(machine, mine, f"{mine.parent}:{AWAY}") == "reserve-gpu"
    assert own_command(machine, mine, f"{machine.home}/bin:{AWAY}") == "reserve-gpu"
    assert own_command(machine, mine, AWAY) == script
    assert own_command(machine, mine, f"{other.parent}:{mine.parent}:{AWAY}") == script


def test_hints_open_no_file_of_the_working_directory(machine: Machine) -> None:
    """A FIFO named reserve-gpu in the working directory, or on PATH, does not block a hint."""
    mine, folder = environment(machine.folder / "mine"), machine.folder / "bin"
    folder.mkdir()
    for path in (machine.folder, folder):
        os.mkfifo(path / "reserve-gpu")
        (path / "reserve-gpu").chmod(0o777)
    script = f"{mine.parent}/reserve-gpu"
    for first in (".", "", str(folder)):
        assert own_command(machine, mine, f"{first}:{AWAY}") == script


def test_no_script(machine: Machine) -> None:
    """If only another Python has a script, hints name the module."""
    mine, other = environment(machine.folder / "mine", None), environment(machine.folder / "other")
    (mine.parent / "reserve-gpu").symlink_to(other.parent / "reserve-gpu")
    module = f"{mine} -m reserve_gpu"
    assert own_command(machine, mine, f"{other.parent}:{AWAY}") == module
    assert own_command(machine, mine, f"{mine.parent}:{AWAY}") == module


def test_a_path_with_a_space(machine: Machine) -> None:
    """A path with a space is quoted, and the script that pip writes for it is recognised."""
    mine = environment(machine.folder / "my env", LONG)
    assert own_command(machine, mine, AWAY) == f"'{mine.parent}/reserve-gpu'"
    assert own_command(machine, mine, f"{mine.parent}:{AWAY}") == "reserve-gpu"


@pytest.mark.parametrize(("agent", "expected"), [("", "False"), ("claude", "True")])
def test_an_agent_on_a_terminal_is_a_program(machine: Machine, agent: str, expected: str) -> None:
    """Messages are for a person if the input is a terminal, unless an agent has the terminal."""
    master, slave = pty.openpty()
    code = "from reserve_gpu.render.frontends import SHELL, for_this_process as read"
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"{code}; print(read(SHELL).is_for_program)"],
            stdin=slave, capture_output=True, text=True, check=True, cwd=machine.folder,
            env=machine.environ(RESERVE_GPU_AGENT=agent),
        )  # fmt: skip
    finally:
        os.close(master)
        os.close(slave)
    assert done.stdout == f"{expected}\n"


def test_a_package_on_a_path_of_the_notebooks_own(machine: Machine) -> None:
    """If only sys.path leads to the package, the line takes that path along."""
    mine = environment(machine.folder / "mine", None)
    root = os.environ.get("PYTHONPATH") or str(machine.environ()["PYTHONPATH"])
    code = f"import sys; sys.path.append({root!r}); {ASK}"
    extra = {"PATH": AWAY, "PYTHONPATH": ""}
    done = machine.command(str(mine), "-c", code, **extra)
    assert done.stdout == f"env PYTHONPATH={root} {mine} -m reserve_gpu\n", done.stderr
    started = machine.command("sh", "-c", f"{done.stdout.strip()} --version", **extra)
    assert started.stdout.startswith("reserve-gpu"), started.stderr
