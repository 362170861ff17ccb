"""docs/processes.md: what it says to type is typed, with a stand-in for what needs a GPU."""

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
    """Return the one block of the page in that language with that word."""
    (found,) = (text for each, text in BLOCKS if each == language and word in text)
    return str(found)


def typed(here: Here, line: str, **extra: str) -> subprocess.CompletedProcess[str]:
    """Type a line of the page, in a shell that finds `reserve-gpu` and `python`."""
    folder = here.folder / "bin"
    folder.mkdir(exist_ok=True)
    for name, words in (("reserve-gpu", US), ("python", (sys.executable,))):
        (folder / name).write_text(f'#!/bin/sh\nexec {" ".join(words)} "$@"\n')
        (folder / name).chmod(0o755)
    path = f"{folder}:{here.environ()['PATH']}"
    return here.command("sh", "-c", line, PATH=path, **extra)


def log(here: Here) -> list[str]:
    """Return the GPUs that the runs of train.py have had."""
    return sorted((here.folder / "log").read_text().split())


@pytest.mark.skipif(not program("make"), reason="needs make")
def test_make(here: Here) -> None:
    """Each run has one of the two GPUs, and all are done."""
    (here.folder / "train.py").write_text(TRAIN)
    (here.folder / "Makefile").write_text(block("make", "reserve-gpu run"))
    for number in range(3):
        (here.folder / f"{number}.yaml").touch()
    done = typed(here, "make -s -j 3 all")
    assert (done.returncode, done.stderr) == (0, "")
    assert len(log(here)) == 3
    assert {*log(here)} <= {"0", "1"}


@pytest.mark.skipif(not program("parallel"), reason="needs GNU parallel")
def test_parallel(here: Here) -> None:
    """GNU parallel starts more runs than there are GPUs, and each gets one."""
    (here.folder / "train.py").write_text(TRAIN)
    done = typed(here, block("sh", "parallel"))
    assert done.returncode == 0, done.stderr
    assert len(log(here)) == 3


@pytest.mark.parametrize(
    "way", ["multiprocessing", pytest.param("joblib", marks=pytest.mark.needs("recipes"))]
)
def test_a_pool(here: Here, way: str) -> None:
    """Each worker has a GPU of its own, the same for each of its tasks."""
    script = (
        block("python", "with Pool(4)")
        .replace("import torch\n\n    ...", TASK)
        .replace("Pool(4)", "Pool(2)")
    )
    if way == "joblib":
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
    assert len({*lines}) == len({line.split()[0] for line in lines})  # one GPU a worker
    assert held(here) == []


TASK = """import os
    with open("log", "a") as log:
        log.write(f"{os.getpid()} {os.environ['CUDA_VISIBLE_DEVICES']}\\n")"""


def joblib_line() -> str:
    """Return what the page says for joblib."""
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
def test_a_program_behind_it(here: Here, word: str, name: str, expected: list[str]) -> None:
    """The program gets just these words: Docker with the double quotes that it wants."""
    folder = here.folder / "bin"
    folder.mkdir()
    (folder / name).write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (folder / name).chmod(0o755)
    done = typed(here, block("sh", word))
    assert done.stdout.splitlines()[: len(expected)] == expected


def test_processes_of_one_study(here: Here) -> None:
    """More processes than there are GPUs: each has one, and all are done."""
    (here.folder / "study.py").write_text(TRAIN)
    done = typed(here, block("sh", "study.py"))
    assert done.returncode == 0
    assert len(log(here)) == 4


def test_a_run_that_has_begun(here: Here) -> None:
    """The GPU is reserved until that process ends, though it is busy."""
    with here.child() as child:
        line = block("sh", "tail --pid").replace("4321", str(child.pid))
        here.use("two")
        here.write(
            here.scenario.read_text().replace("gpu\n", f"gpu\n  compute {child.pid} 1000\n", 1)
        )
        typed(here, line.replace(" &", " >said 2>&1 &"))
        wait_for(lambda: held(here))
        child.kill()
        wait_for(lambda: not held(here))
