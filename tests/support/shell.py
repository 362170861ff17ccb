"""IPython shells in the test process, with the output that a notebook would show."""

from __future__ import annotations

import atexit
import builtins
import sys
import warnings
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from typing import TYPE_CHECKING, Any, cast

from IPython import version_info
from IPython.core.completer import provisionalcompleter, rectify_completions
from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from tests.support.machine import Cell

if TYPE_CHECKING:
    from collections.abc import Iterator

# The names that a shell adds to modules.
ADDED: tuple[tuple[Any, str], ...] = (
    *((builtins, name) for name in ("__IPYTHON__", "display", "get_ipython")),
    *((sys, name) for name in ("ps1", "ps2", "ps3")),
)


class Shell:
    """An IPython shell with the extension loaded, until `close`.

    Attributes:
        shell: The InteractiveShell; it is IPython's global instance until another shell is created
            or runs a cell.

    Args:
        is_notebook: Whether the shell accepts input, as the kernel of an open notebook does.
    """

    def __init__(self, *, is_notebook: bool = False) -> None:
        self._before = {(where, name): vars(where).get(name, ABSENT) for where, name in ADDED}
        self._main = sys.modules["__main__"]
        # A test may replace the list, so keep the list itself and its entries.
        self._path = sys.path, list(sys.path)
        self._instances = {kind: kind._instance for kind in Displaying._walk_mro()}
        config, kind = Config(), cast("Any", Displaying)
        config.HistoryManager.enabled = False  # avoids a thread and a database
        config.Completer.use_jedi = False  # takes seconds to load, and writes to the home directory
        config.InteractiveShell.colors = "nocolor" if version_info[0] > 8 else "NoColor"
        self.shell: Any = kind(config=config)
        if is_notebook:
            self.shell.kernel = object()
            self.shell.get_parent = lambda: {"content": {"allow_stdin": True}}
        self._activate()
        self.shell.extension_manager.load_extension("reserve_gpu")

    def run(self, code: str) -> Cell:
        """Run a cell, and return its output."""
        self._activate()
        self.shell.seen = []
        outputs = self.shell.display_pub.outputs
        outputs.clear()
        with (
            redirect_stdout(StringIO()) as out,
            redirect_stderr(StringIO()) as err,
            print_warnings(),
        ):
            result = self.shell.run_cell(code, store_history=True)
        error = result.error_before_exec or result.error_in_exec
        name = type(error).__name__ if error else None
        values = [output["data"] for output in outputs]
        return Cell(out.getvalue(), err.getvalue(), name, self.shell.seen, values)

    def complete(self, text: str) -> list[str]:
        """Return the completions at the end of the text, as a kernel returns them."""
        self._activate()
        with provisionalcompleter(), redirect_stderr(StringIO()), print_warnings():
            raw = self.shell.Completer.completions(text, len(text))
            return [completion.text for completion in rectify_completions(text, raw)]

    def close(self) -> None:
        """Undo the changes of the shell to this process."""
        self.shell.extension_manager.unload_extension("reserve_gpu")
        atexit.unregister(self.shell.atexit_operations)
        for kind, instance in self._instances.items():
            kind._instance = instance
        sys.modules["__main__"] = self._main
        path, entries = self._path
        path[:] = entries
        for (where, name), value in self._before.items():
            if value is not ABSENT:
                setattr(where, name, value)
            elif hasattr(where, name):
                delattr(where, name)

    def _activate(self) -> None:
        """Make this shell the result of get_ipython(), and its module the main module."""
        for kind in self._instances:
            kind._instance = self.shell
        sys.modules["__main__"] = self.shell.user_module


ABSENT = object()


class Output(DisplayHook):
    """Store the value of a cell with all its MIME types."""

    def write_output_prompt(self) -> None:
        """Omit `Out[1]:`."""

    def write_format_data(self, format_dict: Any, md_dict: Any = None) -> None:
        """Add the value to the outputs."""
        del md_dict
        publisher: Any = self.shell and self.shell.display_pub
        publisher.outputs.append({"data": format_dict})


class Displaying(InteractiveShell):
    """A shell that stores its outputs, and the lines of tracebacks in `seen`."""

    displayhook_class = Output
    display_pub_class = CapturingDisplayPublisher
    seen: list[str]

    def _showtraceback(self, _kind: Any, _value: Any, lines: list[str]) -> None:
        self.seen += lines


@contextmanager
def print_warnings() -> Iterator[None]:
    """Print warnings as a notebook does, instead of raising them as pytest does."""

    def show(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: object
    ) -> None:
        sys.stderr.write(warnings.formatwarning(message, category, filename, lineno))

    with warnings.catch_warnings():
        warnings.simplefilter("default")
        setattr(warnings, "showwarning", show)  # noqa: B010 - mypy allows no other way
        yield
