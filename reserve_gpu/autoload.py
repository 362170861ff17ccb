"""The lines of ipython_config.py by which IPython loads the extension at every start.

Nothing here reads or writes a file. What stands in the configuration is bytes, as its encoding is
the user's, and of those no byte is changed: the lines go behind them, between two marks.
"""

from __future__ import annotations

import ast
import re
import warnings
from typing import NamedTuple

# The guard is for other environments of this user: they share the file, not the package.
# "new" says what else was made and has to go again: a line break, or the file and its folders.
HEAD = (
    b"# >>> reserve_gpu (added by install.sh, which takes it away with --uninstall; new: %s) >>>\n"
)
BODY = b"""import importlib.util
if importlib.util.find_spec("reserve_gpu"):
    get_config().InteractiveShellApp.extensions.append("reserve_gpu")
# <<< reserve_gpu <<<
"""
NEW_FILE = (b"file", b"file and 1 folder", b"file and 2 folders")

_HEAD_RE = (
    rb"^# >>> reserve_gpu \(added by install\.sh[^\n]*; "
    rb"new: (\w+)[\w ]*?(\d?)(?: folders?)?\) >>>(\r?\n)"
)
_BODY_RE = rb"\r?\n".join(map(re.escape, BODY.splitlines())) + rb"(?:\r?\n|\Z)"
_ADDED = re.compile(_HEAD_RE + _BODY_RE, re.MULTILINE)
_MARK = re.compile(rb"^# (?:>>>|<<<) reserve_gpu\b", re.MULTILINE)


class Rest(NamedTuple):
    """What a configuration is without the added lines.

    is_all_ours: the file was made for them, and nothing else is in it.
    folders: how many folders were made for the file.
    """

    data: bytes
    is_all_ours: bool
    folders: int


def new_file(folders: int) -> bytes:
    """Return a configuration of the lines alone; folders: how many were made for the file."""
    return HEAD % NEW_FILE[folders] + BODY


def behind(data: bytes) -> bytes:
    """Return the lines as they go behind this configuration."""
    is_whole = not data or data.endswith(b"\n")
    lines = HEAD % b"nothing" + BODY if is_whole else b"\n" + HEAD % b"break" + BODY
    return lines.replace(b"\n", b"\r\n") if b"\r\n" in data else lines


def without(data: bytes) -> Rest:
    """Take out the lines as they were added; ones that were edited since are the user's."""
    rest, new, folders = data, b"", 0
    while found := _ADDED.search(rest):
        new, folders, newline = found[1], int(found[2] or 0), found[3]
        before, after = rest[: found.start()], rest[found.end() :]
        rest = (before.removesuffix(newline) if new == b"break" and not after else before) + after
    return Rest(rest, is_all_ours=new == b"file" and not rest, folders=folders)


def marked_line(data: bytes) -> int:
    """Return the number of the first line with one of the marks, 0 where none has."""
    return _line_at(data, _MARK.search(data))


def loading_line(data: bytes) -> int:
    """Return the number of the line by which the extension is loaded, 0 where none does that."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the user's own lines
            tree = ast.parse(data)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # IPython can't read it either
        return _line_at(data, _ADDED.search(data))
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.Expr)) and _loads(node):
            return node.lineno
    return 0


def _loads(statement: ast.stmt) -> bool:
    parts = list(ast.walk(statement))
    attributes = {part.attr for part in parts if isinstance(part, ast.Attribute)}
    constants = [part.value for part in parts if isinstance(part, ast.Constant)]
    return "extensions" in attributes and "reserve_gpu" in constants


def _line_at(data: bytes, found: re.Match[bytes] | None) -> int:
    return data.count(b"\n", 0, found.start()) + 1 if found else 0
