"""What Tab offers behind %reserve_gpu: options, devices, and values that make sense here.

Loaded at the first Tab. It takes no lock; where the driver is slow, or there is none, Tab takes a
moment and offers the options alone.
"""

from __future__ import annotations

import re
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from reserve_gpu.errors import ReserveGPUError, shown
from reserve_gpu.gpus import names
from reserve_gpu.gpus.nvml import Nvml
from reserve_gpu.model import Device
from reserve_gpu.options import (
    COUNT,
    DEVICES,
    EXCLUDE,
    HELP,
    MAGIC,
    MIN_MEMORY,
    NAME,
    REQUEST,
    WAIT,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from IPython.core.interactiveshell import InteractiveShell

    from reserve_gpu.options import Option

LIMIT_S = 0.3  # for one driver call, and for beginning another one: a person waits for Tab
FRESH_S = 60.0  # what the driver has said, or not said in time, is used again for so long
WORD = r"""(?:"[^"]*(?:"|$)|'[^']*(?:'|$)|[^\s"'])+"""
DURATIONS = ("10m", "1h", "8h", "1d")
SIZES = ("8GiB", "16GiB", "24GiB", "40GiB", "80GiB")  # where the machine's own are not known
TAKE_JSON = {"--status", "--check"}
ALONE = {*TAKE_JSON, "--release"}  # go with no request
QUOTES = "\"'"

FLAGS = tuple(option for option in (*REQUEST, *MAGIC, HELP) if option is not DEVICES)
BY_FLAG = {flag: option for option in FLAGS for flag in option.flags}


class Offer(NamedTuple):
    """What Tab offers.

    fragment: the part of the line that is replaced. values, flags: what may replace it.
    kind: what the values are.
    """

    fragment: str
    values: Sequence[str] = ()
    flags: Sequence[str] = ()
    kind: str = "value"


class Machine(NamedTuple):
    """What there is on this machine. gpus: how many, those that can't be read included."""

    devices: Sequence[Device] = ()
    gpus: int = 0


class Completion:
    """Completes the line of one shell's magic."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._machine = Machine()
        self._stale_at = 0.0

    def matches(self, context: Any) -> dict[str, Any]:
        """The answer to IPython from 8.6 on, which calls this a matcher."""
        from IPython.core.completer import SimpleCompletion

        offer = self._offer(context.text_until_cursor)
        if offer is None:
            return {"completions": []}
        values = [SimpleCompletion(text, type=offer.kind) for text in offer.values]
        flags = [SimpleCompletion(text, type="option") for text in offer.flags]
        return {
            "completions": values + flags,
            "matched_fragment": offer.fragment,
            "ordered": True,
            "suppress": True,
        }

    def endings(self, event: Any) -> list[str]:
        """The answer to an older IPython, which replaces only the last part of some words."""
        offer = self._offer(event.text_until_cursor)
        if offer is None:
            return []
        kept = len(offer.fragment) - len(event.symbol)
        return [text[kept:] for text in (*offer.values, *offer.flags)]

    def _offer(self, before: str) -> Offer | None:
        """What may follow in the line; None if it is not the magic's. before: up to the cursor."""
        match = re.match(r"\s*(%?)reserve_gpu\s(?!\s*=)", before)
        is_automagic = self._shell.automagic and "reserve_gpu" not in self._shell.user_ns
        if not match or not (match[1] or is_automagic):
            return None
        return offer(before[match.end() :], self._look)

    def _look(self) -> Machine:
        if time.monotonic() >= self._stale_at:
            self._machine = look()
            self._stale_at = time.monotonic() + FRESH_S
        return self._machine


def look() -> Machine:
    """What the driver says at once; what takes it longer is left out."""
    deadline, count = time.monotonic() + LIMIT_S, 0
    devices: list[Device] = []
    with suppress(ReserveGPUError), Nvml(limit_s=LIMIT_S) as nvml:
        count = nvml.count()
        for index in range(count):
            if time.monotonic() > deadline:
                break
            devices += [device for device in nvml.devices(index) if isinstance(device, Device)]
    return Machine(devices, count)


def offer(text: str, look: Callable[[], Machine]) -> Offer:
    """What may stand at the end of the magic's arguments.

    look: what there is on the machine; called only where that matters.
    """
    words: list[str] = re.findall(WORD, text)
    word = words.pop() if words and text.endswith(words[-1]) else ""
    if any(each.startswith("#") for each in (*words, word)):  # a comment
        return Offer("")
    flag, equals, value = word.partition("=")
    if equals and flag in BY_FLAG:
        return _values(BY_FLAG[flag], value, words, look)
    option, is_due = _option(words)
    if word.startswith("-") or (option is DEVICES and ALONE & set(words)):
        return Offer(word, flags=_flags(word, words))
    values = _values(option, word, words, look)
    return values if is_due or word else values._replace(flags=_flags("", words))


def _option(words: Sequence[str]) -> tuple[Option, bool]:
    """The option that the next word would be a value of, and whether a value must follow."""
    option, values = DEVICES, 0
    for word in words:
        if word in BY_FLAG:
            option, values = BY_FLAG[word], 0
        else:
            values += 1
    nargs = option.settings.get("nargs")
    if option.settings.get("action") == "store_true" or (values and nargs in (None, "?")):
        return DEVICES, False
    return option, not values and nargs in (None, "+")


def _flags(start: str, words: Sequence[str]) -> list[str]:
    """The options that begin so and can still be given."""
    given = set(words)
    flags = []
    for option in FLAGS:
        if option.flag == "--json":
            is_possible = not given or bool(given & TAKE_JSON)
        else:
            is_possible = not given & ALONE
        if option.settings.get("action") != "extend" and given & set(option.flags):
            is_possible = False  # it has been given
        if is_possible:
            flags += [
                f for f in option.flags if f.startswith(start) and (len(f) > 2 or start == "-")
            ]
    return flags


def _values(option: Option, word: str, words: Sequence[str], look: Callable[[], Machine]) -> Offer:
    """The values of an option, or the devices, that begin like the word."""
    if option in (DEVICES, EXCLUDE):
        return _devices_offer(word, words, look())
    if option is NAME:
        return Offer(word, _models(look(), word))
    values: Sequence[str] = ()
    if option is WAIT:
        values = DURATIONS
    elif option is MIN_MEMORY:
        values = _sizes(look())
    elif option is COUNT:
        values = [str(number + 1) for number in range(look().gpus)]
    return Offer(word, [value for value in values if value.lower().startswith(word.lower())])


def _devices_offer(word: str, words: Sequence[str], machine: Machine) -> Offer:
    """The devices that begin like what stands after the word's last comma, less those given."""
    start = word.rpartition(",")[2]
    before = word[: len(word) - len(start)]
    given = {name for each in (*words, before) for name in each.split(",")}
    values = [name for name in _devices(machine, start) if name not in given]
    return Offer(start, values, kind="device")


def _devices(machine: Machine, start: str) -> list[str]:
    """The names of the devices that begin so: indices, and UUIDs for who has begun one."""
    if start.lower().startswith(("gpu-", "mig-")):
        return [d.uuid for d in machine.devices if d.uuid.lower().startswith(start.lower())]
    read = {device.index for device in machine.devices}
    numbers = [(d.index, d.instance or 0, d.number) for d in machine.devices]
    numbers += [(index, 0, str(index)) for index in range(machine.gpus) if index not in read]
    typed = start[3:] if start.lower().startswith("gpu") else start
    prefix = start[: len(start) - len(typed)]
    return [f"{prefix}{number}" for *_, number in sorted(numbers) if number.startswith(typed)]


def _sizes(machine: Machine) -> Sequence[str]:
    sizes = sorted({d.memory_mib // 1024 for d in machine.devices if d.memory_mib})
    return [f"{size}GiB" for size in sizes if size] or SIZES


def _models(machine: Machine, word: str) -> list[str]:
    """The models here, each from where the word stands in it on; without the maker's name."""
    models = [shown(names.model(device)).removeprefix("NVIDIA ") for device in machine.devices]
    start = re.compile(rf"\b{re.escape(word.strip(QUOTES))}", re.IGNORECASE)
    texts = (model[match.start() :] for model in models if (match := start.search(model)))
    return [_quoted(text, word) for text in dict.fromkeys(texts)]


def _quoted(text: str, word: str) -> str:
    """The text as it must be typed, in the quotation marks that the word has, if any."""
    mark = word[:1] if word.startswith(tuple(QUOTES)) else ""
    mark = mark or ('"' if re.search(r"[^\w.+-]", text) else "")
    return f"{mark}{text.replace(mark, '') if mark else text}{mark}"
