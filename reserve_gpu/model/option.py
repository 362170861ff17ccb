"""Option definitions from which parsers and Tab completion are built."""

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
        """Keyword arguments for argparse's `add_argument`."""

        action: str
        choices: Sequence[str]
        const: object
        default: object
        dest: str
        nargs: str
        required: bool
        type: Callable[[str], object]


DAYS = "Mon Tue Wed Thu Fri Sat Sun"  # Tab completions for an option that accepts a time


class Option:
    """An option or positional argument.

    Args:
        usage: The names and a placeholder for the value, such as `-n --count COUNT`. An option
            without a placeholder is a switch, unless `settings` says otherwise.
        text: The help text.
        offers: The values that Tab completion offers, separated by spaces.
        suits_commands: Whether the option is also available in `reserve-gpu run`.
        **settings: Keyword arguments for argparse's `add_argument`.

    Attributes:
        flags: The option's names, such as `("-n", "--count")`.
        offers: The values that Tab completion offers.
        suits_commands: Whether the option is also available in `reserve-gpu run`.
        settings: Keyword arguments for argparse's `add_argument`.
        flag: The last item of `flags`, such as `--min-memory`, or `devices` for the positional
            argument.
        attribute: The name under which the parser stores the value. The corresponding argument of
            `reserve()` has the same name.
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
        self.flag = flags[-1]
        self.attribute = settings.get("dest") or self.flag.lstrip("-").replace("-", "_")

    def _choice(self, text: str) -> str:
        choices = self.settings["choices"]
        if text not in choices:
            value = repr(sanitize(text))
            raise RequestError(f"Invalid value {value} for {self.flag}. {likely(text, choices)}")
        return text


def add(options: Iterable[Option], parser: _ActionsContainer) -> None:
    """Add the options to a parser or to an argument group."""
    for option in options:
        parser.add_argument(*option.flags, **option.settings)


def likely(word: str, known: Sequence[str], before: str = "") -> str:
    """Return a suggestion for a mistyped word.

    Args:
        word: The mistyped word.
        known: The valid words.
        before: A prefix to show before each valid word, such as `--`.

    Returns:
        `Did you mean WORD?` if a valid word is similar, or else a list of all valid words.
    """
    if match := closest(word, known):
        return f"Did you mean {before}{match}?"
    return f"Choose from: {', '.join(before + each for each in known)}."


def closest(word: str, known: Sequence[str]) -> str | None:
    """Return the valid word that is most similar to a mistyped word, or None if none is similar."""
    from difflib import get_close_matches

    return next(iter(get_close_matches(word, known, 1)), None)
