"""What the documents show works: their Python runs, and their links lead somewhere."""

from __future__ import annotations

import ast
import os
import pwd
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
from traitlets.config.loader import PyFileConfigLoader

if TYPE_CHECKING:
    from tests.machine import Machine

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
OURS = {"reserve_gpu", "IPython"}  # what else a block imports is for the tests of that extra
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
# The machine of README's first example: the first two GPUs of three are in use.
CARD = "gpu\n name GeForce GTX 1050 Ti\n memory 4038\n vbios 86.07.22.00.A8\n"
FIRST = f"{CARD} compute 4321 3500\n{CARD} compute 9876 2100\n{CARD}"


class Block(NamedTuple):
    """A piece of code in a document."""

    place: str
    language: str
    code: str


def blocks() -> list[Block]:
    found = []
    for document in DOCUMENTS:
        text = document.read_text()
        for match in BLOCK.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            found.append(Block(f"{document.name}:{line}", match[1], match[2]))
    return found


def python() -> list[Block]:
    """The blocks of Python that need no more than we do; those of IPython are no Python."""
    return [b for b in blocks() if b.language == "python" and imports(b.code) <= OURS]


def imports(code: str) -> set[str]:
    """What code imports that is not in Python's library."""
    try:
        tree = ast.parse(code)
    except SyntaxError:
        return {"no Python"}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
    return found - sys.stdlib_module_names


def is_configuration(block: Block) -> bool:
    return "get_config()" in block.code


@pytest.mark.parametrize(
    "block", [b for b in python() if not is_configuration(b)], ids=lambda b: b.place
)
def test_python_runs(block: Block, machine: Machine) -> None:
    """A block of Python in a document runs on a machine with eight idle GPUs, without a word."""
    machine.use("eight")
    done = machine.python(block.code)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "block", [b for b in python() if is_configuration(b)], ids=lambda b: b.place
)
def test_configuration_loads(block: Block, tmp_path: Path) -> None:
    """A block of configuration is one that Jupyter's own loader reads."""
    (tmp_path / "config.py").write_text(block.code)
    assert PyFileConfigLoader("config.py", path=str(tmp_path)).load_config()


def test_a_hub_tells_who_has_the_gpus(machine: Machine) -> None:
    """The administrator's hook for JupyterHub lets a server start, or says who has the GPUs."""
    (block,) = (b.code for b in blocks() if "pre_spawn_hook" in b.code)
    code = (
        "from traitlets.config import Config\nget_config = Config\n"
        f"{block}\n"
        "try:\n    asyncio.run(c.Spawner.pre_spawn_hook(None))\n    print('starts')\n"
        "except HTTPError as error:\n    print(error.status_code, error.jupyterhub_message)\n"
    )
    machine.add("compute 4321 3500")  # on the last GPU
    assert machine.python(code).stdout == "starts\n"
    with machine.child() as holder:
        holder.reserve()
        user = pwd.getpwuid(os.getuid()).pw_name
        said = f"503 No GPU is free now. GPU0: reserved, {user}; GPU1: busy\n"
        assert machine.python(code).stdout == said


def test_first_example(machine: Machine) -> None:
    """The README begins with what `%reserve_gpu` says, to the letter."""
    machine.write(FIRST)
    cell, *said = blocks()[0].code.splitlines()
    assert cell == "In [1]: %reserve_gpu"
    assert machine.ipython("%reserve_gpu").stdout.splitlines() == said


def test_files_made_by_root(machine: Machine) -> None:
    """The administrator's script names every lock file that reservations make."""
    machine.use("mixed")
    (script,) = (b.code for b in blocks() if "tmpfiles.d" in b.code and b.language == "sh")
    code = script.partition("<<'EOF'\n")[2].partition("\nEOF\n")[0]
    made = [line.split() for line in machine.python(code).stdout.splitlines()]
    assert made[0] == ["d", "/run/lock/reserve_gpu", "1777", "root", "root"]
    names = {path.rpartition("/")[2] for kind, path, *_ in made if kind == "f"}
    with machine.child() as alone, machine.child() as together:
        assert alone.reserve("[0, 1]").value == "0,1"
        assert together.reserve("[2, 3], share=True").value == "2,3"
    assert len(os.listdir(machine.locks)) > 4
    assert set(os.listdir(machine.locks)) <= names


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links(document: Path) -> None:
    """Each link of a document to another file, or to a heading, leads somewhere."""
    for link in LINK.findall(document.read_text()):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = document.parent / name if name else document
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def anchors(document: Path) -> set[str]:
    """What the headings of a document are called in links, as GitHub calls them."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}
