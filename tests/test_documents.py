"""What the documents show works: their Python runs, and their links lead somewhere."""

from __future__ import annotations

import ast
import asyncio
import os
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from traitlets.config import Config
from traitlets.config.loader import PyFileConfigLoader

import reserve_gpu
from reserve_gpu.commands import registry
from reserve_gpu.commands.registry import COMMANDS
from reserve_gpu.ipython.parser import OTHERS, magic_parser
from reserve_gpu.locks.directory import MUTEXES, LockDirectory
from reserve_gpu.locks.queue import QueueEntry
from reserve_gpu.option_parser import Parser
from reserve_gpu.request_options import DEVICES, REQUEST
from tests import driver
from tests.processes import own_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.here import Here
    from tests.machine import Machine

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
DOCUMENTS = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PROVING = [document for document in DOCUMENTS if document.name != "CONTRIBUTING.md"]
OURS = {"reserve_gpu", "IPython"}  # what else a block imports is for the tests of that extra
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
# The machine of README's first example: the first two GPUs of three are in use.
CARD = "gpu\n name GeForce GTX 1050 Ti\n memory 4038\n vbios 86.07.22.00.A8\n"
FIRST = f"{CARD} compute 4321000 3500\n{CARD} compute 9876 2100\n{CARD}"


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
    """Return the blocks of Python that need no more than we do; those of IPython are no Python."""
    return [b for b in blocks() if b.language == "python" and imports(b.code) <= OURS]


def imports(code: str) -> set[str]:
    """Return what code imports that is not in Python's library."""
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


def execute(code: str) -> dict[str, Any]:
    """Run code as a script; the names that it has defined."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(code, "<document>", "exec"), names)
    return names


def is_configuration(block: Block) -> bool:
    return "get_config()" in block.code


@pytest.mark.parametrize(
    "block", [b for b in python() if not is_configuration(b)], ids=lambda b: b.place
)
def test_python_runs(block: Block, here: Here, capsys: pytest.CaptureFixture[str]) -> None:
    """A block of Python in a document runs on a machine with eight idle GPUs, without a warning."""
    here.use("eight")
    execute(block.code)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "block", [b for b in python() if is_configuration(b)], ids=lambda b: b.place
)
def test_configuration_loads(block: Block, tmp_path: Path) -> None:
    """A block of configuration is one that Jupyter's own loader reads."""
    (tmp_path / "config.py").write_text(block.code)
    assert PyFileConfigLoader("config.py", path=str(tmp_path)).load_config()


# An EGL of a machine with two GPUs, whose order is not CUDA's, and a software renderer. It numbers
# as CUDA does only in a process without CUDA_VISIBLE_DEVICES.
EGL = r"""
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
static unsigned list_devices(int most, void **devices, int *count) {
    for (*count = 0; *count < 3 && *count < most; ++*count) devices[*count] = (void *)(*count + 1L);
    return 1;
}
static unsigned read_attribute(void *device, int attribute, intptr_t *value) {
    if (attribute != 0x323A || (intptr_t)device > 2) return 0;
    *value = getenv("CUDA_VISIBLE_DEVICES") ? 0 : 2 - (intptr_t)device;
    return 1;
}
void *eglGetProcAddress(const char *name) {
    return !strcmp(name, "eglQueryDevicesEXT") ? (void *)list_devices : (void *)read_attribute;
}
"""


@pytest.mark.process
def test_the_numbers_of_egl_are_printed(here: Here) -> None:
    """The script for programs that render prints the GPU of each EGL device."""
    (script,) = (block.code for block in blocks() if "EGL_CUDA_DEVICE_NV" in block.code)
    (here.folder / "egl.c").write_text(EGL)
    command = [*driver.compiler(), "-shared", "-fPIC", "-o", "libEGL.so.1", "egl.c"]
    subprocess.run(command, cwd=here.folder, check=True)
    libraries = f"{here.folder}:{os.environ['LD_LIBRARY_PATH']}"
    reserve_gpu.reserve("1")
    done = here.command("sh", "-c", script, LD_LIBRARY_PATH=libraries)
    assert done.stdout == "EGL 0: GPU1\nEGL 1: GPU0\nEGL 2: no CUDA device\n", done.stderr


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


def test_the_front_page_is_short() -> None:
    """The README has at most 85 lines; the rest is in the pages of docs/."""
    assert len((ROOT / "README.md").read_text().splitlines()) <= 85


def test_beta_until_several_gpus_and_mig_are_confirmed() -> None:
    """As long as several GPUs or MIG are not confirmed, the README and the packages say Beta."""
    page = (ROOT / "docs" / "hardware.md").read_text()
    _, _, rest = page.partition("## Not confirmed\n")
    unconfirmed = rest.partition("\n## ")[0]
    is_beta = "several GPUs" in unconfirmed or "MIG" in unconfirmed
    first_screen = "".join((ROOT / "README.md").read_text().splitlines()[:25])
    assert ("**Beta:" in first_screen) == is_beta
    for path in ("pyproject.toml", "labextension/pyproject.toml"):
        assert ("Development Status :: 4 - Beta" in (ROOT / path).read_text()) == is_beta


def lines_to_type(first: str) -> list[str]:
    """Return the lines of the block that begins so, without what is said of them."""
    (block,) = (b.code for b in blocks() if b.code.startswith(first))
    return [re.split(r"  +", line)[0] for line in block.splitlines()]


FRONT = "%reserve_gpu 1,3   "
COMMAND_LINE = "reserve-gpu run -- python train.py   "


@pytest.mark.parametrize("first", [FRONT, COMMAND_LINE])
def test_what_people_type(first: str) -> None:
    """The lines of the front page's list, and of the command line's, can be understood."""
    typed = lines_to_type(first)
    assert len(typed) > 5
    for line in typed:
        name, *words = shlex.split(line)
        if name == "%reserve_gpu":
            magic_parser().parse_args(words)
        else:
            assert name == "reserve-gpu"
            row = next(each for each in COMMANDS if f"{line} ".startswith(f"reserve-gpu {each} "))
            ours, command, parser = words[len(row.split()) :], registry.load(row), Parser()
            ours, _ = command.split(ours) if hasattr(command, "split") else (ours, [])
            command.add_arguments(parser)
            parser.parse_args(ours)


def test_the_page_of_the_command_line_has_each_command() -> None:
    """docs/commandline.md begins with a line for each command that the help lists."""
    text = "\n".join(f"{line} " for line in lines_to_type(COMMAND_LINE))
    for name, command in COMMANDS.items():
        assert not command.help or f"reserve-gpu {name} " in text


def test_the_page_of_the_magic_has_each_option() -> None:
    """docs/options.md has a row for each option of the magic."""
    page = (ROOT / "docs" / "options.md").read_text()
    for option in (*REQUEST, *OTHERS):
        assert option is DEVICES or re.search(rf"^\|.*`[^`]*{option.flag}\b", page, re.MULTILINE), (
            option.flag
        )


@pytest.mark.process
@pytest.mark.needs("frameworks")
def test_first_notebook(machine: Machine) -> None:
    """The front page's first notebook runs to its end; here on the CPU, as no GPU can compute."""
    (notebook,) = (b.code for b in blocks() if b.code.startswith("%reserve_gpu\nimport torch\n"))
    assert len(notebook.splitlines()) == 5
    done = machine.ipython(notebook.replace('"cuda"', '"cpu"'))
    assert done.returncode == 0, done
    assert done.stdout.startswith("Reserving GPU0")
    assert re.search(r"^10\d\d\.\d+$", done.stdout, re.MULTILINE)  # a quarter of 4096 on average


def test_the_reference_has_every_public_name() -> None:
    """docs/python.md shows the docstring of each public name."""
    page = (ROOT / "docs" / "python.md").read_text()
    shown = re.findall(r"^::: reserve_gpu\.(\w+)$", page, re.MULTILINE)
    assert sorted(shown) == sorted(reserve_gpu.__all__)
    shown = re.findall(r"^::: reserve_gpu\.public\.(\w+)$", page, re.MULTILINE)
    assert sorted(shown) == sorted(functions(ROOT / "reserve_gpu" / "public" / "__init__.py"))


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


NAMED = re.compile(r"`(?:tests/)?(test_\w+\.py)(?:::(\w+))?")


def test_named_tests_exist() -> None:
    """Each test, or file of tests, that a document gives as the proof of a sentence is there."""
    for document in PROVING:
        for name, test in NAMED.findall(document.read_text()):
            path = ROOT / "tests" / name
            assert path.exists(), name
            assert not test or test in functions(path), f"{name}::{test}"


@cache
def functions(path: Path) -> set[str]:
    """Return the functions of a module."""
    tree = ast.parse(path.read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_named_modules_exist() -> None:
    """Each Python file that CONTRIBUTING tells people to go to is there."""
    there = [str(path) for path in ROOT.rglob("*.py")]
    for name in re.findall(r"`([\w/]+\.py)`", (ROOT / "CONTRIBUTING.md").read_text()):
        assert any(path.endswith(f"/{name}") for path in there), name


def test_links() -> None:
    """Each link of a document to another file, or to a heading, leads somewhere.

    Or to a page that the front page lists, and the contents of the site don't: it was cut.
    """
    gone = linked(README) - set(contents())
    for document in DOCUMENTS:
        for link in LINK.findall(document.read_text()):
            name, _, anchor = link.partition("#")
            target = (document.parent / name).resolve() if name else document
            if "://" in link or target in gone:
                continue
            assert target.exists(), (document, link)
            assert not anchor or anchor in anchors(target), (document, link)


def test_the_front_page_lists_each_page() -> None:
    """The README has a link to each page of docs/."""
    assert {page for page in contents() if page.parent.name == "docs"} <= linked(README)


def test_each_page_has_its_place() -> None:
    """The site's contents name each page once, and none that is not there."""
    others = [ROOT / "CHANGELOG.md", ROOT / "tests" / "driver" / "README.md"]
    assert sorted(contents()) == sorted(DOCUMENTS + others)


def test_messages_name_no_document() -> None:
    """No message refers to a file of the repository, because a wheel does not contain it."""
    for path in (ROOT / "reserve_gpu").rglob("*.py"):
        named = [text for text in messages(path) if re.search(r"\b(docs|tests)/|\w\.md\b", text)]
        assert [text for text in named if text != "SKILL.md"] == [], path


def messages(path: Path) -> Iterator[str]:
    """Yield the strings of a module that are not docstrings."""
    tree = ast.parse(path.read_text())
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    constants = [node for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    for node in constants:
        if isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


def contents() -> list[Path]:
    """Return the pages that the site's contents name."""
    named = re.findall(r'"([\w/]+\.md)"', (ROOT / "zensical.toml").read_text())
    return [ROOT / name for name in named]


def linked(document: Path) -> set[Path]:
    """Return the pages of docs/ to which a document has a link."""
    links = re.findall(r"\]\((docs/\w+\.md)", document.read_text())
    return {document.parent / name for name in links}


def anchors(document: Path) -> set[str]:
    """Return what the headings of a document are called in links, as GitHub calls them."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}
