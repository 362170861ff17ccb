"""Real IPython shells in the test process, which show what a notebook would."""

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

# What a shell adds, and to what.
ADDED: tuple[tuple[Any, str], ...] = (
    *((builtins, name) for name in ("__IPYTHON__", "display", "get_ipython")),
    *((sys, name) for name in ("ps1", "ps2", "ps3")),
)


class Shell:
    """An IPython shell with the extension loaded, until `close`.

    shell: the InteractiveShell, which IPython takes for the only one until the next is made or
        runs a cell.
    is_notebook: it says of itself that somebody sits in front of a notebook.
    """

    def __init__(self, *, is_notebook: bool = False) -> None:
        self._before = {(where, name): vars(where).get(name, ABSENT) for where, name in ADDED}
        self._main = sys.modules["__main__"]
        # With the list itself: a test may have put another in its place, and have taken it back.
        self._path = sys.path, list(sys.path)
        self._instances = {kind: kind._instance for kind in Displaying._walk_mro()}
        config, kind = Config(), cast("Any", Displaying)
        config.HistoryManager.enabled = False  # it has a thread and a database
        config.Completer.use_jedi = False  # it makes a folder in the home of who runs the tests
        config.InteractiveShell.colors = "nocolor" if version_info[0] > 8 else "NoColor"
        self.shell: Any = kind(config=config)
        if is_notebook:
            self.shell.kernel = object()
            self.shell.get_parent = lambda: {"content": {"allow_stdin": True}}
        self._be_the_only_one()
        self.shell.extension_manager.load_extension("reserve_gpu")

    def run(self, code: str) -> Cell:
        """Run a cell to its end."""
        self._be_the_only_one()
        self.shell.seen = []
        outputs = self.shell.display_pub.outputs
        outputs.clear()
        with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err, printed():
            result = self.shell.run_cell(code, store_history=True)
        error = result.error_before_exec or result.error_in_exec
        name = type(error).__name__ if error else None
        values = [output["data"] for output in outputs]
        return Cell(out.getvalue(), err.getvalue(), name, self.shell.seen, values)

    def complete(self, text: str) -> list[str]:
        """Return what Tab offers at the end of the text, as kernels ask for it."""
        self._be_the_only_one()
        with provisionalcompleter(), redirect_stderr(StringIO()), printed():
            raw = self.shell.Completer.completions(text, len(text))
            return [completion.text for completion in rectify_completions(text, raw)]

    def close(self) -> None:
        """Take back what a shell leaves in the process that it runs in."""
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

    def _be_the_only_one(self) -> None:
        """Become what get_ipython() gives, and the module that cells run in."""
        for kind in self._instances:
            kind._instance = self.shell
        sys.modules["__main__"] = self.shell.user_module


ABSENT = object()


class Output(DisplayHook):
    """Keep the value of a cell as a notebook is sent it: in all its forms."""

    def write_output_prompt(self) -> None:
        """Leave out `Out[1]:`."""

    def write_format_data(self, format_dict: Any, md_dict: Any = None) -> None:
        """Keep it among what was displayed."""
        del md_dict
        publisher: Any = self.shell and self.shell.display_pub
        publisher.outputs.append({"data": format_dict})


class Displaying(InteractiveShell):
    """Keep what a notebook would be sent. seen: the lines of tracebacks."""

    displayhook_class = Output
    display_pub_class = CapturingDisplayPublisher
    seen: list[str]

    def _showtraceback(self, _kind: Any, _value: Any, lines: list[str]) -> None:
        self.seen += lines


@contextmanager
def printed() -> Iterator[None]:
    """Print warnings as a notebook does; to pytest each is an error."""

    def show(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: object
    ) -> None:
        sys.stderr.write(warnings.formatwarning(message, category, filename, lineno))

    with warnings.catch_warnings():
        warnings.simplefilter("default")
        setattr(warnings, "showwarning", show)  # noqa: B010 - mypy allows no other way
        yield
