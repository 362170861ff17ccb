"""Helpers of tests: documents."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCUMENTS = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
OURS = {"reserve_gpu", "IPython"}  # what else a block imports is for the tests of that extra
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


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


def is_configuration(block: Block) -> bool:
    return "get_config()" in block.code
