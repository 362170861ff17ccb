"""The names of a device: indices, UUIDs and their prefixes, PCI bus ids.

Pure functions: names in, devices out. The first half is about names as people type them, the
second about the entries of `CUDA_VISIBLE_DEVICES`, as CUDA reads them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import TypeAlias, TypeVar

from reserve_gpu.model.devices import Device, Fault
from reserve_gpu.model.errors import REASON_LIMIT, RequestError
from reserve_gpu.model.untrusted import sanitize

AnyDevice = TypeVar("AnyDevice", Device, Device | Fault)
DeviceNames: TypeAlias = str | int | Iterable[str | int]  # as people give them

# Text, which `re` compiles when a pattern is first used: most requests name no device.
_INDEX = r"(?:gpu|cuda:)?([0-9]{1,4})"
_RANGE = r"(?:gpu)?([0-9]{1,4})-(?:gpu)?([0-9]{1,4})"
_INSTANCE = r"(?:gpu)?([0-9]{1,4}):([0-9])"  # a GPU has seven at most, and 18:00 is a time
_BUS_ID = r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}:[0-9a-f]{2}\.[0-7])"
_UUID = r"(?:GPU|MIG)-[0-9a-z/-]+"
_STRTOUL = r"\s*([+-]?)0*([0-9]+)"  # the start of a text that C's strtoul() reads as a number
_STRTOUL_BLANKS = " \t\n\v\f\r"
_MAX_DIGITS = 9  # no machine has so many GPUs, and int() refuses thousands of digits


def parse(text: DeviceNames) -> tuple[str, ...]:
    """Return the device names in text, in their order; `0-3` is four of them.

    Raises RequestError for what can't name one.
    """
    parts = text if isinstance(text, Iterable) and not isinstance(text, (str, bytes)) else [text]
    joined = ",".join(str(part) for part in parts)
    return tuple(
        name for word in re.split(r"[,\s]+", joined) if word for name in _meant_by_word(word)
    )


def is_name(word: str) -> bool:
    """Tell whether a word that somebody typed could name devices on some machine."""
    try:
        return bool(parse(word))
    except RequestError:
        return False


def gpu_index(name: str) -> int | None:
    """Return the index of the GPU in a name, if the name has it: 2 of `2`, `GPU2`, `2:0`."""
    match = _match(_INDEX, name) or _match(_INSTANCE, name)
    return int(match[1]) if match else None


def pick(name: str, devices: Sequence[Device | Fault]) -> Device | Fault:
    """Return the device that a name means. Raises RequestError if it is none, or several."""
    usable = [device for device in devices if isinstance(device, Device)]
    matches = matching(name, usable)
    if len(matches) == 1:
        return matches[0]
    if len(matches) > 1:
        uuids = ", ".join(sanitize(device.uuid) for device in matches)
        raise RequestError(f"{sanitize(name)} is the start of several UUIDs: {uuids}.")
    index = gpu_index(name)
    for fault in devices:
        if isinstance(fault, Fault) and (
            _is_meant(name, fault) or (fault.instance is None and fault.index == index)
        ):
            return fault
    instances = [d.number for d in usable if d.instance is not None and d.index == index]
    if instances:
        raise RequestError(
            f"GPU{index} is split by MIG. Name one of its instances: {', '.join(instances)}."
        )
    faults = "".join(f" {_described(each)}." for each in devices if isinstance(each, Fault))
    first, last = devices[0].label, devices[-1].label
    short = {1: f"is {first}", 2: f"are {first} and {last}"}
    there = short.get(len(devices), f"are {first} to {last}")
    raise RequestError(f"No GPU is called {sanitize(name)} here. There {there}.{faults}")


def matching(name: str, devices: Iterable[AnyDevice]) -> list[AnyDevice]:
    """Return the devices that a name means: one at most, but several by a UUID's beginning."""
    return [device for device in devices if _is_meant(name, device)]


def is_one_of(device: Device | Fault, names: Iterable[str]) -> bool:
    """Return whether one of the names means the device, or the GPU of this instance."""
    whole = device._replace(instance=None)
    if isinstance(whole, Device) and whole.gpu_uuid:
        whole = whole._replace(uuid=whole.gpu_uuid)
    return any(_is_meant(name, each) for name in names for each in (device, whole))


def bare_uuid(uuid: str) -> str:
    """Return a UUID as CUDA gives it: in small letters, without `GPU-` or `MIG-`."""
    return uuid.lower().removeprefix("mig-").removeprefix("gpu-")


def model(device: Device) -> str:
    """Return the model of the GPU, also of one that the device is only an instance of."""
    name = device.name or ""
    if device.instance is None:
        return name
    return name.partition(" MIG ")[0]  # as in "NVIDIA A100-SXM4-40GB MIG 1g.5gb"


def require_distinct(devices: Sequence[Device | Fault]) -> None:
    """Raise RequestError if a device was named twice."""
    for position, device in enumerate(devices):
        if device in devices[:position]:
            raise RequestError(f"{device.label} is named twice.")


def require_one_kind(devices: Sequence[Device | Fault]) -> None:
    """Raise RequestError for a mixture that CUDA does not let one process use.

    https://docs.nvidia.com/datacenter/tesla/mig-user-guide/mig-device-names.html
    """
    gpus = [device.label for device in devices if device.instance is None]
    instances = [device.label for device in devices if device.instance is not None]
    if gpus and instances:
        raise RequestError(
            f"{gpus[0]} is a whole GPU and {instances[0]} a MIG instance: CUDA gives a process one "
            "or the other."
        )


def entries(value: str) -> list[int | str]:
    """Return the entries of CUDA_VISIBLE_DEVICES: numbers, as strtoul() reads them, and UUIDs.

    The list ends at the first entry that is neither.
    https://docs.nvidia.com/cuda/cuda-c-programming-guide/#env-vars
    """
    listed: list[int | str] = []
    for entry in value.split(","):
        number = re.match(_STRTOUL, entry, re.ASCII)
        uuid = entry.lstrip(_STRTOUL_BLANKS)
        if number and len(number[2]) <= _MAX_DIGITS and (number[1] != "-" or number[2] == "0"):
            listed.append(int(number[2]))
        elif uuid.startswith(("GPU-", "MIG-")):
            listed.append(uuid)
        else:
            break
    return listed


def visible(listed: Sequence[int | str], devices: Sequence[Device | Fault]) -> list[Device | Fault]:
    """Return those of the devices that CUDA_VISIBLE_DEVICES with these entries leaves visible.

    They come in the order of `devices`, which are all of the machine's in PCI bus order.
    The list ends at the first entry that means no device; a device that is in it twice makes CUDA
    show none at all.
    """
    chosen: list[Device | Fault] = []
    for entry in listed:
        meant = _meant(entry, devices)
        if meant is None:
            # This may be the UUID of a device that can't be read: let people see why it can't.
            chosen += [d for d in devices if isinstance(d, Fault) and d not in chosen]
        if not meant:
            break
        if any(device in chosen for device in meant):
            return []
        chosen += meant
    # As soon as one MIG instance is visible, CUDA shows no whole GPU.
    instances = [device for device in chosen if device.instance is not None]
    return [device for device in devices if device in (instances or chosen)]


def numbers_within(listed: Sequence[int], count: int) -> list[int]:
    """Return the GPUs that `visible` would give for numbers alone, without a look at any of them.

    listed: numbers in PCI bus order. count: how many GPUs there are.
    """
    numbers = list(takewhile(lambda number: number < count, listed))
    return sorted(numbers) if len(set(numbers)) == len(numbers) else []


def _meant(entry: int | str, devices: Sequence[Device | Fault]) -> list[Device | Fault] | None:
    """Return what an entry means: a device, or all instances of a GPU.

    An empty list stands for no GPU, or several; None for a UUID of none that can be read.
    """
    if isinstance(entry, int):
        return [device for device in devices if device.index == entry]
    usable = [device for device in devices if isinstance(device, Device)]
    if entry.startswith("GPU-"):
        meant = [d for d in usable if (d.gpu_uuid or d.uuid).startswith(entry)]
        uuids = {d.gpu_uuid or d.uuid for d in meant}
    else:
        meant = [d for d in usable if d.uuid.startswith(entry) or d.old_name == entry]
        uuids = {d.uuid for d in meant}
    if not uuids:
        return None
    return list(meant) if len(uuids) == 1 else []


def _is_meant(name: str, device: Device | Fault) -> bool:
    """Tell whether a typed name means that device; of a Fault only its place is known."""
    if match := _match(_INDEX, name):
        return (device.index, device.instance) == (int(match[1]), None)
    if match := _match(_INSTANCE, name):
        return (device.index, device.instance) == (int(match[1]), int(match[2]))
    if isinstance(device, Fault):
        return False
    if _match(_BUS_ID, name):
        return device.instance is None and _bus(device.bus_id or "") == _bus(name)
    return device.uuid.lower().startswith(name.lower())


def _meant_by_word(word: str) -> list[str]:
    """Return the names in a word without commas: itself, or the indices of a range."""
    if match := _match(_RANGE, word):
        first, last = int(match[1]), int(match[2])
        if first <= last:
            return [str(index) for index in range(first, last + 1)]
    if any(_match(pattern, word) for pattern in (_INDEX, _INSTANCE, _BUS_ID, _UUID)):
        return [word]
    raise RequestError(
        f"{sanitize(word)!r} names no GPU. Give an index (2, GPU2 or cuda:2), several (1,3), "
        "a range (0-3), a UUID or its start (GPU-8f2a), a MIG instance (1:0) or a PCI bus id "
        "(0000:03:00.0)."
    )


def _bus(bus_id: str) -> tuple[int, str] | None:
    """Return a bus id in one spelling: the domain, 0 where it is left out, and the rest."""
    match = _match(_BUS_ID, bus_id)
    return (int(match[1] or "0", 16), match[2].lower()) if match else None


def _match(pattern: str, text: str) -> re.Match[str] | None:
    return re.fullmatch(pattern, text, re.IGNORECASE | re.ASCII)


def _described(fault: Fault) -> str:
    return f"{fault.label} can't be used: {sanitize(fault.reason, REASON_LIMIT)}"
