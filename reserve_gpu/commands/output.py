"""A command's output: its text, exit code, and format. Messages go to stderr."""

import json
import math
import os
import signal
import sys
from typing import TYPE_CHECKING, NamedTuple

from reserve_gpu.model.option import Option
from reserve_gpu.system import procfs
from reserve_gpu.system.nonblocking import Printer

if TYPE_CHECKING:
    from reserve_gpu.model.errors import ReserveGPUError
    from reserve_gpu.render.pictures import Shown

FORMATS = {"text": "the default", "json": "for programs", "html": "a web page"}
READER_LIMIT_S = 2.0  # seconds to wait for a slow reader of stderr while holding a GPU


class Output(NamedTuple):
    """A command's output.

    Attributes:
        text: The text to print on stdout.
        code: The process's exit code.
        form: The text's format, which is one of the `--format` choices.
    """

    text: str = ""
    code: int = 0
    form: str = "text"


def format_options(**extra_formats: str) -> tuple[Option, ...]:
    """Return the `--format` option, and the `--json` option that is short for `--format json`.

    Args:
        extra_formats: A description of each additional format, by format name.
    """
    formats = {**FORMATS, **extra_formats}
    choices_help = ", ".join(f"{name} ({text})" for name, text in formats.items())
    return (
        Option("--format", choices_help, choices=tuple(formats), default="text"),
        Option(
            "--json", "short for --format json", dest="format", action="store_const", const="json"
        ),
    )


def answer(seen: "Shown", form: str, about: str, code: int = 0) -> Output:
    """Render a result as text, JSON, or HTML.

    Args:
        seen: The result to render.
        form: The format: `text`, `json`, or `html`.
        about: The subject for the HTML page's title, such as `GPUs`.
        code: The process's exit code.
    """
    if form == "text":
        return Output(seen.picture().to_text(), code)
    if form == "json":
        return Output(json.dumps(seen.to_dict(), indent=2), code, form)
    from reserve_gpu.commands.export import html_page

    return Output(html_page.page(seen, about), code, form)


def print_stderr(text: str, *, is_event: bool = False) -> None:
    """Print text to stderr, because stdout belongs to the command. Ignore a missing reader.

    While holding a GPU, this process waits for a slow reader for up to `READER_LIMIT_S` seconds,
    and then drops the text. Otherwise, a full pipe could keep an idle GPU reserved forever.

    Args:
        text: The text to print.
        is_event: Whether the text is an event. For events, the wait is always limited.
    """
    # Importing the module here could lose the text: Ctrl-C would end the process without it. A
    # reservation that was inherited over exec might not have been adopted.
    module = sys.modules.get("reserve_gpu.reservation.session")
    is_holding = (module is not None and module.session().reservation is not None) or (
        procfs.reservation_pid() == os.getpid()
    )
    printer = Printer(sys.stderr)
    printer.print(f"{text}\n", READER_LIMIT_S if is_event or is_holding else math.inf)
    printer.close()


def error_text(error: "ReserveGPUError") -> str:
    """Return an error's text for stderr."""
    return error.picture.to_text(sys.stderr) if error.picture else str(error)


def end_with_ssh() -> None:
    """Raise SystemExit on SIGTERM, so that cleanup code can stop SSH clients that hang."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
