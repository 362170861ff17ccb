"""The documents of the repository, and the code blocks in them."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCUMENTS = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PACKAGES = {"reserve_gpu", "IPython"}  # blocks that import others belong to tests of an extra
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A code block in a document.

    Attributes:
        place: The file name and the line.
        language: The language; empty if the document gives none.
        code: The code.
    """

    place: str
    language: str
    code: str

    @property
    def is_configuration(self) -> bool:
        """Whether the block is a part of a Jupyter configuration file."""
        return "get_config()" in self.code


def code_blocks() -> list[Block]:
    """Return all code blocks."""
    found = []
    for document in DOCUMENTS:
        text = document.read_text()
        for match in BLOCK.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            found.append(Block(f"{document.name}:{line}", match[1], match[2]))
    return found


def find_block(text: str) -> str:
    """Return the code of the only block that contains a text."""
    (code,) = (block.code for block in code_blocks() if text in block.code)
    return code


def python_blocks(*, is_configuration: bool) -> list[Block]:
    """Return the Python blocks that import no other packages than this one and IPython."""
    return [
        block
        for block in code_blocks()
        if block.language == "python"
        and imported_packages(block.code) <= PACKAGES
        and block.is_configuration == is_configuration
    ]


def imported_packages(code: str) -> set[str]:
    """Return the packages that code imports, besides Python's library."""
    try:
        tree = ast.parse(code)
    except SyntaxError:
        return {"no Python"}  # a cell with magics
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
    return found - sys.stdlib_module_names
