"""Tab completion for %reserve_gpu, which offers options and example values.

This module is loaded when the user first presses Tab. Completion reads only the typed line and
never accesses a device.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from reserve_gpu.ipython.parser import HELP, OTHERS
from reserve_gpu.request_options import DEVICES, REQUEST

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

OPTIONS = tuple(option for option in (*REQUEST, *OTHERS, HELP) if option is not DEVICES)
WITH_VALUE = {
    flag: option
    for option in OPTIONS
    if option.settings.get("action") != "store_true"
    for flag in option.flags
}


def matches(shell: InteractiveShell, context: Any) -> dict[str, Any]:
    """Return completions in the matcher format of IPython 8.6 and later."""
    from IPython.core.completer import SimpleCompletion

    before = context.text_until_cursor
    arguments = _arguments(shell, before)
    if arguments is None:
        return {"completions": []}
    word, texts = complete(arguments)
    if not texts:
        # An empty list would not suppress IPython's own completions for Python names and files.
        word = word or "".join(re.findall(r"\S+\s*$", before))
        texts = [word]
    return {
        "completions": [
            SimpleCompletion(text, type="option" if text.startswith("-") else "value")
            for text in texts
        ],
        "matched_fragment": word,
        "ordered": True,
        "suppress": True,
    }


def endings(shell: InteractiveShell, event: Any) -> list[str]:
    """Return completions for IPython versions before 8.6.

    Those versions replace only the last part of a word such as `--min-memory`.
    """
    arguments = _arguments(shell, event.text_until_cursor)
    if arguments is None:
        return []
    word, texts = complete(arguments)
    return [text[len(word) - len(event.symbol) :] for text in texts]


def complete(arguments: str) -> tuple[str, list[str]]:
    """Return the last word of the magic's arguments, and the completions for that word."""
    *words, word = re.split(r"[\s=]+", arguments)
    if words and words[-1] in WITH_VALUE and not word.startswith("-"):
        values = WITH_VALUE[words[-1]].offers
        return word, [value for value in values if value.lower().startswith(word.lower())]
    unused = [option.flag for option in OPTIONS if not {*words}.intersection(option.flags)]
    return word, [flag for flag in unused if flag.startswith(word)]


def _arguments(shell: InteractiveShell, before: str) -> str | None:
    """Return the text after the magic's name, or None if the line does not call the magic."""
    match = re.match(r"\s*(%?)reserve_gpu\s(?!\s*=)", before)
    is_automagic = shell.automagic and "reserve_gpu" not in shell.user_ns
    return before[match.end() :] if match and (match[1] or is_automagic) else None
