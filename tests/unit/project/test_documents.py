"""The documents: commands parse, links work, and every option and public name is described."""

from __future__ import annotations

import inspect
import re
import shlex
from typing import TYPE_CHECKING

import pytest
from traitlets.config.loader import PyFileConfigLoader

import reserve_gpu
from reserve_gpu import public
from reserve_gpu.commands import registry
from reserve_gpu.commands.registry import COMMANDS
from reserve_gpu.ipython.parser import OTHERS, magic_parser
from reserve_gpu.option_parser import Parser
from reserve_gpu.request_options import DEVICES, REQUEST
from tests.support.documents import DOCUMENTS, README, ROOT, Block, code_blocks, python_blocks

if TYPE_CHECKING:
    from pathlib import Path

LINK = re.compile(r"\]\(([^)\s]+)\)")


@pytest.mark.parametrize(
    "block", python_blocks(is_configuration=True), ids=lambda block: block.place
)
def test_configuration_loads(block: Block, tmp_path: Path) -> None:
    """Jupyter's loader reads the configuration blocks."""
    (tmp_path / "config.py").write_text(block.code)
    assert PyFileConfigLoader("config.py", path=str(tmp_path)).load_config()


MAGIC_LINES = "%reserve_gpu 1,3   "
COMMAND_LINES = "reserve-gpu run -- python train.py   "


def listed_lines(start: str) -> list[str]:
    """Return the lines of the block that starts with a text, without their explanations."""
    (code,) = (block.code for block in code_blocks() if block.code.startswith(start))
    return [re.split(r"  +", line)[0] for line in code.splitlines()]


@pytest.mark.parametrize("start", [MAGIC_LINES, COMMAND_LINES])
def test_listed_commands_parse(start: str) -> None:
    lines = listed_lines(start)
    assert len(lines) > 5
    for line in lines:
        program, *words = shlex.split(line)
        if program == "%reserve_gpu":
            magic_parser().parse_args(words)
            continue
        name = next(name for name in COMMANDS if f"{line} ".startswith(f"reserve-gpu {name} "))
        own, command, parser = words[len(name.split()) :], registry.load(name), Parser()
        own, _ = command.split(own) if hasattr(command, "split") else (own, [])
        command.add_arguments(parser)
        parser.parse_args(own)


def test_each_command_is_listed() -> None:
    text = "\n".join(f"{line} " for line in listed_lines(COMMAND_LINES))
    for name, command in COMMANDS.items():
        assert not command.help or f"reserve-gpu {name} " in text


def test_each_option_of_the_magic_has_a_row() -> None:
    page = (ROOT / "docs" / "options.md").read_text()
    for option in {*REQUEST, *OTHERS} - {DEVICES}:
        assert re.search(rf"^\|.*`[^`]*{option.flag}\b", page, re.MULTILINE), option.flag


def test_each_public_name_is_in_the_reference() -> None:
    page = (ROOT / "docs" / "python.md").read_text()
    shown = re.findall(r"^::: reserve_gpu\.(\w+)$", page, re.MULTILINE)
    assert sorted(shown) == sorted(reserve_gpu.__all__)
    shown = re.findall(r"^::: reserve_gpu\.public\.(\w+)$", page, re.MULTILINE)
    assert sorted(shown) == sorted(
        name
        for name, function in inspect.getmembers(public, inspect.isfunction)
        if function.__module__ == public.__name__
    )


NAMED_TEST = re.compile(r"`(?:tests/)?((?:unit|shell|process|e2e|driver)/[\w/]+\.py)`")


def test_named_files_exist() -> None:
    """The tests that a document names, and the modules that CONTRIBUTING.md names, exist."""
    for document in DOCUMENTS:
        for name in NAMED_TEST.findall(document.read_text()):
            assert (ROOT / "tests" / name).exists(), f"{document}: {name}"
    paths = [str(path) for path in ROOT.rglob("*.py")]
    for name in re.findall(r"`([\w/]+\.py)`", (ROOT / "CONTRIBUTING.md").read_text()):
        assert any(path.endswith(f"/{name}") for path in paths), name


def test_links() -> None:
    """Each link to another file, or to a heading, has a target.

    A page that README.md lists, but the site's contents do not, may be missing.
    """
    missing = linked_pages(README) - set(site_contents())
    for document in DOCUMENTS:
        for link in LINK.findall(document.read_text()):
            name, _, anchor = link.partition("#")
            target = (document.parent / name).resolve() if name else document
            if "://" in link or target in missing:
                continue
            assert target.exists(), (document, link)
            assert not anchor or anchor in heading_anchors(target), (document, link)


def test_each_page_is_listed() -> None:
    """The site's contents name each page once, and README.md links to each page of docs/."""
    others = [ROOT / "CHANGELOG.md", ROOT / "tests" / "driver" / "README.md"]
    assert sorted(site_contents()) == sorted(DOCUMENTS + others)
    pages = {page for page in site_contents() if page.parent.name == "docs"}
    assert pages <= linked_pages(README)


def site_contents() -> list[Path]:
    """Return the pages in the site's contents."""
    return [
        ROOT / name for name in re.findall(r'"([\w/]+\.md)"', (ROOT / "zensical.toml").read_text())
    ]


def linked_pages(document: Path) -> set[Path]:
    """Return the pages of docs/ to which a document links."""
    links = re.findall(r"\]\((docs/\w+\.md)", document.read_text())
    return {document.parent / name for name in links}


def heading_anchors(document: Path) -> set[str]:
    """Return the anchors of a document's headings, as GitHub writes them."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}
