"""The lines in ipython_config.py: what they become, and what an interrupted run leaves."""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reserve_gpu.commands.setup import config_file

ONE, TWO = b"/one/bin/python3.11", b"/a b/two/bin/python3.10"
# What version 2.0.0 added, to a file with a line break at its end, without one, and to a new one.
OLD_BLOCKS = [
    b"# >>> reserve_gpu (added by install.sh, which takes it away with --uninstall; new: %s) >>>\n"
    b"import importlib.util\n"
    b'if importlib.util.find_spec("reserve_gpu"):\n'
    b'    get_config().InteractiveShellApp.extensions.append("reserve_gpu")\n'
    b"# <<< reserve_gpu <<<\n" % new
    for new in (b"nothing", b"break", b"file and 2 folders")
]
BLOCK = config_file.added(b"", ONE)


def without(data: bytes, name: bytes = ONE) -> bytes:
    return config_file.removed(data, name).data


# -- the text ------------------------------------------------------------------------------------


PIECES = [
    *(b"x = 1", b"#", b"\xe9", b"\xef\xbb\xbf", b"  ", b"\n", b"\r\n", b"\r", b"\x0c"),
    *(b"# for me", config_file.IMPORT, config_file.APPEND, b"# <<<"),
]


@given(st.lists(st.sampled_from(PIECES)).map(b"".join))
def test_whatever_the_file_is_it_is_the_same_afterwards(data: bytes) -> None:
    """Lines that were added and removed leave every byte, whatever its encoding and line ends."""
    both = config_file.added(config_file.added(data, ONE), TWO)
    assert both.startswith(data)
    assert config_file.removed(both, TWO).others == (ONE,)
    assert without(without(both, TWO)) == data


@pytest.mark.parametrize("block", [BLOCK, *OLD_BLOCKS])
@pytest.mark.parametrize("eol", [b"\n", b"\r\n"])
def test_the_lines_of_the_user_between_the_marks_stay(block: bytes, eol: bytes) -> None:
    """Only lines that were added are removed, wherever in the block the user has written."""
    lines = block.replace(b"\n", eol).splitlines(keepends=True)
    for at in range(1, len(lines)):
        if lines[at].startswith(b" "):
            continue  # a line before it would end the condition
        own = b"c.InteractiveShell.autocall = 1" + eol, b"# for my own use" + eol, eol
        data = b"".join([b"x = 1" + eol, *lines[:at], *own, *lines[at:], b"y = 2"])
        assert config_file.removed(data, ONE) == (b"x = 1%s%sy = 2" % (eol, b"".join(own)), (), 3)


@pytest.mark.parametrize(
    ("inside", "stays"),
    [
        ("    x = 1\n", f"import importlib.util\n{config_file.GUARD.decode()}\n    x = 1\n"),
        ("    # a remark\n", "    # a remark\n"),
        ("print(importlib.util)\n", "import importlib.util\nprint(importlib.util)\n"),
        ("c.TerminalIPythonApp.extensions = ['reserve_gpu']\n",) * 2,
    ],
)  # fmt: skip
def test_the_rest_of_the_file_is_valid_python(inside: str, stays: str) -> None:
    """Added lines stay if the user's lines between the marks need them."""
    end = BLOCK.index(config_file.TAIL)
    data = BLOCK[:end] + inside.encode() + BLOCK[end:]
    assert without(data).decode() == stays
    compile(stays, "", "exec")


IN_THE_WAY = [
    ("else:\n    x = 1\n", "", "Line 6 is part of the same statement"),
    ("", "    x = 1\n", "Line 7 is part of the same statement"),
    ("", "\n# a remark\n    x = 1\nelse:\n    x = 2\n", "Line 9 is part of the same statement"),
    ("", "x = importlib.util\nimport importlib\n", "Line 7 uses the added import"),
    ("", "# coding: latin-1\nx = '\xe9'\n", "Delete them by hand"),
]


@pytest.mark.parametrize(("inside", "behind", "message"), IN_THE_WAY)
def test_lines_that_can_not_be_removed_are_left(inside: str, behind: str, message: str) -> None:
    """If the user's code needs the added lines, the error names its line."""
    end = BLOCK.index(config_file.TAIL)
    data = BLOCK[:end] + inside.encode() + BLOCK[end:] + behind.encode()
    compile(data, "", "exec")
    with pytest.raises(config_file.SetupError, match=message):
        without(data)


def test_lines_that_can_not_be_added_are_not() -> None:
    """If added lines would change a statement of the user, the error names its line."""
    data = b"".join(BLOCK.splitlines(keepends=True)[:-2]) + b"\tx = 1\n"
    compile(data, "", "exec")
    with pytest.raises(config_file.SetupError, match="Line 5 is part of the same statement"):
        config_file.added(data, TWO)


USERS = [
    *(b"log(1)", b"    log(2)", b"\tlog(3)", b"if log(4):", b"else:", b"    pass", b"# remark"),
    *(b"log(importlib.util)", b"import importlib.util", b"try:", b"finally:", b"'''", b""),
]
LINES = config_file.added(BLOCK, TWO).splitlines()
INSERTED = st.tuples(st.integers(0, len(LINES)), st.sampled_from(USERS))


def logged(data: bytes, *, is_installed: bool) -> list[object] | None:
    """Return the calls of log() in a configuration, in order; None if it is not valid Python."""
    seen: list[object] = []
    util = SimpleNamespace(find_spec=lambda _: SimpleNamespace(origin="x" * is_installed))
    names = {
        "log": seen.append,
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
        seen.append(NameError)
    return [each for each in seen if each is not util]


@given(
    st.sets(st.integers(0, len(LINES) - 1), max_size=2),
    st.lists(INSERTED, max_size=3),
    st.sampled_from([b"\n", b"\r\n", b"\r"]),
)
def test_the_code_of_the_user_does_the_same_afterwards(
    lost: set[int], inserted: list[tuple[int, bytes]], eol: bytes
) -> None:
    """Whatever the block has become, the user's code does the same without it, or it stays."""
    lines = [line if at not in lost else b"" for at, line in enumerate(LINES)]
    for at, line in inserted:
        lines.insert(at, line)
    data = eol.join(lines) + eol
    new = []
    with suppress(config_file.SetupError):
        new.append(config_file.added(data, b"/bin/python3.9"))
    with suppress(config_file.SetupError):
        new.append(without(without(data), TWO))
    for is_installed in (True, False):
        before = logged(data, is_installed=is_installed)
        if before is not None and NameError not in before:
            assert all(logged(each, is_installed=is_installed) == before for each in new)


def test_an_edited_line_is_the_users() -> None:
    """An added line that the user has edited stays."""
    data = BLOCK.replace(b"\nif ", b"\n# if ").replace(b"    get_config()", b"c")
    stays = without(data)
    assert stays.splitlines() == [
        config_file.IMPORT,
        b"# " + config_file.GUARD,
        stays.splitlines()[-1],
    ]
    assert stays in data


@pytest.mark.parametrize("lost", [config_file.BEGIN, config_file.END, b"none"])
@pytest.mark.parametrize("block", [BLOCK, *OLD_BLOCKS])
def test_a_lost_mark(lost: bytes, block: bytes) -> None:
    """Without one of the marks the added lines are still found, and no others."""
    lines = block.splitlines(keepends=True)
    damaged = b"".join(line for line in lines if not line.startswith(lost))
    data = b"import importlib\n" + damaged + b"x = 1\n" + damaged + b"import importlib.util\n"
    assert without(data) == b"import importlib\nx = 1\nimport importlib.util\n"
    again = config_file.added(data, TWO)
    assert (
        again.count(config_file.APPEND)
        == again.count(config_file.BEGIN)
        == again.count(config_file.END)
        == 1
    )
    assert without(again, TWO) in (without(data), again.replace(b"# for " + TWO + b"\n", b""))


def test_the_lines_of_the_user_stay_when_a_name_is_added() -> None:
    """Another Python's name is added without a change to what the user has written."""
    own = BLOCK.replace(b"import", b"x = 1\nimport", 1)
    added = config_file.added(own, TWO)
    assert added.replace(b"# for " + TWO + b"\n", b"") == own
    assert without(added, TWO) == own


OTHER = 65501  # an account without a name
