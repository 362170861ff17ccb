"""Read and sanitize data from other processes, which might be truncated, binary, huge or forged.

The functions that read a single value, such as `text` and `pid`, raise ValueError if it is invalid.
`Fields`, `known` and `fields_of` ignore invalid values.
"""

import functools
import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, get_args

T = TypeVar("T")

SIZE_LIMIT = 1 << 20  # maximum size of a JSON document, in bytes or characters
TEXT_LIMIT = 300  # maximum length of each string, in characters
LIST_LIMIT = 256  # maximum number of devices, holders or processes in a list
LATEST_S = 1e11  # latest valid time in seconds since the epoch
MOST_MIB = 1e9  # largest valid amount of memory in MiB
PIDS = 1 << 31  # process IDs are below this number
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Invisible characters for which str.isprintable() returns True. These are blanks and the characters
# with Unicode's Default_Ignorable_Code_Point property.
# https://www.unicode.org/Public/UCD/latest/ucd/DerivedCoreProperties.txt
_INVISIBLE = {
    *"\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u3164\uffa0",
    *map(chr, range(0xFE00, 0xFE10)),  # variation selectors
    *map(chr, range(0xE0100, 0xE01F0)),
    *"\u2800\u2d7f\U0001107f\U00016fe4\U0001d159",
}
_MOST_MARKS = 4  # maximum combining marks per letter; Vietnamese and Thai use 2, Hebrew uses 4


def sanitize(text: str, limit: int = 80) -> str:
    """Make untrusted text safe to print on a single line.

    Args:
        text: The untrusted text.
        limit: The maximum length of the result, in characters.

    Returns:
        The text, truncated to the limit. U+FFFD replaces unprintable characters, invisible
        characters, combining marks that follow no letter, and excess combining marks on a letter.
    """
    clean = text[: limit + 1]
    if not (clean.isascii() and clean.isprintable()):
        clean = _cleaned(clean)
    return clean if len(text) <= limit else clean[: limit - 1] + "\N{HORIZONTAL ELLIPSIS}"


def _cleaned(text: str) -> str:
    from unicodedata import category

    clean: list[str] = []
    marks = 0  # combining marks on the current letter
    has_letter = is_dropped = False
    for letter in text:
        kind = category(letter)
        if not letter.isprintable() or letter in _INVISIBLE:
            clean.append(_REPLACEMENT)
            has_letter = is_dropped = False
        elif is_mark(letter) or kind == "Mc":  # "Mc": spacing marks, which also need a letter
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
    """Return whether a character combines with the previous letter and has no column of its own.

    This also applies to vowels and final consonants in decomposed Hangul syllables.
    """
    from unicodedata import category

    is_hangul = "\u1160" <= letter <= "\u11ff" or "\ud7b0" <= letter <= "\ud7fb"
    return is_hangul or category(letter) in ("Mn", "Me")


def parsed(data: str | bytes, limit: int = SIZE_LIMIT) -> Any:
    """Parse a JSON document of limited size.

    Args:
        data: The JSON document.
        limit: The maximum size in bytes or characters.

    Raises:
        ValueError: The document is too long, nested too deeply, or not JSON.
    """
    if len(data) > limit:
        raise ValueError(data[:20])
    try:
        # Decode the bytes here, because json.loads() would also accept UTF-16 and UTF-32.
        return json.loads(data if isinstance(data, str) else data.decode())
    except RecursionError as error:
        raise ValueError(data[:20]) from error


def encoded(fields: Mapping[str, Any], limit: int) -> bytes:
    """Encode a dictionary as UTF-8 JSON of limited size.

    Args:
        fields: The dictionary. Its longest strings are shortened until the result is within the
            limit.
        limit: The maximum size in bytes.

    Returns:
        The JSON document. Lone surrogates, which UTF-8 can't encode, are escaped.
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
    """Return a string truncated to the limit, or raise ValueError for any other type."""
    if isinstance(value, str):
        return value[:limit]
    raise ValueError(value)


def number(value: Any, limit: float = LATEST_S) -> float:
    """Return a number from 0 to the limit, or raise ValueError, including for True and NaN."""
    if (type(value) is float or type(value) is int) and 0 <= value <= limit:
        return value
    raise ValueError(value)


def integer(value: Any, limit: float = LATEST_S) -> int:
    """Return an integer from 0 to the limit, or raise ValueError for any other value."""
    if type(value) is int and 0 <= value <= limit:
        return value
    raise ValueError(value)


def pid(value: Any) -> int:
    """Return a valid process ID, or raise ValueError for any other value."""
    if type(value) is int and 0 < value < PIDS:
        return value
    raise ValueError(value)


def boolean(value: Any) -> bool:
    """Return a Boolean value, or raise ValueError if the value is not a Boolean."""
    if isinstance(value, bool):
        return value
    raise ValueError(value)


def known(read: Callable[[Any], T], value: Any) -> T | None:
    """Read a value with a function such as `text` or `pid`, or return None if it is invalid."""
    try:
        return read(value)
    except ValueError:
        return None


class Fields:
    """An untrusted JSON object.

    Each method returns the value of a single field. If the value is invalid, `texts` and `tables`
    return an empty list, and the other methods return None.
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.fields = fields

    def text(self, name: str) -> str | None:
        """Return a string field, truncated to `TEXT_LIMIT`."""
        return known(text, self.fields.get(name))

    def number(self, name: str) -> float | None:
        """Return a nonnegative number field."""
        return known(number, self.fields.get(name))

    def integer(self, name: str) -> int | None:
        """Return a nonnegative integer field."""
        return known(integer, self.fields.get(name))

    def boolean(self, name: str) -> bool | None:
        """Return a Boolean field."""
        return known(boolean, self.fields.get(name))

    def texts(self, name: str, limit: int = LIST_LIMIT) -> list[str]:
        """Return the strings among the first `limit` items of a list field."""
        return [value[:TEXT_LIMIT] for value in self._items(name, limit) if isinstance(value, str)]

    def lines(self, name: str, limit: int = LIST_LIMIT) -> str | None:
        """Return the first `limit` items of a list of strings as the lines of a single string.

        For many items, this is faster than `texts` and needs less memory. `split_lines` returns
        the items. The list is invalid if an item is not a string or contains a line break.
        """
        if not isinstance(self.fields.get(name), list):
            return None
        items = self._items(name, limit)
        try:
            text = "\n".join(items)
        except TypeError:  # not all items are strings
            return None
        return text if text.count("\n") == max(0, len(items) - 1) else None

    def tables(self, name: str, limit: int = LIST_LIMIT) -> "list[Fields]":
        """Return the JSON objects among the first `limit` items of a list field."""
        return [Fields(value) for value in self._items(name, limit) if isinstance(value, dict)]

    def _items(self, name: str, limit: int) -> list[Any]:
        value = self.fields.get(name)
        return value[:limit] if isinstance(value, list) else []


def split_lines(text: str | None) -> list[str]:
    """Return the lines of a string from `Fields.lines`, or an empty list for None."""
    return text.split("\n") if text else []


class FormatError(ValueError):
    """The JSON document has an unsupported version or was not written by this package.

    Attributes:
        version: The unsupported version, or None if the document has no version or lacks the
            required list.
    """

    def __init__(self, version: int | None) -> None:
        super().__init__(f"version {version}")
        self.version = version


def table(fields: object, version: int, needed: str) -> Fields:
    """Return the top-level object of a JSON document.

    Args:
        fields: The parsed document.
        version: The supported version.
        needed: The name of a list field that the document must have.

    Raises:
        FormatError: The version differs, or the list is missing.
    """
    document = Fields(fields if isinstance(fields, dict) else {})
    actual = document.integer("version")
    if actual != version or not isinstance(document.fields.get(needed), list):
        raise FormatError(None if actual == version else actual)
    return document


def fields_of(kind: type, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values in an untrusted JSON object that are valid for a NamedTuple's fields.

    Args:
        kind: The NamedTuple class. Its annotations define the valid types.
        fields: The untrusted JSON object.
    """
    readers = _readers(kind).items()
    values = {name: known(read, fields[name]) for name, read in readers if name in fields}
    return {name: value for name, value in values.items() if value is not None}


@functools.cache
def _readers(kind: type) -> dict[str, Callable[[Any], Any]]:
    """Map each field's name to a function that reads it, chosen by the field's name or type."""
    by_type: dict[Any, Callable[[Any], Any]]
    by_type = {str: text, int: integer, float: number, bool: boolean}
    types = {name: (get_args(of) or (of,))[0] for name, of in kind.__annotations__.items()}
    return {
        name: pid if name == "pid" else by_type[of] for name, of in types.items() if of in by_type
    }
