"""What the documents show works: their Python runs, and their links lead somewhere."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from traitlets.config import Config

import reserve_gpu
from reserve_gpu.locks.directory import MUTEXES, LockDirectory
from reserve_gpu.locks.queue import QueueEntry
from tests.support.processes import own_name

if TYPE_CHECKING:
    from tests.support.here import Here

from tests.support.documents import Block, blocks, is_configuration, python

ROOT = Path(__file__).parents[3]
README = ROOT / "README.md"
DOCUMENTS = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
OURS = {"reserve_gpu", "IPython"}  # what else a block imports is for the tests of that extra
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# The machine of README's first example: the first two GPUs of three are in use.
CARD = "gpu\n name GeForce GTX 1050 Ti\n memory 4038\n vbios 86.07.22.00.A8\n"
FIRST = f"{CARD} compute 4321000 3500\n{CARD} compute 9876 2100\n{CARD}"


def execute(code: str) -> dict[str, Any]:
    """Run code as a script; the names that it has defined."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(code, "<document>", "exec"), names)
    return names


@pytest.mark.parametrize(
    "block", [b for b in python() if not is_configuration(b)], ids=lambda b: b.place
)
def test_python_runs(block: Block, here: Here, capsys: pytest.CaptureFixture[str]) -> None:
    """A block of Python in a document runs on a machine with eight idle GPUs, without a warning."""
    here.use("eight")
    execute(block.code)
    assert capsys.readouterr().err == ""


def test_a_hub_tells_who_has_the_gpus(here: Here) -> None:
    """The administrator's hook for JupyterHub lets a server start, or says who has the GPUs."""
    pytest.importorskip("tornado")
    (block,) = (b.code for b in blocks() if "pre_spawn_hook" in b.code)
    config = Config()
    names: dict[str, Any] = {"get_config": lambda: config}
    exec(compile(block, "<document>", "exec"), names)

    def spawn() -> str:
        try:
            asyncio.run(config.Spawner.pre_spawn_hook(None))
        except names["HTTPError"] as error:
            return f"{error.status_code} {error.jupyterhub_message}"
        return "starts"

    here.add("compute 4321000 3500")  # on the last GPU
    assert spawn() == "starts"
    with here.rival("0"):
        user = own_name()
        assert spawn() == f"503 No GPU is free now. GPU0: reserved, {user}; GPU1: busy"


@pytest.mark.ipython
def test_first_example(here: Here) -> None:
    """The README begins with what `%reserve_gpu` says, to the letter."""
    here.write(FIRST)
    cell, *said = blocks()[0].code.splitlines()
    assert cell == "In [1]: %reserve_gpu"
    assert here.shell().run("%reserve_gpu").stdout.splitlines() == said


def test_files_made_by_root(here: Here, capsys: pytest.CaptureFixture[str]) -> None:
    """The administrator's script names every lock file but those that are a user's own."""
    here.use("mixed")
    (script,) = (b.code for b in blocks() if "tmpfiles.d" in b.code and b.language == "sh")
    execute(script.partition("<<'EOF'\n")[2].partition("\nEOF\n")[0])
    made = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert made[0] == ["d", "/run/lock/reserve_gpu", "1777", "root", "root"]
    names = {path.rpartition("/")[2] for kind, path, *_ in made if kind == "f"}
    reserve_gpu.reserve([0, 1])
    with (
        here.rival("2", part_mib=1024),
        here.rival("3"),
        LockDirectory(str(here.locks)) as directory,
        QueueEntry(directory, [here.uuid("3")]) as place,
    ):
        with directory.mutex():
            place.join()
        files = set(os.listdir(here.locks))
    own = {name for name in files if re.search(rf"(\.share|\.record|^queue)-{os.geteuid()}-", name)}
    assert len(own) == 5
    assert files - own == names - {*MUTEXES[1:]}
    assert {*MUTEXES} <= names
