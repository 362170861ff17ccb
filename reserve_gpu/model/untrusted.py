"""Read and sanitize text from other processes, which may be truncated, binary, huge or forged.

The readers of single values raise ValueError for an invalid value. `Fields`, `known` and
`fields_of` leave invalid values out.
"""

import functools
import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, get_args

T = TypeVar("T")

SIZE_LIMIT = 1 << 20  # maximum bytes or characters of a JSON document
TEXT_LIMIT = 300  # maximum length of each string, in characters
LIST_LIMIT = 256  # maximum number of devices, holders or processes in a list
LATEST_S = 1e11  # latest valid time in seconds since the epoch
MOST_MIB = 1e9  # largest valid amount of memory in MiB
PIDS = 1 << 31  # upper bound of process IDs
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Invisible characters that str.isprintable() accepts: Unicode's Default_Ignorable_Code_Point, and
# blanks.
# https://www.unicode.org/Public/UCD/latest/ucd/DerivedCoreProperties.txt
_INVISIBLE = {
    *"\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u3164\uffa0",
    *map(chr, range(0xFE00, 0xFE10)),  # variation selectors
    *map(chr, range(0xE0100, 0xE01F0)),
    *"\u2800\u2d7f\U0001107f\U00016fe4\U0001d159",
}
_MOST_MARKS = 4  # maximum combining marks per letter: Vietnamese and Thai use 2, Hebrew uses 4


def sanitize(text: str, limit: int = 80) -> str:
    """Make untrusted text safe to print: one line, bounded, without invisible characters.

    Args:
        text: The untrusted text.
        limit: The maximum number of characters of the result.

    Returns:
        The text, with U+FFFD in place of unprintable and invisible characters, of combining marks
        without a letter, and of excess combining marks on a letter.
    """
    clean = text[: limit + 1]
    if not (clean.isascii() and clean.isprintable()):
        clean = _cleaned(clean)
    return clean if len(text) <= limit else clean[: limit - 1] + "\N{HORIZONTAL ELLIPSIS}"


def _cleaned(text: str) -> str:
    from unicodedata import category

    clean: list[str] = []
    marks = 0  # number of combining marks on the last letter
    has_letter = is_dropped = False
    for letter in text:
        kind = category(letter)
        if not letter.isprintable() or letter in _INVISIBLE:
            clean.append(_REPLACEMENT)
            has_letter = is_dropped = False
        elif is_mark(letter) or kind == "Mc":  # "Mc": a spacing mark, which still needs a letter
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
    """Return whether a character is drawn over the letter before it, without a column of its own.

    This is also true for the vowels and final consonants of decomposed Hangul syllables.
    """
    from unicodedata import category

    is_hangul = "\u1160" <= letter <= "\u11ff" or "\ud7b0" <= letter <= "\ud7fb"
    return is_hangul or category(letter) in ("Mn", "Me")


def parsed(data: str | bytes, limit: int = SIZE_LIMIT) -> Any:
    """Parse JSON text of limited size.

    Args:
        data: The JSON document.
        limit: The maximum number of bytes or characters.

    Raises:
        ValueError: The document is too long, nested too deeply, or not JSON.
    """
    if len(data) > limit:
        raise ValueError(data[:20])
    try:
        # Decoded here because json.loads() would first try to detect UTF-16.
        return json.loads(data if isinstance(data, str) else data.decode())
    except RecursionError as error:
        raise ValueError(data[:20]) from error


def encoded(fields: Mapping[str, Any], limit: int) -> bytes:
    """Encode a table as UTF-8 JSON within a size limit.

    Args:
        fields: The table. Its longest strings are truncated until the result fits.
        limit: The maximum number of bytes.

    Returns:
        The JSON text. A lone surrogate, which UTF-8 can't encode, is written as an escape.
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
    """Return a string, truncated to the limit. Raises ValueError for any other type."""
    if isinstance(value, str):
        return value[:limit]
    raise ValueError(value)


def number(value: Any, limit: float = LATEST_S) -> float:
    """Return a number from 0 to the limit. Raises ValueError for others, including True and NaN."""
    if (type(value) is float or type(value) is int) and 0 <= value <= limit:
        return value
    raise ValueError(value)


def integer(value: Any, limit: float = LATEST_S) -> int:
    """Return an integer from 0 to the limit. Raises ValueError for any other value."""
    if type(value) is int and 0 <= value <= limit:
        return value
    raise ValueError(value)


def pid(value: Any) -> int:
    """Return a valid process ID. Raises ValueError for any other value."""
    if type(value) is int and 0 < value < PIDS:
        return value
    raise ValueError(value)


def boolean(value: Any) -> bool:
    """Return True or False. Raises ValueError for any other value."""
    if isinstance(value, bool):
        return value
    raise ValueError(value)


def known(read: Callable[[Any], T], value: Any) -> T | None:
    """Return the value that a reader such as `text` or `pid` returns, or None if it is invalid."""
    try:
        return read(value)
    except ValueError:
        return None


class Fields:
    """An untrusted table.

    Each method returns the value of one field, or None or an empty list if the value is invalid.
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.fields = fields

    def text(self, name: str) -> str | None:
        """Return the field if it is a string, truncated to the limit."""
        return known(text, self.fields.get(name))

    def number(self, name: str) -> float | None:
        """Return the field if it is a nonnegative number."""
        return known(number, self.fields.get(name))

    def integer(self, name: str) -> int | None:
        """Return the field if it is a nonnegative integer."""
        return known(integer, self.fields.get(name))

    def boolean(self, name: str) -> bool | None:
        """Return the field if it is True or False."""
        return known(boolean, self.fields.get(name))

    def texts(self, name: str, limit: int = LIST_LIMIT) -> list[str]:
        """Return the strings among the first `limit` items of a list."""
        return [value[:TEXT_LIMIT] for value in self._items(name, limit) if isinstance(value, str)]

    def tables(self, name: str, limit: int = LIST_LIMIT) -> "list[Fields]":
        """Return the tables among the first `limit` items of a list."""
        return [Fields(value) for value in self._items(name, limit) if isinstance(value, dict)]

    def _items(self, name: str, limit: int) -> list[Any]:
        value = self.fields.get(name)
        return value[:limit] if isinstance(value, list) else []


class FormatError(ValueError):
    """The JSON has an unsupported version, or is not from this package.

    Attributes:
        version: The version in the JSON, or None if the JSON has another format.
    """

    def __init__(self, version: int | None) -> None:
        super().__init__(f"version {version}")
        self.version = version


def table(fields: object, version: int, needed: str) -> Fields:
    """Return the top-level table of a JSON document.

    Args:
        fields: The parsed document.
        version: The supported version.
        needed: The name of a required list.

    Raises:
        FormatError: The version differs, or the list is missing.
    """
    document = Fields(fields if isinstance(fields, dict) else {})
    actual = document.integer("version")
    if actual != version or not isinstance(document.fields.get(needed), list):
        raise FormatError(None if actual == version else actual)
    return document


def fields_of(kind: type, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the valid fields of an untrusted table for a NamedTuple.

    Args:
        kind: The NamedTuple class, whose annotations define the valid types.
        fields: The untrusted table.
    """
    readers = _readers(kind).items()
    values = {name: known(read, fields[name]) for name, read in readers if name in fields}
    return {name: value for name, value in values.items() if value is not None}


@functools.cache
def _readers(kind: type) -> dict[str, Callable[[Any], Any]]:
    """Return the reader of each field, chosen by the field's name or type."""
    by_type: dict[Any, Callable[[Any], Any]]
    by_type = {str: text, int: integer, float: number, bool: boolean}
    types = {name: (get_args(of) or (of,))[0] for name, of in kind.__annotations__.items()}
    return {
        name: pid if name == "pid" else by_type[of] for name, of in types.items() if of in by_type
    }
