"""The lines that `reserve-gpu setup` adds to ipython_config.py, as bytes."""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reserve_gpu.commands.setup import config_file
from tests.support.profiles import OLD_BLOCK

ONE, TWO = b"/one/bin/python3.11", b"/a b/two/bin/python3.10"
BLOCK = config_file.added(b"", ONE)


def without(data: bytes, name: bytes = ONE) -> bytes:
    """Return the file content after `--undo` for one Python."""
    return config_file.removed(data, name).data


PIECES = [
    *(b"x = 1", b"#", b"\xe9", b"\xef\xbb\xbf", b"  ", b"\n", b"\r\n", b"\r", b"\x0c"),
    *(b"# for me", config_file.IMPORT, config_file.APPEND, b"# <<<"),
]


@given(st.lists(st.sampled_from(PIECES)).map(b"".join))
def test_adding_and_removing_restores_every_byte(data: bytes) -> None:
    """The result does not depend on the encoding or the line breaks of the file."""
    both = config_file.added(config_file.added(data, ONE), TWO)
    assert both.startswith(data)
    assert config_file.removed(both, TWO).others == (ONE,)
    assert without(without(both, TWO)) == data


@pytest.mark.parametrize("block", [BLOCK, OLD_BLOCK])
@pytest.mark.parametrize("eol", [b"\n", b"\r\n"])
def test_lines_of_the_user_between_the_marks_stay(block: bytes, eol: bytes) -> None:
    lines = block.replace(b"\n", eol).splitlines(keepends=True)
    for at in range(1, len(lines)):
        if lines[at].startswith(b" "):
            continue  # a line before it would end the condition
        own = b"c.InteractiveShell.autocall = 1" + eol, b"# for my own use" + eol, eol
        data = b"".join([b"x = 1" + eol, *lines[:at], *own, *lines[at:], b"y = 2"])
        assert config_file.removed(data, ONE) == (b"x = 1%s%sy = 2" % (eol, b"".join(own)), (), 3)


def with_user_code(inside: str) -> bytes:
    """Return the added lines with code of the user before the last mark."""
    end = BLOCK.index(config_file.TAIL)
    return BLOCK[:end] + inside.encode() + BLOCK[end:]


@pytest.mark.parametrize(
    ("inside", "stays"),
    [
        ("    x = 1\n", f"import importlib.util\n{config_file.GUARD.decode()}\n    x = 1\n"),
        ("    # a remark\n", "    # a remark\n"),
        ("print(importlib.util)\n", "import importlib.util\nprint(importlib.util)\n"),
    ],
)  # fmt: skip
def test_added_lines_stay_if_user_code_needs_them(inside: str, stays: str) -> None:
    assert without(with_user_code(inside)).decode() == stays
    compile(stays, "", "exec")


@pytest.mark.parametrize(
    ("inside", "behind", "line"),
    [
        ("else:\n    x = 1\n", "", "Line 6 "),
        ("", "    x = 1\n", "Line 7 "),
        ("", "\n# a remark\n    x = 1\nelse:\n    x = 2\n", "Line 9 "),
        ("", "x = importlib.util\nimport importlib\n", "Line 7 "),
        ("", "# coding: latin-1\nx = '\xe9'\n", "by hand"),
    ],
)
def test_lines_that_user_code_depends_on_are_not_removed(
    inside: str, behind: str, line: str
) -> None:
    """The error names the line of the user's code."""
    data = with_user_code(inside) + behind.encode()
    compile(data, "", "exec")
    with pytest.raises(config_file.SetupError, match=line):
        without(data)


def test_lines_that_would_change_user_code_are_not_added() -> None:
    data = b"".join(BLOCK.splitlines(keepends=True)[:-2]) + b"\tx = 1\n"
    compile(data, "", "exec")
    with pytest.raises(config_file.SetupError, match="Line 5 "):
        config_file.added(data, TWO)


USER_LINES = [
    *(b"log(1)", b"    log(2)", b"\tlog(3)", b"if log(4):", b"else:", b"    pass", b"# remark"),
    *(b"log(importlib.util)", b"import importlib.util", b"try:", b"finally:", b"'''", b""),
]
LINES = config_file.added(BLOCK, TWO).splitlines()
INSERTED = st.tuples(st.integers(0, len(LINES)), st.sampled_from(USER_LINES))


def log_calls(data: bytes, *, is_installed: bool) -> list[object] | None:
    """Return the calls of log() in a configuration, in order; None if it is not valid Python."""
    calls: list[object] = []
    util = SimpleNamespace(find_spec=lambda _: SimpleNamespace(origin="x" * is_installed))
    names = {
        "log": calls.append,
        "get_config": lambda: SimpleNamespace(InteractiveShellApp=SimpleNamespace(extensions=[])),
        "__builtins__": {
            "__import__": lambda *_: SimpleNamespace(util=util), "getattr": getattr
        },
    }  # fmt: skip
    try:
        code = compile(data, "", "exec", dont_inherit=True)
    except SyntaxError:
        return None
    try:
        exec(code, names)
    except NameError:
        calls.append(NameError)
    return [call for call in calls if call is not util]


@given(
    st.sets(st.integers(0, len(LINES) - 1), max_size=2),
    st.lists(INSERTED, max_size=3),
    st.sampled_from([b"\n", b"\r\n", b"\r"]),
)
def test_user_code_keeps_its_behavior(
    lost: set[int], inserted: list[tuple[int, bytes]], eol: bytes
) -> None:
    """Changes to an edited block either keep the behavior of the user's code or are refused."""
    lines = [line if at not in lost else b"" for at, line in enumerate(LINES)]
    for at, line in inserted:
        lines.insert(at, line)
    data = eol.join(lines) + eol
    changed = []
    with suppress(config_file.SetupError):
        changed.append(config_file.added(data, b"/bin/python3.9"))
    with suppress(config_file.SetupError):
        changed.append(without(without(data), TWO))
    for is_installed in (True, False):
        before = log_calls(data, is_installed=is_installed)
        if before is not None and NameError not in before:
            assert all(log_calls(new, is_installed=is_installed) == before for new in changed)


@pytest.mark.parametrize("lost", [config_file.BEGIN, config_file.END, b"none"])
@pytest.mark.parametrize("block", [BLOCK, OLD_BLOCK])
def test_block_without_a_mark(lost: bytes, block: bytes) -> None:
    """The added lines, and no others, are found without one of the marks."""
    lines = block.splitlines(keepends=True)
    damaged = b"".join(line for line in lines if not line.startswith(lost))
    data = b"import importlib\n" + damaged + b"x = 1\n" + damaged + b"import importlib.util\n"
    assert without(data) == b"import importlib\nx = 1\nimport importlib.util\n"
    again = config_file.added(data, TWO)
    for text in (config_file.APPEND, config_file.BEGIN, config_file.END):
        assert again.count(text) == 1
    assert without(again, TWO) in (without(data), again.replace(b"# for " + TWO + b"\n", b""))


def test_adding_a_python_keeps_the_lines_of_the_user() -> None:
    own = BLOCK.replace(b"import", b"x = 1\nimport", 1)
    added = config_file.added(own, TWO)
    assert added.replace(b"# for " + TWO + b"\n", b"") == own
    assert without(added, TWO) == own
