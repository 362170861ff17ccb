"""Each command that a refusal suggests works in the state in which it appeared."""

from __future__ import annotations

import json
import re
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.machine import Cell, Kernel, Machine

US = (sys.executable, "-m", "reserve_gpu")
# A command at the end of a sentence, or on a line of its own.
IN_A_CELL = re.compile(r"(?:^|: )([%!]\S.*|import os; .+)$", re.MULTILINE)
IN_A_SHELL = re.compile(r"(?:^|: )((?:env |sed |\S*/|'/|reserve-gpu ).*)$", re.MULTILINE)
OURS = re.compile(r"reserve.gpu|^sed ")
# Messages of a shell or a parser about an invalid command.
NOT_UNDERSTOOD = ("not found", "No such file", "No module", "Usage", "usage:", "There is no ")
MAY_FAIL = {None, "NoFreeDeviceError", "WaitTimeoutError", "TooLateError"}


class Scene(NamedTuple):
    """A state in which a request is refused.

    Attributes:
        machine: The scenario of the stand-in driver.
        ask: The arguments of the request.
        holder: The arguments of another process's `reserve()`, or None if no other process runs.
        first: The cell that runs before.
        visible: The user's CUDA_VISIBLE_DEVICES.
        helps: A part of the command after which the request succeeds. If it starts with `-`, the
            command itself succeeds, because it requests less. Empty if no command helps.
    """

    machine: str
    ask: str = ""
    holder: str | None = None
    first: str = ""
    visible: str | None = None
    helps: str = ""

    @property
    def environ(self) -> dict[str, str]:
        """Return the environment: a shell does not find `reserve-gpu` in it."""
        visible = {} if self.visible is None else {"CUDA_VISIBLE_DEVICES": self.visible}
        return {"PATH": "/usr/bin:/bin", **visible}


START_CUDA = "import ctypes; ctypes.CDLL('libcuda.so.1').cuInit(0)"
SCENES = {
    "reserved by another notebook": Scene("gpu", holder="", helps="reserve-gpu release"),
    "one of two": Scene("gpu\ngpu\n used 6000", "-n 2", helps="-n 1"),
    "a part is too large": Scene("gpu", "--memory 7GB", "memory='4GB'", helps="-.*memory 4.2GiB"),
    "hidden": Scene("gpu\ngpu", "1", visible="-1", helps="pop|env -u"),
    "CUDA has started": Scene("gpu\ngpu", first=START_CUDA),
    "no driver": Scene("fail nvmlInit_v2 * 9"),
}


def bounded(line: str) -> str:
    """Return a suggested command without a long wait or a placeholder."""
    line = re.sub(r"--wait( \d\S*)?", "--wait 0.2s", line)
    return line.replace("COMMAND ...", "true")


def in_order(lines: list[str]) -> list[str]:
    """Return each suggested command once, waits first, because nothing is released yet."""
    return sorted(dict.fromkeys(lines), key=lambda line: "--wait" not in line)


def held_by_another(machine: Machine, scene: Scene, stack: ExitStack) -> None:
    """Set the scene: the machine, and another notebook's reservation."""
    machine.write("gpu")
    if scene.holder is not None:
        child = stack.enter_context(machine.child(JPY_SESSION_NAME="other.ipynb"))
        assert not child.run(f"reserve_gpu.reserve({scene.holder})").error
    machine.write(scene.machine)


# -- in a notebook ---------------------------------------------------------------------------------


def typed_in(kernel: Kernel, shown: str, depth: int = 2) -> Iterator[tuple[str, str]]:
    """Run each command that a cell suggests, and each one in the output of a program."""
    for line in in_order(IN_A_CELL.findall(shown)):
        cell = kernel.run(bounded(line))
        answer = plain(cell)
        assert not [each for each in NOT_UNDERSTOOD if each in answer], (line, answer)
        assert cell.error in MAY_FAIL, (line, answer)
        yield line, answer
        if depth and line.startswith("!"):  # a program suggests commands for a shell
            nested = [f"!{each}" for each in IN_A_SHELL.findall(answer) if OURS.search(each)]
            yield from typed_in(kernel, "\n".join(nested), depth - 1)


def plain(cell: Cell) -> str:
    """Return the output of a cell without colors."""
    return re.sub(r"\x1b\[[0-9;]*m|\r", "", cell.all)


@pytest.mark.parametrize("scene", SCENES.values(), ids=SCENES)
def test_suggestions_in_a_notebook(machine: Machine, scene: Scene) -> None:
    """Each command that a refusal in a notebook suggests is valid, and one of them helps."""
    with ExitStack() as stack:
        held_by_another(machine, scene, stack)
        kernel = stack.enter_context(machine.kernel(**scene.environ))
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
# Arguments of `reserve-gpu` with a mistake.
MISTAKES = {
    "assignment to CUDA_VISIBLE_DEVICES": "run -- CUDA_VISIBLE_DEVICES=0 true",
    "two commands": "run -- 'cd / && true'",
    "script with Windows line ends": "run -- ./crlf.sh",
    "no --": "run 0 true",
    "options without run": "-n 1 -- true",
}


def assert_runs(machine: Machine, line: str, environ: dict[str, str]) -> int:
    """Run a suggested command in a shell, and return its exit code."""
    done = machine.command("sh", "-c", bounded(line), **environ)
    output = done.stdout + done.stderr
    assert done.returncode in (0, 1, 69, 75), (line, output)
    assert not [each for each in NOT_UNDERSTOOD[:5] if each in output], (line, output)
    return done.returncode


@pytest.mark.parametrize("scene", IN_SHELLS.values(), ids=IN_SHELLS)
def test_suggestions_in_a_shell(machine: Machine, scene: Scene) -> None:
    """Each command that a refusal in a shell suggests is valid, also in its JSON."""
    ask = [*US, "run", *scene.ask.split(), "--", "true"]
    with ExitStack() as stack:
        held_by_another(machine, scene, stack)
        told = machine.command(*ask[:4], "--json", *ask[4:], **scene.environ)
        assert told.returncode in (2, 69, 75), told.stderr
        for line in json.loads(told.stderr.splitlines()[-1])["next"]:
            assert_runs(machine, line, scene.environ)
        done = machine.typed(*ask, **scene.environ)
        found = in_order([line for line in IN_A_SHELL.findall(done.stderr) if OURS.search(line)])
        helped = [line for line in found if assert_runs(machine, line, scene.environ) == 0]
        # A process that is not a kernel releases its GPU only at its end.
        if scene.helps and "release" not in scene.helps:
            assert [line for line in helped if re.search(scene.helps, line)], done.stderr


@pytest.mark.parametrize("line", MISTAKES.values(), ids=MISTAKES)
def test_correction_of_a_mistake_is_valid(machine: Machine, line: str) -> None:
    environ = Scene("").environ
    script = machine.folder / "crlf.sh"
    script.write_bytes(b"#!/bin/sh\r\ntrue\n")
    script.chmod(0o755)
    done = machine.command("sh", "-c", f"{sys.executable} -m reserve_gpu {line}", **environ)
    said = done.stdout + done.stderr
    typed = [each for each in IN_A_SHELL.findall(said) if OURS.search(each)][-1]
    assert assert_runs(machine, typed, environ) == 0, said
