"""What Tab offers behind %reserve_gpu: options, devices, and values that make sense here.

Loaded at the first Tab. It takes no lock, and a driver that is slow, or is not there, costs a
moment and leaves the options.
"""

from __future__ import annotations

import re
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from reserve_gpu import names
from reserve_gpu.device import Device, Value
from reserve_gpu.errors import ReserveGPUError
from reserve_gpu.nvml import Nvml
from reserve_gpu.options import HELP, MAGIC, REQUEST
from reserve_gpu.text import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from IPython.core.interactiveshell import InteractiveShell

    from reserve_gpu.options import Option

LIMIT_S = 0.3  # for one driver call, and for beginning another one: a person waits for Tab
FRESH_S = 5.0  # for which what the driver said is not asked again
STUCK_S = 60.0  # the same where it did not answer in time
WORD = r"""(?:"[^"]*(?:"|$)|'[^']*(?:'|$)|[^\s"'])+"""
DURATIONS = ("10m", "1h", "8h", "1d")
SIZES = ("8GiB", "16GiB", "24GiB", "40GiB", "80GiB")  # where the machine's own are not known
ALONE = {"--status", "--check", "--release"}  # go with no request
DEVICES, QUOTES = "devices", "\"'"


class Found(Value):
    """What Tab offers: texts, each with the kind of thing that it is, in place of the fragment."""

    fragment: str
    texts: tuple[tuple[str, str], ...] = ()


class Here(Value):
    """What there is on this machine. count: of GPUs, those that can't be read included."""

    devices: tuple[Device, ...] = ()
    count: int = 0
    is_complete: bool = True


class Completion:
    """Completes the line of one shell's magic."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._here = Here()
        self._stale_at = 0.0

    def found(self, before: str) -> Found | None:
        """What may follow in the line; None if it is not the magic's. before: up to the cursor."""
        match = re.match(r"\s*(%?)reserve_gpu\s(?!\s*=)", before)
        if not match or not (match[1] or self._is_automagic()):
            return None
        return offered(before[match.end() :], self._machine)

    def matches(self, context: Any) -> dict[str, Any]:
        """The answer to IPython from 8.6 on, which calls this a matcher."""
        from IPython.core.completer import SimpleCompletion

        found = self.found(context.text_until_cursor)
        if found is None:
            return {"completions": []}
        return {
            "completions": [SimpleCompletion(text, type=kind) for text, kind in found.texts],
            "matched_fragment": found.fragment,
            "ordered": True,
            "suppress": True,
        }

    def endings(self, event: Any) -> list[str]:
        """The answer to an older IPython, which replaces only the last part of some words."""
        found = self.found(event.text_until_cursor)
        if found is None:
            return []
        kept = len(found.fragment) - len(event.symbol)
        return [text[kept:] for text, _ in found.texts]

    def _is_automagic(self) -> bool:
        return bool(self._shell.automagic) and "reserve_gpu" not in self._shell.user_ns

    def _machine(self) -> Here:
        if time.monotonic() >= self._stale_at:
            self._here = look()
            fresh_s = FRESH_S if self._here.is_complete else STUCK_S
            self._stale_at = time.monotonic() + fresh_s
        return self._here


def look() -> Here:
    """What the driver says at once; what takes it longer is left out."""
    deadline, devices, count = time.monotonic() + LIMIT_S, [], 0
    with suppress(ReserveGPUError), Nvml(LIMIT_S) as nvml:
        count = nvml.count()
        for index in range(count):
            if time.monotonic() > deadline:
                break
            devices += [one for one in nvml.devices(index) if isinstance(one, Device)]
    return Here(tuple(devices), count, is_complete=time.monotonic() <= deadline)


def offered(text: str, machine: Callable[[], Here]) -> Found:
    """What may stand at the end of the magic's arguments. machine: asked only if that matters."""
    words: list[str] = re.findall(WORD, text)
    word = words.pop() if words and text.endswith(words[-1]) else ""
    if any(each.startswith("#") for each in (*words, word)):  # a comment
        return Found("")
    options = [option for option in (*REQUEST, *MAGIC, HELP) if option.flags != (DEVICES,)]
    by_flag = {flag: option for option in options for flag in option.flags}
    flag, equals, value = word.partition("=")
    if equals and flag in by_flag:
        return _values(by_flag[flag].flags[-1], value, words, machine)
    taking, is_due = _taking(words, by_flag)
    if word.startswith("-"):
        return Found(word, _flags(word, words, options))
    if taking == DEVICES and ALONE & set(words):
        return Found(word, _flags("--", words, options) if not word else ())
    found = _values(taking, word, words, machine)
    if is_due or word:
        return found
    return Found("", (*found.texts, *_flags("--", words, options)))


def _taking(words: Sequence[str], by_flag: dict[str, Option]) -> tuple[str, bool]:
    """What the next word would be a value of, and whether one must follow."""
    taking, values = DEVICES, 0
    for word in words:
        if option := by_flag.get(word):
            taking, values = option.flags[-1], 0
        else:
            values += 1
    settings = by_flag[taking].settings if taking in by_flag else {"nargs": "*"}
    nargs = settings.get("nargs")
    if settings.get("action") == "store_true" or (values and nargs in (None, "?")):
        return DEVICES, False
    return taking, not values and nargs in (None, "+")


def _flags(start: str, words: Sequence[str], options: Sequence[Option]) -> tuple[Any, ...]:
    """The options that begin so and can still be given."""
    if ALONE & set(words):
        takes_json = "--release" not in words
        options = [option for option in options if takes_json and option.flags == ("--json",)]
    elif words:
        options = [option for option in options if option.flags != ("--json",)]
    return tuple(
        (flag, "option")
        for option in options
        if option.settings.get("action") == "extend" or not set(option.flags) & set(words)
        for flag in option.flags
        if flag.startswith(start) and (len(flag) > 2 or start == "-")
    )


def _values(what: str, word: str, words: Sequence[str], machine: Callable[[], Here]) -> Found:
    """The values of an option, or the devices, that begin like the word."""
    if what in (DEVICES, "--exclude"):
        start = word.rpartition(",")[2]
        given = {
            name for each in (*words, word[: len(word) - len(start)]) for name in each.split(",")
        }
        devices = _devices(machine(), start)
        return Found(start, tuple((d, "device") for d in devices if d not in given))
    if what == "--wait":
        values = list(DURATIONS)
    elif what == "--min-memory":
        values = _sizes(machine())
    elif what == "--name":
        return Found(word, tuple((model, "value") for model in _models(machine(), word)))
    elif what == "--count":
        values = [str(number + 1) for number in range(machine().count)]
    else:
        values = []
    begun = [value for value in values if value.lower().startswith(word.lower())]
    return Found(word, tuple((value, "value") for value in begun))


def _devices(here: Here, start: str) -> list[str]:
    """The names of the devices that begin so: indices, and UUIDs for who has begun one."""
    if start.lower().startswith(("gpu-", "mig-")):
        return [d.uuid for d in here.devices if d.uuid.lower().startswith(start.lower())]
    read = {d.index for d in here.devices}
    labels = [(d.index, d.label[3:]) for d in here.devices]
    labels += [(index, str(index)) for index in range(here.count) if index not in read]
    typed = start[3:] if start.lower().startswith("gpu") else start
    prefix = start[: len(start) - len(typed)]
    return [f"{prefix}{name}" for _, name in sorted(labels) if name.startswith(typed)]


def _sizes(here: Here) -> list[str]:
    sizes = sorted({d.memory_mib // 1024 for d in here.devices if d.memory_mib})
    return [f"{size}GiB" for size in sizes if size] or list(SIZES)


def _models(here: Here, word: str) -> list[str]:
    """The models here, from where the word stands in them on; without the maker, whom all have."""
    models = dict.fromkeys(shown(names.model(d)).removeprefix("NVIDIA ") for d in here.devices)
    begun = re.compile(rf"\b{re.escape(word.strip(QUOTES))}", re.IGNORECASE)
    found = (model[match.start() :] for model in models if (match := begun.search(model)))
    return [_quoted(text, word) for text in dict.fromkeys(found)]


def _quoted(text: str, word: str) -> str:
    """The text as it must be typed, in the quotation marks that the word has, if any."""
    mark = word[:1] if word.startswith(tuple(QUOTES)) else ""
    mark = mark or ('"' if re.search(r"[^\w.+-]", text) else "")
    return f"{mark}{text.replace(mark, '') if mark else text}{mark}"
