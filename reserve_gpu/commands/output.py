"""The output of a command, and its formats."""

import json
import signal
import sys
from typing import TYPE_CHECKING, NamedTuple

from reserve_gpu.model.option import Option

if TYPE_CHECKING:
    from reserve_gpu.render.pictures import Shown

FORMATS = {"text": "the default", "json": "for programs", "html": "a page"}


class Output(NamedTuple):
    """The result of a command.

    Attributes:
        text: The text for stdout.
        code: The exit code.
        form: The format of the text, as in `--format html`.
    """

    text: str = ""
    code: int = 0
    form: str = "text"


def format_options(**more: str) -> tuple[Option, ...]:
    """Return --format, and its short form --json.

    Args:
        more: Further formats of a command, and their help.
    """
    formats = {**FORMATS, **more}
    words = ", ".join(f"{name} ({text})" for name, text in formats.items())
    return (
        Option("--format", words, choices=tuple(formats), default="text"),
        Option("--json", "--format json", dest="format", action="store_const", const="json"),
    )


def answer(seen: "Shown", form: str, about: str, code: int = 0) -> Output:
    """Return a result in a format.

    Args:
        seen: The result.
        form: The name of the format.
        about: The subject for a title, such as `GPUs`.
        code: The exit code.
    """
    if form == "text":
        return Output(seen.picture().to_text(), code)
    if form == "json":
        return Output(json.dumps(seen.to_dict(), indent=2), code, form)
    from reserve_gpu.commands.export import html_page

    return Output(html_page.page(seen, about), code, form)


def end_with_ssh() -> None:
    """Make SIGTERM end ssh as well, which may wait for a host that hangs."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
