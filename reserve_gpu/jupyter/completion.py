"""What Tab offers behind %reserve_gpu: options, devices, and values that make sense here.

Loaded at the first Tab. It takes no lock; where the driver is slow, or there is none, Tab takes a
moment and offers the options alone. Beside each device stands what it is and who has it, where that
can be shown: in a terminal and in JupyterLab, from IPython 8.6 on.
"""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from reserve_gpu.errors import ReserveGPUError, shown
from reserve_gpu.gpus import names
from reserve_gpu.gpus.bindings import DeviceError
from reserve_gpu.gpus.nvml import Nvml
from reserve_gpu.gpus.usage import judge
from reserve_gpu.locks.directory import LockDirectory, default_path
from reserve_gpu.model import Device
from reserve_gpu.options import (
    COUNT,
    DEVICES,
    EXCLUDE,
    FOR,
    HELP,
    IDLE,
    MAGIC,
    MEMORY,
    MIN_MEMORY,
    NAME,
    REQUEST,
    UNTIL,
    WAIT,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from IPython.core.interactiveshell import InteractiveShell

    from reserve_gpu.options import Option

LIMIT_S = 0.3  # for one driver call, and for beginning another one: a person waits for Tab
USER_LIMIT = 20  # characters: the column is narrow
FRESH_S = 10.0  # what the driver has said, or not said in time, is used again for so long
WORD = r"""(?:"[^"]*(?:"|$)|'[^']*(?:'|$)|[^\s"'])+"""
DURATIONS = ("10m", "1h", "8h", "1d")
DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
SIZES = ("8GiB", "16GiB", "24GiB", "40GiB", "80GiB")  # where the machine's own are not known
PARTS = ("4GB", "10GB", "20GB", "40GB")
# What an option takes that takes the same on every machine.
VALUES: Mapping[Option, Sequence[str]] = {
    WAIT: DURATIONS,
    MEMORY: PARTS,
    FOR: ("1h", "4h", "8h", "1d"),
    UNTIL: ("12:00", "18:00", *DAYS),
    IDLE: ("30m", "1h", "2h"),
}
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
QUOTES = "\"'"
OPTION, VALUE, AS_IT_STANDS = "option", "value", "as it stands"  # in the column beside an offer
NO_BREAK = "\N{NO-BREAK SPACE}"

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


class Machine(NamedTuple):
    """What there is on this machine.

    gpus: how many, those that can't be read included. states: of each device, by its UUID.
    """

    devices: Sequence[Device] = ()
    gpus: int = 0
    states: Mapping[str, str] = {}


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
        fragment, kinds = offer
        if not kinds:
            # Only an answer that is not empty keeps out others: the names of Python and of files.
            fragment = fragment or "".join(re.findall(r"\S+\s*$", context.text_until_cursor))
            kinds = {fragment: AS_IT_STANDS}
        if hasattr(self._shell, "kernel"):  # JupyterLab would break the column at blanks
            kinds = {text: kind.replace(" ", NO_BREAK) for text, kind in kinds.items()}
        return {
            "completions": [SimpleCompletion(text, type=kind) for text, kind in kinds.items()],
            "matched_fragment": fragment,
            "ordered": True,
            "suppress": True,
        }

    def endings(self, event: Any) -> list[str]:
        """The answer to an older IPython, which replaces only the last part of some words."""
        offer = self._offer(event.text_until_cursor)
        if offer is None:
            return []
        kept = len(offer.fragment) - len(event.symbol)
        return [text[kept:] for text in offer.kinds]

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
    states: dict[str, str] = {}
    with suppress(ReserveGPUError), Nvml(limit_s=LIMIT_S) as nvml:
        count = nvml.count()
        for index in range(count):
            if time.monotonic() > deadline:
                break
            devices += [device for device in nvml.devices(index) if isinstance(device, Device)]
        states = _holders(devices)
        for device in devices:
            if device.uuid not in states and time.monotonic() < deadline:
                with suppress(DeviceError):
                    states[device.uuid] = judge(nvml.usage(device)).value
    return Machine(devices, count, states)


def _holders(devices: Iterable[Device]) -> dict[str, str]:
    """Who has which device, as far as the kernel's list of locks shows it.

    It may miss some, as in a container; so of the others no more is said than that they are idle.
    """
    holders = {}
    with suppress(ReserveGPUError):
        if os.path.isdir(path := default_path()):  # else it would be made
            with LockDirectory(path) as directory:
                for device in devices:
                    for holder in directory.listed_holders_of(device.uuid)[:1]:
                        user = shown(holder.user or "reserved", USER_LIMIT)
                        is_own = holder.seen and holder.pid == os.getpid()
                        holders[device.uuid] = "this kernel" if is_own else user
    return holders


def offer(text: str, look: Callable[[], Machine]) -> Offer:
    """What may stand at the end of the magic's arguments.

    look: what there is on the machine; called only where that matters.
    """
    words: list[str] = re.findall(WORD, text)
    word = words.pop() if words and text.endswith(words[-1]) else ""
    if any(each.startswith("#") for each in (*words, word)):  # a comment
        return Offer("")
    typed = _typed(words)
    flag, equals, value = word.partition("=")
    if equals and flag in BY_FLAG:
        return _values(BY_FLAG[flag], value, typed, look)
    if word.startswith("-"):
        return Offer(word, _flags(word, typed))
    values = Offer(word)
    if typed.option is not DEVICES or _can_stand(DEVICES, typed):
        values = _values(typed.option, word, typed, look)
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
    """Whether the option, or a device, can be given after what stands there."""
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
    """The options that begin so and can still be given; the short forms for who types a hyphen."""
    flags = [flag for option in FLAGS if _can_stand(option, typed) for flag in option.flags]
    return {f: OPTION for f in flags if f.startswith(start) and (len(f) > 2 or start == "-")}


def _values(option: Option, word: str, typed: Typed, look: Callable[[], Machine]) -> Offer:
    """The values of an option, or the devices, that begin like the word."""
    if option in (DEVICES, EXCLUDE):
        return _devices_offer(option, word, typed, look())
    if option is NAME:
        return Offer(word, dict.fromkeys(_models(look(), word), VALUE))
    values = VALUES.get(option, ())
    if option is MIN_MEMORY:
        values = _sizes(look())
    elif option is COUNT:
        values = [str(number + 1) for number in range(look().gpus)]
    return Offer(word, {v: VALUE for v in values if v.lower().startswith(word.lower())})


def _devices_offer(option: Option, word: str, typed: Typed, machine: Machine) -> Offer:
    """The devices that begin like what stands after the word's last comma, less those given.

    Beside a whole GPU no MIG instance is offered, nor the other way round: CUDA takes no such list.
    """
    start = word.rpartition(",")[2]
    values = {**typed.values}
    values[option] = [*values.get(option, ()), word[: len(word) - len(start)]]
    named, excluded = _names(values.get(DEVICES, ())), _names(values.get(EXCLUDE, ()))
    kinds = {d.instance is None for d in machine.devices if names.is_one_of(d, named)}
    possible = [
        device
        for device in machine.devices
        if not names.is_one_of(device, named + excluded)
        if option is EXCLUDE or kinds <= {device.instance is None}
    ]
    if start.lower().startswith(("gpu-", "mig-")):
        uuids = [device for device in possible if device.uuid.lower().startswith(start.lower())]
        return Offer(start, {device.uuid: _described(device, machine) for device in uuids})
    prefix = start[:3] if start.lower().startswith("gpu") else ""
    numbers = [(d.index, d.instance or 0, d.number, _described(d, machine)) for d in possible]
    known = {device.index for device in machine.devices} | set(map(names.gpu_index, named))
    numbers += [(i, 0, str(i), "device") for i in range(machine.gpus) if i not in known]
    begun = [each for each in sorted(numbers) if each[2].startswith(start[len(prefix) :])]
    return Offer(start, {f"{prefix}{number}": kind for *_, number, kind in begun})


def _names(words: Iterable[str]) -> list[str]:
    """The devices that are named in the words, those without sense left out."""
    return [name for word in words if names.is_name(word) for name in names.parse(word)]


def _described(device: Device, machine: Machine) -> str:
    """What a device is, in short, and who has it: `A100, alice`."""
    name = shown(device.name or "GPU").removeprefix("NVIDIA ").partition("-")[0]
    return ", ".join(filter(None, [name, machine.states.get(device.uuid)]))


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
