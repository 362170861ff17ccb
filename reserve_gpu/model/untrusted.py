"""Read and print text of other processes: it may be cut, binary, huge, forged or invisible.

A function raises ValueError for what makes no sense; what `Fields`, `known` and `fields_of` return
is without that.
"""

import functools
import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, get_args

T = TypeVar("T")

SIZE_LIMIT = 1 << 20  # bytes or characters of all of it
TEXT_LIMIT = 300  # characters of each text
LIST_LIMIT = 256  # devices, holders or processes in one list
LATEST_S = 1e11  # no time since the epoch is later
MOST_MIB = 1e9  # no device has more memory than that
PIDS = 1 << 31
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Printable to Python, but drawn as nothing: Unicode's Default_Ignorable_Code_Point, and blanks.
# https://www.unicode.org/Public/UCD/latest/ucd/DerivedCoreProperties.txt
_INVISIBLE = {
    *"\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u3164\uffa0",
    *map(chr, range(0xFE00, 0xFE10)),  # variation selectors
    *map(chr, range(0xE0100, 0xE01F0)),
    *"\u2800\u2d7f\U0001107f\U00016fe4\U0001d159",
}
_MOST_MARKS = 4  # on a letter: Vietnamese and Thai have 2, Devanagari 3, Hebrew 4


def sanitize(text: str, limit: int = 80) -> str:
    """Make untrusted text safe to print: one line, bounded, without invisible characters.

    Args:
        text: The text.
        limit: The most characters of the result.

    Returns:
        The text, in which U+FFFD stands for what can't be printed or seen, for combining marks
        without a letter, and for marks above the limit of a letter.
    """
    clean = text[: limit + 1]
    if not (clean.isascii() and clean.isprintable()):
        clean = _cleaned(clean)
    return clean if len(text) <= limit else clean[: limit - 1] + "\N{HORIZONTAL ELLIPSIS}"


def _cleaned(text: str) -> str:
    from unicodedata import category

    clean: list[str] = []
    marks = 0  # on the last letter
    has_letter = is_dropped = False
    for letter in text:
        kind = category(letter)
        if not letter.isprintable() or letter in _INVISIBLE:
            clean.append(_REPLACEMENT)
            has_letter = is_dropped = False
        elif is_mark(letter) or kind == "Mc":  # the latter has a column, and none of its own place
            marks += kind != "Mc"
            is_fit = has_letter and marks <= _MOST_MARKS
            if is_fit or not is_dropped:
                clean.append(letter if is_fit else _REPLACEMENT)
            is_dropped = not is_fit
        else:
            clean.append(letter)
            marks, has_letter, is_dropped = 0, letter != " ", False
    return "".join(clean)


def is_mark(letter: str) -> bool:
    """Return whether a letter is drawn on the letter before it, in no column of its own.

    The vowels and final consonants of Hangul are, in a syllable that is not composed.
    """
    from unicodedata import category

    is_hangul = "\u1160" <= letter <= "\u11ff" or "\ud7b0" <= letter <= "\ud7fb"
    return is_hangul or category(letter) in ("Mn", "Me")


def parsed(data: str | bytes, limit: int = SIZE_LIMIT) -> Any:
    """Return what JSON of no more than so many bytes or characters says."""
    if len(data) > limit:
        raise ValueError(data[:20])
    try:
        # json.loads would look for UTF-16 first.
        return json.loads(data if isinstance(data, str) else data.decode())
    except RecursionError as error:
        raise ValueError(data[:20]) from error


def encoded(fields: Mapping[str, Any], limit: int) -> bytes:
    """Return a table as JSON that `parsed` reads with this limit in bytes.

    The longest texts are cut until it fits. Letters are UTF-8; a lone surrogate, which UTF-8 lacks,
    becomes an escape.
    """
    texts = {name: value for name, value in fields.items() if isinstance(value, str)}
    while len(data := _json({**fields, **texts})) > limit and any(texts.values()):
        longest = max(texts, key=lambda name: len(_json(texts[name])))
        texts[longest] = texts[longest][: len(texts[longest]) // 2]
    return data


def _json(value: object) -> bytes:
    written = json.dumps(value, ensure_ascii=False)
    return written.encode(errors="backslashreplace")


def text(value: Any, limit: int = TEXT_LIMIT) -> str:
    """Return a text, cut off where it is too long."""
    if isinstance(value, str):
        return value[:limit]
    raise ValueError(value)


def number(value: Any, limit: float = LATEST_S) -> float:
    """Return a number from 0 to the limit; True is none, and NaN neither."""
    if (type(value) is float or type(value) is int) and 0 <= value <= limit:
        return value
    raise ValueError(value)


def integer(value: Any, limit: float = LATEST_S) -> int:
    """Return a whole number from 0 to the limit."""
    if type(value) is int and 0 <= value <= limit:
        return value
    raise ValueError(value)


def pid(value: Any) -> int:
    """Return a number that a process can have."""
    if type(value) is int and 0 < value < PIDS:
        return value
    raise ValueError(value)


def boolean(value: Any) -> bool:
    """Return True or False."""
    if isinstance(value, bool):
        return value
    raise ValueError(value)


def known(read: Callable[[Any], T], value: Any) -> T | None:
    """Return what one of these functions reads, None for what makes no sense."""
    try:
        return read(value)
    except ValueError:
        return None


class Fields:
    """A table; each method returns the value of a name, None or no items if it makes no sense."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.fields = fields

    def text(self, name: str) -> str | None:
        """Return a text."""
        return known(text, self.fields.get(name))

    def number(self, name: str) -> float | None:
        """Return a number."""
        return known(number, self.fields.get(name))

    def integer(self, name: str) -> int | None:
        """Return a whole number."""
        return known(integer, self.fields.get(name))

    def boolean(self, name: str) -> bool | None:
        """Return True or False."""
        return known(boolean, self.fields.get(name))

    def texts(self, name: str, limit: int = LIST_LIMIT) -> list[str]:
        """Return the texts in a list."""
        return [value[:TEXT_LIMIT] for value in self._items(name, limit) if isinstance(value, str)]

    def tables(self, name: str, limit: int = LIST_LIMIT) -> "list[Fields]":
        """Return the tables in a list."""
        return [Fields(value) for value in self._items(name, limit) if isinstance(value, dict)]

    def _items(self, name: str, limit: int) -> list[Any]:
        value = self.fields.get(name)
        return value[:limit] if isinstance(value, list) else []


class FormatError(ValueError):
    """The JSON has another version, or is none of ours. version: the one that it names."""

    def __init__(self, version: int | None) -> None:
        super().__init__(f"version {version}")
        self.version = version


def table(fields: object, version: int, needed: str) -> Fields:
    """Return the outermost table of an answer. Raises FormatError. needed: a list that it has."""
    said = Fields(fields if isinstance(fields, dict) else {})
    found = said.integer("version")
    if found != version or not isinstance(said.fields.get(needed), list):
        raise FormatError(None if found == version else found)
    return said


def fields_of(kind: type, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of such a tuple, as far as each has the type that it should have."""
    readers = _readers(kind).items()
    values = {name: known(read, fields[name]) for name, read in readers if name in fields}
    return {name: value for name, value in values.items() if value is not None}


@functools.cache
def _readers(kind: type) -> dict[str, Callable[[Any], Any]]:
    """Return how to read each field: by its name, or by its type."""
    by_type: dict[Any, Callable[[Any], Any]]
    by_type = {str: text, int: integer, float: number, bool: boolean}
    types = {name: (get_args(of) or (of,))[0] for name, of in kind.__annotations__.items()}
    return {
        name: pid if name == "pid" else by_type[of] for name, of in types.items() if of in by_type
    }
