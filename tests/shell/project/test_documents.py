"""The code blocks of the documents run."""

from __future__ import annotations

import asyncio
import os
import re
from typing import TYPE_CHECKING, Any

import pytest
from traitlets.config import Config

import reserve_gpu
from reserve_gpu.locks.directory import MUTEXES, LockDirectory
from reserve_gpu.locks.queue import QueueEntry
from tests.support.documents import Block, code_blocks, find_block, python_blocks
from tests.support.processes import own_name

if TYPE_CHECKING:
    from tests.support.here import Here

# The machine of the first example in README.md: the first two GPUs of three are in use.
CARD = "gpu\n name GeForce GTX 1050 Ti\n memory 4038\n vbios 86.07.22.00.A8\n"
FIRST = f"{CARD} compute 4321000 3500\n{CARD} compute 9876 2100\n{CARD}"


def execute(code: str, **names: Any) -> dict[str, Any]:
    """Run code as a script, and return the names that it defines."""
    names["__name__"] = "__main__"
    exec(compile(code, "<document>", "exec"), names)
    return names


@pytest.mark.parametrize(
    "block", python_blocks(is_configuration=False), ids=lambda block: block.place
)
def test_python_runs(block: Block, here: Here, capsys: pytest.CaptureFixture[str]) -> None:
    """A Python block runs on a machine with eight idle GPUs without a warning."""
    here.use("eight")
    execute(block.code)
    assert capsys.readouterr().err == ""


def test_hook_of_jupyterhub(here: Here) -> None:
    """The hook lets a server start if a GPU is free, and lists the users otherwise."""
    pytest.importorskip("tornado")
    config = Config()
    names = execute(find_block("pre_spawn_hook"), get_config=lambda: config)
    here.add("compute 4321000 3500")  # on the last GPU
    asyncio.run(config.Spawner.pre_spawn_hook(None))
    with here.rival("0"), pytest.raises(names["HTTPError"]) as error:
        asyncio.run(config.Spawner.pre_spawn_hook(None))
    assert error.value.status_code == 503
    for word in ("GPU0", own_name(), "GPU1", "busy"):
        assert word in error.value.jupyterhub_message


@pytest.mark.ipython
def test_first_example(here: Here) -> None:
    """README.md starts with the exact output of `%reserve_gpu`."""
    here.write(FIRST)
    cell, *output = code_blocks()[0].code.splitlines()
    assert cell == "In [1]: %reserve_gpu"
    assert here.shell().run("%reserve_gpu").stdout.splitlines() == output


def test_files_that_root_creates(here: Here, capsys: pytest.CaptureFixture[str]) -> None:
    """The administrator's script names every lock file that does not belong to one user."""
    here.use("mixed")
    script = find_block("tmpfiles.d")
    execute(script.partition("<<'EOF'\n")[2].partition("\nEOF\n")[0])
    created = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert created[0] == ["d", "/run/lock/reserve_gpu", "1777", "root", "root"]
    names = {path.rpartition("/")[2] for kind, path, *_ in created if kind == "f"}
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
