"""Add and remove the lines in ipython_config.py that make IPython load the extension.

The lines are placed between two marks, and list the path of each Python that they were added for.
Only lines that were written by this module, or by an older version of it, are removed. The file is
replaced atomically, so an interrupted run leaves either the old or the new content.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import warnings
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from reserve_gpu.model.errors import ReserveGPUError
from reserve_gpu.system import accounts, file_control

if TYPE_CHECKING:
    from collections.abc import Iterator

BEGIN, END = b"# >>> reserve_gpu ", b"# <<< reserve_gpu "
HEAD = BEGIN + b"(added by reserve-gpu setup; reserve-gpu setup --undo removes it%s) >>>"
BREAK = b"; new: break"  # part of the first mark if a line break was inserted before the mark
IMPORT = b"import importlib.util"
# The user's other environments share the file, but the package might not be installed in them.
# Testing `origin` excludes a folder that is named reserve_gpu but has no __init__.py.
GUARD = b'if getattr(importlib.util.find_spec("reserve_gpu"), "origin", None):'
OLD_GUARD = b'if importlib.util.find_spec("reserve_gpu"):'  # the guard that version 2.0.0 wrote
APPEND = b'    get_config().InteractiveShellApp.extensions.append("reserve_gpu")'
TAIL = END + b"<<<"
NAME = re.compile(rb"# for (/.*/bin/python\d+\.\d+)")
SIZE_LIMIT = 1 << 20  # maximum size of ipython_config.py in bytes; parsing a larger file is slow
OWN_LINE = re.compile(rb"^[^#\r\n]*reserve_gpu", re.MULTILINE)


class SetupError(ReserveGPUError):
    """The lines can't be added or removed, or don't make IPython load the extension."""

    exit_code = 73  # EX_CANTCREAT


class Block(NamedTuple):
    """The position of a block of added lines in the file.

    Attributes:
        start: The index of the first line.
        stop: The index after the last line.
        is_whole: Whether the block has both marks.
    """

    start: int
    stop: int
    is_whole: bool


class Removal(NamedTuple):
    """The result of removing the lines for this Python.

    Attributes:
        data: The file's new content.
        others: The paths of the other Pythons for which the lines are kept.
        left: The number of the user's own lines between the marks.
    """

    data: bytes
    others: tuple[bytes, ...]
    left: int


# -- file content ----------------------------------------------------------------------------------


def added(data: bytes, name: bytes) -> bytes:
    """Return a file's content with the lines for one Python added.

    Args:
        data: The file's content.
        name: The path of the Python interpreter.

    Returns:
        The new content.

    Raises:
        SetupError: The change would make the user's code invalid or change its meaning.
    """
    result = _added(data, name)
    _check_code(data, result)
    return result


def _added(data: bytes, name: bytes) -> bytes:
    lines = data.splitlines(keepends=True)
    blocks, names = blocks_in(lines), names_in(lines)
    eol = b"\r\n" if any(line.endswith(b"\r\n") for line in lines) else b"\n"
    if len(blocks) == 1 and blocks[0].is_whole:
        ((start, stop, _),) = blocks
        if name in names:
            return data
        if _user_lines(lines[start:stop]):
            return b"".join([*lines[: start + 1], b"# for " + name + eol, *lines[start + 1 :]])
    has_end = not lines or lines[-1].endswith((b"\r", b"\n"))
    is_broken = BREAK in lines[blocks[0].start] if blocks else not has_end
    head = HEAD % (BREAK if is_broken else b"")
    texts = [
        head,
        *(b"# for " + each for each in dict.fromkeys((*names, name))),
        IMPORT,
        GUARD,
        APPEND,
        TAIL,
    ]
    new = b"".join(text + eol for text in texts)
    if blocks:
        parts = _without(lines, blocks)
        return b"".join([*parts[0], new, *(line for part in parts[1:] for line in part)])
    return data + (b"" if has_end else eol) + new


def removed(data: bytes, name: bytes) -> Removal:
    """Return a file's content with the lines for one Python removed.

    Args:
        data: The file's content.
        name: The path of the Python interpreter.

    Returns:
        The new content, and details about what was kept.

    Raises:
        SetupError: The change would make the user's code invalid or change its meaning.
    """
    result = _removed(data, name)
    _check_code(data, result.data)
    return result


def _removed(data: bytes, name: bytes) -> Removal:
    lines = data.splitlines(keepends=True)
    blocks = blocks_in(lines)
    other_pythons = tuple(each for each in names_in(lines) if each != name)
    if other_pythons:
        inside = {at for start, stop, _ in blocks for at in range(start, stop)}
        names = {at for at in inside if _text(lines[at]) == b"# for " + name}
        rest = (line for at, line in enumerate(lines) if at not in names)
        return Removal(b"".join(rest), other_pythons, 0)
    parts = _without(lines, blocks)
    count = sum(len(_user_lines(lines[block.start : block.stop])) for block in blocks)
    if blocks and not parts[-1] and BREAK in lines[blocks[-1].start] and parts[-2]:
        parts[-2][-1] = _text(parts[-2][-1])
    return Removal(b"".join(line for part in parts for line in part), (), count)


def blocks_in(lines: list[bytes]) -> list[Block]:
    """Return the blocks of added lines. A block that was edited might lack one of its marks."""
    texts = [*map(_text, lines)]
    marks = [at for at, text in enumerate(texts) if text.startswith((BEGIN, END))]
    blocks: list[Block] = []
    for at, following in pairwise([*marks, len(texts)]):
        is_begin = texts[at].startswith(BEGIN)
        if is_begin and following < len(texts) and texts[following].startswith(END):
            blocks.append(Block(at, following + 1, is_whole=True))
        elif is_begin:
            last = next((i for i in range(at, following) if texts[i] == APPEND), None)
            end = at + 1 if last is None else last + 1
            while last is None and end < following and _is_ours(texts[end]):
                end += 1
            blocks.append(Block(at, end, is_whole=False))
        elif not blocks or blocks[-1].stop <= at:
            first = blocks[-1].stop if blocks else 0
            start = next((i for i in range(at, first - 1, -1) if texts[i] == APPEND), at)
            while start > first and _is_ours(texts[start - 1]):
                start -= 1
            blocks.append(Block(start, at + 1, is_whole=False))
    return blocks


def names_in(lines: list[bytes]) -> list[bytes]:
    """Return the Python paths listed in the blocks. Blocks written by version 2.0.0 list none."""
    inside = [line for start, stop, _ in blocks_in(lines) for line in lines[start:stop]]
    matches = (NAME.fullmatch(_text(line)) for line in inside)
    return [*dict.fromkeys(match[1] for match in matches if match)]


def _without(lines: list[bytes], blocks: list[Block]) -> list[list[bytes]]:
    """Return all lines except the added ones, split at the start of each block."""
    stops = [0, *(block.stop for block in blocks)]
    starts = [*(block.start for block in blocks), len(lines)]
    between = [lines[stop:start] for stop, start in zip(stops, starts, strict=True)]
    inside = [_remaining(lines[block.start : block.stop]) for block in blocks]
    return [between[0], *(a + b for a, b in zip(inside, between[1:], strict=True))]


def _user_lines(block: list[bytes]) -> list[bytes]:
    return [line for line in block if not _is_ours(_text(line))]


def _remaining(block: list[bytes]) -> list[bytes]:
    """Return the user's lines in a block, and any added lines on which those lines depend."""
    remaining = dict[int, bytes]()
    needs_guard = False  # whether the user's next line of code is indented
    for at in reversed(range(len(block))):
        line, text = block[at], _text(block[at])
        if not _is_ours(text):
            remaining[at] = line
            if text.strip() and not text.lstrip().startswith(b"#"):
                needs_guard = text[:1].isspace()
        elif text in (GUARD, OLD_GUARD):
            if needs_guard:
                remaining[at] = line
            needs_guard = False
        elif text == IMPORT and any(b"importlib" in each for each in remaining.values()):
            remaining[at] = line
    return [remaining[at] for at in sorted(remaining)]


def _is_ours(text: bytes) -> bool:
    is_code = text in (IMPORT, GUARD, OLD_GUARD, APPEND)
    return is_code or text.startswith((BEGIN, END)) or bool(NAME.fullmatch(text))


def _text(line: bytes) -> bytes:
    return line.rstrip(b"\r\n")


# -- the user's code -------------------------------------------------------------------------------


def _check_code(before: bytes, after: bytes) -> None:
    """Raise SetupError if a change to the added lines would affect the user's code."""
    old, new = _parsed(before), _parsed(after)
    if old is None:  # IPython reports the syntax error and ignores the file
        return
    ours = _our_lines(before)
    if new is None or _users_code(old) != _users_code(new):
        raise SetupError(_explain_conflict(old, before.splitlines(), ours))
    imports, uses = _importlib(old)
    if imports < min(uses, default=imports):
        imports, remaining = _importlib(new)
        if remaining and imports > min(remaining):
            first = min(uses - ours, default=min(uses))
            raise SetupError(
                f"Line {first} uses the added import. Write `{IMPORT.decode()}` above the marked "
                "lines, and try again."
            )


def _parsed(data: bytes) -> ast.Module | None:
    """Return the syntax tree, or None if the file is not valid Python."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            compile(data, "ipython_config.py", "exec", dont_inherit=True)
            tree = ast.parse(data)
            ast.dump(tree)  # raises RecursionError if the code is nested too deeply
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            return None
    return tree


def _users_code(tree: ast.Module) -> list[str]:
    """Return the user's statements, without the added ones, as strings to compare."""
    texts = [IMPORT, APPEND.strip(), *(text[len(b"if ") : -1] for text in (GUARD, OLD_GUARD))]
    import_, append, *guards = (ast.dump(ast.parse(text).body[0]) for text in texts)
    statements: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.If) and ast.dump(ast.Expr(node.test)) in guards:
            body = [each for each in map(ast.dump, node.body) if each != append]
            orelse = [*map(ast.dump, node.orelse)]
            statements += [f"if {body} else {orelse}"] if body or orelse else []
        elif ast.dump(node) != import_:
            statements.append(ast.dump(node))
    return statements


def _explain_conflict(tree: ast.Module, lines: list[bytes], ours: set[int]) -> str:
    """Return a message that explains how the user's code conflicts with the added lines."""
    for node in tree.body:
        span = {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
        users = [at for at in sorted(span - ours) if span & ours and _has_code(lines[at - 1])]
        if users:
            return (
                f"Line {users[0]} is part of the same statement as the added lines. Move it "
                "elsewhere, and try again."
            )
    return "The added lines were edited. Delete them by hand, and try again."


def _our_lines(data: bytes) -> set[int]:
    """Return the 1-based line numbers of the added lines."""
    lines = data.splitlines(keepends=True)
    inside = (at for start, stop, _ in blocks_in(lines) for at in range(start, stop))
    return {at + 1 for at in inside if _is_ours(_text(lines[at]))}


def _has_code(line: bytes) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith(b"#")


def _importlib(tree: ast.Module) -> tuple[float, set[int]]:
    """Return the line number of the first import of importlib, and the line numbers of its uses.

    If there is no such import, the first value is infinity.
    """
    imports, uses = inf, set[int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = (alias.asname or alias.name for alias in node.names)
            if any(name.partition(".")[0] == "importlib" for name in names):
                imports = min(imports, node.lineno)
        elif isinstance(node, ast.Name) and node.id == "importlib":
            uses.add(node.lineno)
    return imports, uses


# -- the file ------------------------------------------------------------------------------------


class Config:
    """A user's ipython_config.py, and a backup from before the lines were added.

    Attributes:
        path: The file's path, which can be a symbolic link.
        name: The path of the Python interpreter that the lines are for.
    """

    def __init__(self, path: str, name: bytes) -> None:
        self.path, self.name = path, name
        self._folder = os.path.dirname(path)
        self._copy = f"{path}.before-reserve_gpu"

    def check_owner(self, command: str) -> None:
        """Raise SetupError if root would create files in another user's home directory.

        Args:
            command: The command that the error message suggests to that user.
        """
        if os.geteuid():
            return
        ipython = os.path.dirname(self._folder)
        home = os.path.realpath(os.path.expanduser("~root"))
        # In a container, root's home can be a mounted folder that belongs to another user.
        if f"{os.path.realpath(ipython)}/".startswith(f"{home}/"):
            return
        parent = os.path.dirname(ipython)
        while not os.path.exists(parent):
            parent = os.path.dirname(parent)
        for path in (os.path.realpath(self.path), self._folder, ipython, parent):
            if os.path.exists(path) and (uid := os.stat(path).st_uid):
                user = _user(uid)
                raise SetupError(
                    f"{path} belongs to {user}. Root-owned files in it would prevent IPython from "
                    f"starting for {user}. Nothing was changed. As {user}, without sudo, "
                    f"run: {command}"
                )

    def has_block(self) -> bool:
        """Return whether the file contains added lines."""
        return bool(blocks_in(self._read().splitlines(keepends=True)))

    def check_add(self) -> None:
        """Raise SetupError if the lines are needed but can't be added.

        The lines are not needed if one of the user's own lines might already load the extension.
        """
        if os.path.isfile(self.path):
            data = self._read()
            is_needed = self.has_block() or not OWN_LINE.search(data)
            if is_needed and self._added(data) != data:
                self._check_change()
            return
        path = self.path
        while not os.path.lexists(path):
            path = os.path.dirname(path)
        is_writable = os.path.isdir(path) and os.access(path, os.W_OK | os.X_OK)
        if path == self.path or not is_writable:
            raise SetupError(
                f"{self.path} can't be created, because {path} is not a writable folder. To use "
                "another folder, set IPYTHONDIR."
            )

    def add(self) -> bool:
        """Add the lines for this Python, unless the file already contains them.

        Returns:
            Whether the file was changed.

        Raises:
            SetupError: The lines can't be added.
        """
        try:
            os.makedirs(self._folder, exist_ok=True)
        except OSError as error:
            text = f"{self._folder} can't be created: {error.strerror}."
            raise SetupError(text) from error
        with self._exclusive():
            return self._add()

    def _add(self) -> bool:
        data = self._read()
        if (new := self._added(data)) == data:
            return False
        if not os.path.isfile(self.path):
            self._write(data, new)
            return True
        self._check_change()
        is_first = not self.has_block() and not os.path.lexists(self._copy)
        if is_first:
            _replace(self._copy, data, like=os.path.realpath(self.path))
        try:
            self._write(data, new)
        except SetupError:
            if is_first:
                os.unlink(self._copy)
            raise
        return True

    def remove(self) -> list[str]:
        """Remove the lines for this Python, and return messages for the user.

        Raises:
            SetupError: The lines can't be removed.
        """
        with self._exclusive():
            return self._remove()

    def _remove(self) -> list[str]:
        data = self._read()
        if not self.has_block():
            return [f"{self.path} contains no added lines.", *self._user_mentions()]
        new, other_pythons, user_lines = self._removed(data)
        if new != data:
            self._check_change()
        copy = self._read_copy()
        if other_pythons:
            if new != data:
                self._write(data, new)
            action = "not for this Python" if new == data else "no longer for this Python"
            names = ", ".join(map(os.fsdecode, other_pythons))
            return [
                f"The lines in {self.path} are {action}, and are kept for {names}.",
                "While they are there, this Python also loads the extension if it is installed.",
            ]
        if not (new or os.path.lexists(self._copy) or os.path.islink(self.path)):
            self._delete(data)  # the file was created only for the lines
            return [f"Removed {self.path}, which contained nothing else.", *self._user_mentions()]
        # An older version did not record that it had added a line break.
        if copy is not None and new in (copy + b"\n", copy + b"\r\n") and not user_lines:
            new = copy
        self._write(data, new)
        if copy == new:
            os.unlink(self._copy)
        rest = "The rest of the file is unchanged."
        if user_lines:
            lines = "1 line" if user_lines == 1 else f"{user_lines} lines"
            rest = f"The rest of the file and {lines} that you added between them are unchanged."
        return [f"Removed the added lines from {self.path}. {rest}", *self._user_mentions()]

    def _user_mentions(self) -> list[str]:
        files = self.path, os.path.join(self._folder, "ipython_kernel_config.py")
        text = "Not removed: your own line in {} that mentions reserve_gpu."
        return [text.format(file) for file in files if _mentions_us(file)]

    def _read(self) -> bytes:
        try:
            data = _read(self.path)
        except OSError as error:
            raise SetupError(f"{self.path} can't be read: {error.strerror}.") from error
        if len(data) > SIZE_LIMIT:
            raise SetupError(f"{self.path} is larger than 1 MiB, and was not changed.")
        return data

    def _read_copy(self) -> bytes | None:
        if os.path.isfile(self._copy):
            with suppress(OSError):
                return _read(self._copy)
        return None

    def _added(self, data: bytes) -> bytes:
        with self._naming_file():
            return added(data, self.name)

    def _removed(self, data: bytes) -> Removal:
        with self._naming_file():
            return removed(data, self.name)

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Keep other runs of `reserve-gpu setup` from changing the file at the same time.

        Raises:
            SetupError: Another run is changing the file.
        """
        with ExitStack() as stack:
            with suppress(OSError):  # the folder does not exist, or NFS can't lock a folder
                folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
                stack.callback(os.close, folder)
                try:
                    file_control.lock_file(folder)
                except BlockingIOError as error:
                    raise SetupError(
                        f"Another reserve-gpu setup is changing {self.path}. Try again."
                    ) from error
            yield

    @contextmanager
    def _naming_file(self) -> Iterator[None]:
        try:
            yield
        except SetupError as error:
            raise SetupError(f"{self.path} was not changed. {error}") from error

    def _check_change(self) -> None:
        target = os.path.realpath(self.path)
        for path in (self.path, self._folder, os.path.dirname(target)):
            if not os.access(path, os.W_OK):
                raise SetupError(f"{path} can't be changed: Permission denied.")
        owner = os.stat(target).st_uid
        if os.geteuid() not in (0, owner):
            raise SetupError(
                f"{target} belongs to {_user(owner)}, and only its owner can replace it."
            )

    def _write(self, before: bytes, data: bytes) -> None:
        target = os.path.realpath(self.path)
        if os.path.isfile(target):
            self._check_change()
        if self._read() != before:
            raise SetupError(f"{self.path} was changed by another program. Try again.")
        _replace(target, data, like=target)

    def _delete(self, before: bytes) -> None:
        """Delete the file.

        Raises:
            SetupError: The file's content has changed, or the file can't be deleted.
        """
        draft, is_same = _draft(self.path), False
        try:
            os.rename(self.path, draft)
            try:
                is_same = _read(draft) == before
            finally:
                if not is_same:
                    os.link(draft, self.path)  # fails if an editor has created the file again
                os.unlink(draft)
        except OSError as error:
            text = f"{self.path} can't be removed: {error.strerror}."
            raise SetupError(text) from error
        if not is_same:
            raise SetupError(f"{self.path} was changed by another program. Try again.")


def _read(path: str) -> bytes:
    """Return at most `SIZE_LIMIT + 1` bytes of a file, or none if it is not a regular file."""
    if not os.path.isfile(path):
        return b""
    with open(path, "rb") as file:
        return file.read(SIZE_LIMIT + 1)


def _mentions_us(path: str) -> bool:
    """Return whether a file is readable and its code mentions reserve_gpu."""
    with suppress(OSError):
        return bool(OWN_LINE.search(_read(path)))
    return False


def _draft(path: str) -> str:
    """Return a new path for a temporary file in the given file's folder."""
    folder, base = os.path.split(path)
    return os.path.join(folder, f".{base}.{os.urandom(4).hex()}")


def _replace(path: str, data: bytes, like: str) -> None:
    """Replace a file atomically.

    Args:
        path: The file's path.
        data: The new content.
        like: The path of a file whose owner, mode and extended attributes are copied if it exists.

    Raises:
        SetupError: The file can't be written.
    """
    draft = _draft(path)
    try:
        status = os.stat(like) if os.path.exists(like) else None
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with open(os.open(draft, flags, 0o600 if status else 0o666), "wb") as file:
            file.write(data)
            if status:
                with suppress(PermissionError):  # the user might have left the group
                    os.fchown(file.fileno(), status.st_uid, status.st_gid)
                shutil.copystat(like, draft)
                os.utime(draft)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
        with suppress(OSError):  # some file systems can't sync directories
            _sync(os.path.dirname(path))
    except OSError as error:
        text = f"{path} can't be written, and is unchanged: {error.strerror}."
        raise SetupError(text) from error
    finally:
        with suppress(OSError):
            os.unlink(draft)


def _sync(folder: str) -> None:
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _user(uid: int) -> str:
    entry = accounts.find_user(uid)
    return entry.pw_name if entry else f"user {uid}"
