"""What an option is; a table of them makes a parser."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reserve_gpu.model.errors import RequestError
from reserve_gpu.model.untrusted import sanitize

if TYPE_CHECKING:
    from argparse import _ActionsContainer
    from collections.abc import Callable, Iterable, Sequence
    from typing import TypedDict

    from typing_extensions import Unpack

    class Settings(TypedDict, total=False):
        """What argparse's `add_argument` takes besides."""

        action: str
        choices: Sequence[str]
        const: object
        default: object
        dest: str
        nargs: str
        required: bool
        type: Callable[[str], object]


DAYS = "Mon Tue Wed Thu Fri Sat Sun"  # what Tab offers for a moment


class Option:
    """One argument, as argparse takes it.

    usage: its names, and what its value is called: `-n --count COUNT`. Without a value it is a
    switch. text: its help. offers: values that Tab offers. suits_commands: also where a command is
    run, which ends by itself. settings: argparse's keyword arguments.
    """

    def __init__(
        self,
        usage: str,
        text: str,
        offers: str = "",
        *,
        suits_commands: bool = True,
        **settings: Unpack[Settings],
    ) -> None:
        flags = [word for word in usage.split() if not word.isupper()]
        value = usage.split()[len(flags) :]
        keywords: dict[str, Any] = {"help": text, **settings}
        if value:
            keywords["metavar"] = value[0]
        elif not settings:
            keywords["action"] = "store_true"
        elif "choices" in settings:
            keywords["type"] = self._choice
        self.flags, self.offers = tuple(flags), tuple(offers.split())
        self.suits_commands = suits_commands
        self.settings = keywords
        self.flag = flags[-1]  # `--min-memory`; `devices` for the names of devices
        # What the parser calls its value, and reserve() its keyword.
        self.attribute = settings.get("dest") or self.flag.lstrip("-").replace("-", "_")

    def _choice(self, text: str) -> str:
        choices = self.settings["choices"]
        if text not in choices:
            raise RequestError(f"There is no {self.flag} {sanitize(text)}. {likely(text, choices)}")
        return text


def add(options: Iterable[Option], parser: _ActionsContainer) -> None:
    """Let the parser, or a chapter of its help, take these options."""
    for option in options:
        parser.add_argument(*option.flags, **option.settings)


def likely(word: str, known: Sequence[str], before: str = "") -> str:
    """Return `Did you mean NEAREST?`, or all that is known. before: to each of them."""
    from difflib import get_close_matches

    for near in get_close_matches(word, known, 1):
        return f"Did you mean {before}{near}?"
    return f"There are: {', '.join(before + each for each in known)}."
