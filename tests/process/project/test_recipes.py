"""The recipes of docs/processes.md run, with stand-ins for programs that need a GPU."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.locked import held
from tests.support.machine import ROOT, program
from tests.support.processes import US, wait_for

if TYPE_CHECKING:
    import subprocess

    from tests.support.here import Here

PAGE = (ROOT / "docs" / "processes.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
TRAIN = """\
import os
with open("log", "a") as log:
    log.write(os.environ["CUDA_VISIBLE_DEVICES"] + "\\n")
"""


def block(language: str, word: str) -> str:
    """Return the only block of the page in a language that contains a word."""
    (found,) = (text for each, text in BLOCKS if each == language and word in text)
    return str(found)


def run_line(here: Here, line: str, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run a line of the page in a shell that finds `reserve-gpu` and `python`."""
    folder = here.folder / "bin"
    folder.mkdir(exist_ok=True)
    for name, words in (("reserve-gpu", US), ("python", (sys.executable,))):
        (folder / name).write_text(f'#!/bin/sh\nexec {" ".join(words)} "$@"\n')
        (folder / name).chmod(0o755)
    path = f"{folder}:{here.environ()['PATH']}"
    return here.command("sh", "-c", line, PATH=path, **extra)


def logged_gpus(here: Here) -> list[str]:
    """Return the GPU of each run of train.py."""
    return sorted((here.folder / "log").read_text().split())


@pytest.mark.skipif(not program("make"), reason="needs make")
def test_make(here: Here) -> None:
    """Each run has one of the two GPUs, and all succeed."""
    (here.folder / "train.py").write_text(TRAIN)
    (here.folder / "Makefile").write_text(block("make", "reserve-gpu run"))
    for number in range(3):
        (here.folder / f"{number}.yaml").touch()
    done = run_line(here, "make -s -j 3 all")
    assert (done.returncode, done.stderr) == (0, "")
    assert len(logged_gpus(here)) == 3
    assert {*logged_gpus(here)} <= {"0", "1"}


@pytest.mark.parametrize(
    ("word", "script", "count"),
    [
        pytest.param(
            "parallel", "train.py", 3,
            marks=pytest.mark.skipif(not program("parallel"), reason="needs GNU parallel"),
        ),
        ("study.py", "study.py", 4),
    ],
)  # fmt: skip
def test_more_runs_than_gpus(here: Here, word: str, script: str, count: int) -> None:
    """Each run gets a GPU, and all succeed."""
    (here.folder / script).write_text(TRAIN)
    done = run_line(here, block("sh", word))
    assert done.returncode == 0, done.stderr
    assert len(logged_gpus(here)) == count


@pytest.mark.parametrize(
    "library", ["multiprocessing", pytest.param("joblib", marks=pytest.mark.needs("recipes"))]
)
def test_pool(here: Here, library: str) -> None:
    """Each worker keeps its own GPU for all of its tasks."""
    script = (
        block("python", "with Pool(4)")
        .replace("import torch\n\n    ...", TASK)
        .replace("Pool(4)", "Pool(2)")
    )
    if library == "joblib":
        last = script.index("    with Pool")
        script = (
            f"from joblib import Parallel, delayed\n{script[:last]}    rates = [0.1, 0.01, 0.001]\n"
        )
        script += f"    {joblib_line().replace('n_jobs=4', 'n_jobs=2')}\n"
        script += "".join(f"    {line}\n" for line in block("python", "loky").splitlines())
    (here.folder / "script.py").write_text(script)
    done = here.command(sys.executable, "script.py")
    assert done.returncode == 0, done.stderr
    lines = (here.folder / "log").read_text().splitlines()
    assert len(lines) == 3
    assert len({*lines}) == len({line.split()[0] for line in lines})  # one GPU per worker
    assert held(here) == []


TASK = """import os
    with open("log", "a") as log:
        log.write(f"{os.getpid()} {os.environ['CUDA_VISIBLE_DEVICES']}\\n")"""


def joblib_line() -> str:
    """Return the line for joblib on the page."""
    (line,) = re.findall(r"`(Parallel\(.*?)`", PAGE)
    return str(line)


@pytest.mark.parametrize(
    ("word", "name", "expected"),
    [
        ("docker run", "docker", ["run", "--rm", "--gpus", '"device=0,1"', "IMAGE", "python"]),
        ("--note", "pytest", ["tests/gpu"]),
        ("clearml", "clearml-agent", ["daemon", "--queue", "gpu", "--foreground", "--gpus", "0"]),
    ],
)
def test_arguments_of_other_programs(here: Here, word: str, name: str, expected: list[str]) -> None:
    """The program gets the arguments of the page; Docker gets the double quotes that it needs."""
    folder = here.folder / "bin"
    folder.mkdir()
    (folder / name).write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (folder / name).chmod(0o755)
    done = run_line(here, block("sh", word))
    assert done.stdout.splitlines()[: len(expected)] == expected


def test_running_process(here: Here) -> None:
    """A busy GPU is reserved until a running process ends."""
    with here.child() as child:
        line = block("sh", "tail --pid").replace("4321", str(child.pid))
        here.use("two")
        here.write(
            here.scenario.read_text().replace("gpu\n", f"gpu\n  compute {child.pid} 1000\n", 1)
        )
        run_line(here, line.replace(" &", " >output 2>&1 &"))
        wait_for(lambda: held(here))
        child.kill()
        wait_for(lambda: not held(here))
