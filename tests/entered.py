"""Count how much of our code a reservation, a refusal and a cell go through.

    python -m tests.driver two -- python -m tests.entered reserve|refuse|cell

`reserve`: the lines of code of all functions that a first, bare reservation enters, on all threads.
`refuse`: the same where somebody else holds every GPU, with the text of the refusal. Prints each
function with its lines, and the sum.
`cell`: how often a line of ours runs in the cell `1+1` beside a held GPU. Prints each line, with
how often it ran, and the sum.
"""

from __future__ import annotations

import _thread
import ast
import io
import os
import subprocess
import sys
import tokenize
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType

PACKAGE = str(Path(find_spec("reserve_gpu").origin).parent)  # type: ignore[union-attr,arg-type]
HOLD_ALL = "import reserve_gpu; reserve_gpu.reserve(count={}); print(flush=True); input()"
NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
}  # fmt: skip
WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class Watch:
    """Watches what runs of ours on all threads that begin from now on, and on this one.

    codes: the functions that were entered. lines: how often each line of ours ran.
    """

    def __init__(self) -> None:
        self.codes: set[CodeType] = set()
        self.lines: Counter[tuple[str, int]] = Counter()
        self._start = _thread.start_new_thread
        _thread.start_new_thread = self._start_watched
        sys.settrace(self.see)

    def see(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        """Note a call, or a line, of ours; as sys.settrace wants it."""
        path = frame.f_code.co_filename
        if not path.startswith(PACKAGE):
            return None
        if event == "call":
            self.codes.add(frame.f_code)
        if event == "line":
            self.lines[path, frame.f_lineno] += 1
        return self.see

    def _start_watched(self, function: Any, arguments: Any, *more: Any) -> int:
        def watched(*arguments: Any, **keywords: Any) -> None:
            sys.settrace(self.see)
            function(*arguments, **keywords)

        return self._start(watched, arguments, *more)


def lines_of_code(text: str) -> set[int]:
    """Return the lines with a token of code: no blank lines, no comments, no docstrings."""
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            code |= {*range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, WITH_DOCSTRING) and ast.get_docstring(node) is not None:
            code -= {*range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)}
    return code


def functions(codes: set[CodeType]) -> dict[str, set[int]]:
    """Return the lines of code of the functions: of one within another they are that one's, too."""
    found: dict[str, set[int]] = {}
    for path in {code.co_filename for code in codes}:
        text = Path(path).read_text()
        lines = lines_of_code(text)
        entered = {code.co_firstlineno for code in codes if code.co_filename == path}
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.FunctionDef):
                continue
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            if first in entered:
                body = {*range(node.lineno, (node.end_lineno or 0) + 1)}
                found[f"{path}:{node.lineno}: {node.name}"] = lines & body
    return found


def lines_entered(watch: Watch) -> int:
    """Print the functions that were entered, and return how many lines of code they have."""
    found = functions(watch.codes)
    for name, lines in sorted(found.items(), key=lambda item: len(item[1])):
        print(f"{len(lines):4} {os.path.relpath(name, PACKAGE)}")
    both = {(name.partition(":")[0], line) for name, lines in found.items() for line in lines}
    return len(both)


def reserve() -> int:
    """Reserve the first GPU in this process."""
    watch = Watch()
    import reserve_gpu

    reserve_gpu.reserve()
    return lines_entered(watch)


def refuse() -> int:
    """Ask for a GPU where another process holds both."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD_ALL.format(2)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert holder.stdout
    assert holder.stdout.readline(), "the GPUs are not to be had"
    watch = Watch()
    import reserve_gpu

    try:
        reserve_gpu.reserve()
    except reserve_gpu.NoFreeDeviceError as error:
        print(error)
    else:
        raise AssertionError("a GPU was free")
    finally:
        holder.kill()
        holder.wait()
    return lines_entered(watch)


def cell() -> int:
    """Run `1+1` in a shell that has reserved a GPU, as the cell after the next one."""
    watch = Watch()
    from IPython.core.interactiveshell import InteractiveShell

    shell: Any = InteractiveShell()  # type: ignore[no-untyped-call]
    for code in ("%load_ext reserve_gpu", "%reserve_gpu", "1+1"):
        shell.run_cell(code, store_history=True).raise_error()
    watch.lines.clear()
    shell.run_cell("1+1", store_history=True)
    sys.settrace(None)
    for (path, line), times in sorted(watch.lines.items()):
        text = Path(path).read_text().splitlines()[line - 1]
        print(f"{times:4} {os.path.relpath(path, PACKAGE)}:{line}: {text.strip()}")
    return watch.lines.total()


if __name__ == "__main__":
    print({"reserve": reserve, "refuse": refuse, "cell": cell}[sys.argv[1]]())
