"""The fixed words of this project: each means one thing, in names, docstrings and messages."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

import pytest

from tests.machine import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

TREES = {path: ast.parse(path.read_text()) for path in sorted(ROOT.glob("reserve_gpu/**/*.py"))}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

# Of the names of functions, parameters and classes: a part of one, and what to write instead.
IN_NAMES = {
    "claim": "attempt, for one try to take devices; take_over, for what was kept or handed over",
    "beat": "heartbeat",
    "outside": "inherited, for variables from before",
    "terms": "lease",
    "noted": "log, for the history",
    "note": "log, for the history: a note is the user's line",
    "restart": "renew_lease: a restart is a kernel's",
}
# Who may have such a part all the same.
NAMED_SO = {
    "note": {"note"},  # the user's line itself
    "restart": {"Restart", "leave_to_restart", "restart_s", "restart"},  # the last is Jupyter's
}
# Of docstrings and messages, as a pattern.
IN_TEXTS = {
    r"\bclaim(s|ed|ing)?\b": "attempt, take over, hold",
    r"\blets? go\b": "release",
    r"\b(gives?|given|giving|gave) back\b": "release",
    r"\bnoted\b": "logged, for the history: a note is the user's line",
    r"\b[Aa]s of [`A-Z]": "the thing itself, so that no other function has to be opened",
    r"^Return the same\b": "what is returned",
}


def names() -> Iterator[str]:
    """Yield the names of classes, of functions and of their parameters."""
    for tree in TREES.values():
        for node in ast.walk(tree):
            if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
                yield node.name
            if isinstance(node, ast.arg):
                yield node.arg


def texts() -> Iterator[tuple[str, int, str]]:
    """Yield each docstring and message with its file and line."""
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield path.name, node.lineno, node.value


@pytest.mark.parametrize("part", IN_NAMES)
def test_names_keep_to_the_fixed_words(part: str) -> None:
    """No function, parameter or class is called by a word that means something else here."""
    split = {name: re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().split("_") for name in names()}
    wrong = {name for name, parts in split.items() if part in parts}
    assert wrong <= NAMED_SO.get(part, set()), f"write {IN_NAMES[part]}"


@pytest.mark.parametrize("pattern", IN_TEXTS)
def test_texts_keep_to_the_fixed_words(pattern: str) -> None:
    """No docstring and no message has a word for which there is another one here."""
    wrong = [(file, line) for file, line, text in texts() if re.search(pattern, text)]
    assert not wrong, f"write {IN_TEXTS[pattern]}"
