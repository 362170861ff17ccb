"""What somebody meant who typed something else: other words for it, and words that belong together.

Pure functions of words, for all that people type.
"""

from __future__ import annotations

import shlex
from itertools import takewhile
from typing import TYPE_CHECKING

from reserve_gpu.errors import RequestError, shown
from reserve_gpu.gpus import names

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

LIKENESS = 0.6  # of two words, from 0 to 1: `wiat` and `wait` have 0.75
LONGEST = 40  # characters; comparing takes long for what is much longer than any word of ours
LINE_LIMIT = 200  # characters of a line that is shown again


def near(word: str, known: Iterable[str]) -> list[str]:
    """Those of the known words that may be meant, at most one unless a single letter was typed.

    Hyphens at the beginning don't count: `wait` and `-w` may mean `--wait`.
    """
    import difflib

    bare = word.lstrip("-").lower()[:LONGEST]
    by_name = {each.lstrip("-"): each for each in known}
    if len(bare) == 1:
        return [each for name, each in by_name.items() if name.startswith(bare)]
    return [by_name[name] for name in difflib.get_close_matches(bare, by_name, 1, LIKENESS)]


def did_you_mean(words: Sequence[str], wrong: str, known: Iterable[str]) -> str:
    """A sentence with the line as it may be meant, empty if nothing is like the wrong word.

    words: the line as it was typed. wrong: one of the words. known: what may stand in its place.
    """
    typed, equals, value = wrong.partition("=")
    meant = near(typed, known)
    if len(meant) > 1:
        return f" Did you mean {' or '.join(meant)}?"
    right = [f"{each}{equals}{value}" for each in meant]
    line = [right[0] if word == wrong else word for word in words] if right else []
    return suggestion(line) if line else ""


def suggestion(line: Sequence[str]) -> str:
    """The sentence that shows a line, as words, as it can be typed."""
    return f" Did you mean: {shown(shlex.join(line), LINE_LIMIT)}"


def joined(words: Sequence[str], valued: Collection[str]) -> list[str]:
    """The words, with each value of several words in one: `--wait 1 h`, `--note until Friday`.

    Words after a value that name no device belong to it. Raises RequestError, with the form in
    quotation marks, where some of them do and some don't.
    valued: the options that take one value.
    """
    result, rest = [], list(words)
    while rest:
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        following = list(takewhile(lambda each: not each.startswith("-"), rest))
        if flag in valued:
            given = [value, *following] if equals else following
            del rest[: len(following)]
            result += [word, *following] if _is_single(given) else [_one_word(flag, given)]
        else:
            result.append(word)
    return result


def _is_single(given: Sequence[str]) -> bool:
    """Whether what follows an option is one value, or none, and then devices alone."""
    return all(map(names.is_name, given[1:]))


def _one_word(flag: str, given: Sequence[str]) -> str:
    """The option with its value of several words in one word. Raises RequestError."""
    if not any(map(names.is_name, given[1:])):
        return f"{flag}={' '.join(given)}"
    last = max(at for at, word in enumerate(given) if at and not names.is_name(word))
    quoted = shlex.join([flag, " ".join(given[: last + 1]), *given[last + 1 :]])
    raise RequestError(
        f"Which words belong to {flag}? Put them in quotation marks: {shown(quoted, LINE_LIMIT)}"
    )
