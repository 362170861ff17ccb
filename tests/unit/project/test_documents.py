"""What the documents show works: their Python runs, and their links lead somewhere."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from traitlets.config.loader import PyFileConfigLoader

import reserve_gpu
from reserve_gpu.commands import registry
from reserve_gpu.commands.registry import COMMANDS
from reserve_gpu.ipython.parser import OTHERS, magic_parser
from reserve_gpu.option_parser import Parser
from reserve_gpu.request_options import DEVICES, REQUEST

if TYPE_CHECKING:
    from collections.abc import Iterator


from tests.support.documents import Block, blocks, is_configuration, python

ROOT = Path(__file__).parents[3]
README = ROOT / "README.md"
DOCUMENTS = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
OURS = {"reserve_gpu", "IPython"}  # what else a block imports is for the tests of that extra
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")


@pytest.mark.parametrize(
    "block", [b for b in python() if is_configuration(b)], ids=lambda b: b.place
)
def test_configuration_loads(block: Block, tmp_path: Path) -> None:
    """A block of configuration is one that Jupyter's own loader reads."""
    (tmp_path / "config.py").write_text(block.code)
    assert PyFileConfigLoader("config.py", path=str(tmp_path)).load_config()


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


def test_the_reference_has_every_public_name() -> None:
    """docs/python.md shows the docstring of each public name."""
    page = (ROOT / "docs" / "python.md").read_text()
    shown = re.findall(r"^::: reserve_gpu\.(\w+)$", page, re.MULTILINE)
    assert sorted(shown) == sorted(reserve_gpu.__all__)
    shown = re.findall(r"^::: reserve_gpu\.public\.(\w+)$", page, re.MULTILINE)
    assert sorted(shown) == sorted(
        node.name
        for node in ast.parse((ROOT / "reserve_gpu" / "public" / "__init__.py").read_text()).body
        if isinstance(node, ast.FunctionDef)
    )


NAMED = re.compile(r"`(?:tests/)?((?:unit|shell|process|e2e|driver)/[\w/]+\.py)`")


def test_named_tests_exist() -> None:
    """Every test file that a document names exists."""
    for document in DOCUMENTS:
        for name in NAMED.findall(document.read_text()):
            assert (ROOT / "tests" / name).exists(), f"{document}: {name}"


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
