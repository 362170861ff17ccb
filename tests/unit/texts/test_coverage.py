"""A list of the messages in the package that no snapshot shows."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING

import reserve_gpu

if TYPE_CHECKING:
    from syrupy.assertion import SnapshotAssertion

PACKAGE = Path(reserve_gpu.__file__).parent
SNAPSHOTS = Path(__file__).parent / "__snapshots__"
BLANK = "\0"  # stands for a placeholder


def text_of(node: ast.AST) -> str:
    """Return the text of a string or an f-string, with BLANK for each placeholder."""
    if isinstance(node, ast.Constant):
        return re.sub(r"\{\w*\}", BLANK, node.value) if isinstance(node.value, str) else ""
    values = node.values if isinstance(node, ast.JoinedStr) else []
    return "".join(text_of(value) or BLANK for value in values)


def collect(node: ast.AST, found: set[tuple[str, bool]], *, is_raised: bool = False) -> None:
    """Add each string outside docstrings, and whether it is passed to an exception.

    Strings inside the placeholders of an f-string are separate literals.
    """
    children = list(ast.iter_child_nodes(node))
    if text := text_of(node):
        found.add((text, is_raised))
        children = [each for each in children if isinstance(each, ast.FormattedValue)]
    if isinstance(node, ast.Call):
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        is_raised = is_raised or name.endswith(("Error", "Warning", "Interrupted"))
    for child in children:
        is_docstring = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
        if not is_docstring:
            collect(child, found, is_raised=is_raised or isinstance(child, ast.Raise))


def is_message(text: str, *, is_raised: bool) -> bool:
    """Return whether a literal reads like a sentence, or is the text of an exception."""
    words = re.findall(r"(?<![\w.-])[A-Za-z][a-z']*(?=[ .,:;?]|$)", text)
    return len(words) >= 3 and (is_raised or bool(re.search(r"\w[.:?](\s|$)", text)))


def squeeze(text: str) -> str:
    """Return the text without line breaks, escapes, and spaces that wrapping inserts."""
    return re.sub(r"\s+", " ", text.replace("\\'", "'").replace("%%", "%")).replace("- ", "-")


def is_shown(text: str, snapshots: str) -> bool:
    """Return whether a line of the snapshots contains the fixed parts of a text in order."""
    parts = [re.escape(part) for part in squeeze(text).split(BLANK) if part.strip()]
    return re.search(".*?".join(parts), snapshots) is not None


def test_each_message_is_in_a_snapshot(snapshot: SnapshotAssertion) -> None:
    """A message that no snapshot shows is in this test's own snapshot, and a new one fails."""
    files = [path for path in sorted(SNAPSHOTS.glob("*.ambr")) if path.stem != Path(__file__).stem]
    entries = (entry for path in files for entry in path.read_text("utf-8").split("# ---"))
    snapshots = "\n".join(map(squeeze, entries))
    missing: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        found: set[tuple[str, bool]] = set()
        collect(ast.parse(path.read_text("utf-8")), found)
        texts = {text for text, is_raised in found if is_message(text, is_raised=is_raised)}
        unseen = sorted(
            text.replace(BLANK, "{}") for text in texts if not is_shown(text, snapshots)
        )
        if unseen:
            missing[path.relative_to(PACKAGE).as_posix()] = unseen
    assert missing == snapshot
