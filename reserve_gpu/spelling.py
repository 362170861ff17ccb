"""What somebody may have meant who typed something else.

Pure functions of words, for all that people type.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from reserve_gpu.errors import shown

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

LIKENESS = 0.6  # of two words, from 0 to 1: `wiat` and `wait` have 0.75
LINE_LIMIT = 200  # characters of a line that is shown again


def near(word: str, known: Iterable[str]) -> list[str]:
    """Return the known words that may be meant: at most one, unless a single letter was typed.

    Hyphens at the beginning don't count: `wait` and `-w` may mean `--wait`.
    """
    import difflib

    bare = word.lstrip("-").lower()
    by_name = {each.lstrip("-"): each for each in known}
    if len(bare) == 1:
        return [each for name, each in by_name.items() if name.startswith(bare)]
    return [by_name[name] for name in difflib.get_close_matches(bare, by_name, 1, LIKENESS)]


def did_you_mean(words: Sequence[str], wrong: str, known: Iterable[str]) -> str:
    """Return a sentence with the line as it may be meant, empty if nothing is like the word.

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
    """Return the sentence that shows a line, as words, as it can be typed."""
    return f" Did you mean: {shown(shlex.join(line), LINE_LIMIT)}"


def in_quotes(words: Sequence[str], wrong: str, valued: Collection[str]) -> str:
    """Return a sentence on a word that may belong to an option's value, empty if it can't.

    words: as they were typed. wrong: one of them. valued: the options that take one value.
    """
    end = words.index(wrong) + 1
    start = max((at for at in range(end) if words[at].startswith("-")), default=0)
    flag, *value = words[start].split("=", 1)
    if flag not in valued:
        return ""
    quoted = shlex.join([flag, " ".join([*value, *words[start + 1 : end]])])
    return f" Put a value of several words in quotation marks: {shown(quoted, LINE_LIMIT)}"
