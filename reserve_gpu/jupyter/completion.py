"""What Tab offers behind %reserve_gpu: options, sizes and durations.

Loaded at the first Tab. No key asks the driver or reads a lock, so no devices are offered.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from reserve_gpu.options import COUNT, DEVICES, FOR, HELP, MAGIC, REQUEST, UNTIL

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from IPython.core.interactiveshell import InteractiveShell

    from reserve_gpu.options import Option

WORD = r"""(?:"[^"]*(?:"|$)|'[^']*(?:'|$)|[^\s"'])+"""
# Of these one at most is given.
ENDS = {FOR.flag, UNTIL.flag}
# What is given in place of a request, and what goes with it, one at most.
ALONE = {
    "--status": {"--json", "--watch"},
    "--check": {"--json"},
    "--release": set[str](),
    "--help": set[str](),
}
COMPANIONS = set[str]().union(*ALONE.values())
OPTION, VALUE, AS_IT_STANDS = "option", "value", "as it stands"  # in the column beside an offer

FLAGS = tuple(option for option in (*REQUEST, *MAGIC, HELP) if option is not DEVICES)
BY_FLAG = {flag: option for option in FLAGS for flag in option.flags}


class Offer(NamedTuple):
    """What Tab offers.

    fragment: the part of the line that is replaced. kinds: what may replace it, and what each is.
    """

    fragment: str
    kinds: Mapping[str, str] = {}


class Typed(NamedTuple):
    """What stands before the word that is completed.

    values: of each option that was given, and of the devices. option: whose value comes next.
    is_due: such a value must follow.
    """

    values: Mapping[Option, Sequence[str]]
    option: Option
    is_due: bool


class Completion:
    """Completes the line of one shell's magic."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell

    def matches(self, context: Any) -> dict[str, Any]:
        """Answer IPython from 8.6 on, which calls this a matcher."""
        from IPython.core.completer import SimpleCompletion

        offer = self._offer(context.text_until_cursor)
        if offer is None:
            return {"completions": []}
        fragment, kinds = offer
        if not kinds:
            # Only an answer that is not empty keeps out others: the names of Python and of files.
            fragment = fragment or "".join(re.findall(r"\S+\s*$", context.text_until_cursor))
            kinds = {fragment: AS_IT_STANDS}
        return {
            "completions": [SimpleCompletion(text, type=kind) for text, kind in kinds.items()],
            "matched_fragment": fragment,
            "ordered": True,
            "suppress": True,
        }

    def endings(self, event: Any) -> list[str]:
        """Answer an older IPython, which replaces only the last part of some words."""
        offer = self._offer(event.text_until_cursor)
        if offer is None:
            return []
        kept = len(offer.fragment) - len(event.symbol)
        return [text[kept:] for text in offer.kinds]

    def _offer(self, before: str) -> Offer | None:
        """Return what may follow in the line up to the cursor, None if it is not the magic's."""
        match = re.match(r"\s*(%?)reserve_gpu\s(?!\s*=)", before)
        is_automagic = self._shell.automagic and "reserve_gpu" not in self._shell.user_ns
        if not match or not (match[1] or is_automagic):
            return None
        return offer(before[match.end() :])


def offer(text: str) -> Offer:
    """Return what may stand at the end of the magic's arguments."""
    words: list[str] = re.findall(WORD, text)
    word = words.pop() if words and text.endswith(words[-1]) else ""
    if any(each.startswith("#") for each in (*words, word)):  # a comment
        return Offer("")
    typed = _typed(words)
    flag, equals, value = word.partition("=")
    if equals and flag in BY_FLAG:
        return _values(BY_FLAG[flag], value)
    if word.startswith("-"):
        return Offer(word, _flags(word, typed))
    values = _values(typed.option, word)
    more = {} if typed.is_due or word else _flags("", typed)
    return values._replace(kinds={**values.kinds, **more})


def _typed(words: Sequence[str]) -> Typed:
    values: dict[Option, list[str]] = {}
    option, is_open = DEVICES, True
    for word in words:
        flag, equals, value = word.partition("=")
        if flag in BY_FLAG:
            option = BY_FLAG[flag]
            values.setdefault(option, []).extend([value] if equals else [])
        else:
            option = option if is_open else DEVICES
            values.setdefault(option, []).append(word)
        nargs = option.settings.get("nargs")
        is_one = nargs in (None, "?") and bool(values[option])
        is_open = option.settings.get("action") != "store_true" and not is_one
    option = option if is_open else DEVICES
    is_due = option.settings.get("nargs") in (None, "+") and not values.get(option)
    return Typed(values, option, is_due)


def _can_stand(option: Option, typed: Typed) -> bool:
    """Tell whether the option, or a device, can be given after what stands there."""
    given = {each.flag for each in typed.values}
    for flag in given & ALONE.keys():
        return option.flag in ALONE[flag] and not given & COMPANIONS
    if option.flag in ALONE:
        return given <= ALONE[option.flag]
    if option.flag in COMPANIONS or given & COMPANIONS:
        return False
    if option is DEVICES:
        return COUNT.flag not in given
    if option.flag in ENDS and given & ENDS:
        return False
    return option.flag not in given and not (option is COUNT and DEVICES.flag in given)


def _flags(start: str, typed: Typed) -> dict[str, str]:
    """Return the options that begin so and can still be given; after a hyphen short ones too."""
    flags = [flag for option in FLAGS if _can_stand(option, typed) for flag in option.flags]
    return {f: OPTION for f in flags if f.startswith(start) and (len(f) > 2 or start == "-")}


def _values(option: Option, word: str) -> Offer:
    """Return the values of an option that begin like the word."""
    return Offer(word, {v: VALUE for v in option.offers if v.lower().startswith(word.lower())})
