"""What people and programs call a device: indices, UUIDs and their prefixes, bus ids, CUDA's lists.

Pure functions of plain values: no driver, no files, no environment.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeAlias

from reserve_gpu.device import Device, Fault
from reserve_gpu.errors import RequestError
from reserve_gpu.text import shown

if TYPE_CHECKING:
    from collections.abc import Sequence

DeviceNames: TypeAlias = "str | int | Iterable[str | int]"  # as people type them

# Compiled when they are first used: most reservations use none.
_INDEX = r"(?:gpu)?([0-9]{1,4})"
_INSTANCE = r"(?:gpu)?([0-9]{1,4}):([0-9]{1,3})"
_BUS_ID = r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}:[0-9a-f]{2}\.[0-7])"
_UUID = r"(?:GPU|MIG)-[0-9a-z/-]+"
_STRTOUL = r"\s*([+-]?)0*([0-9]+)"
_BLANKS = " \t\n\v\f\r"
_TOO_LONG = 10  # digits; no machine has so many GPUs


def parse(text: DeviceNames) -> tuple[str, ...]:
    """The device names in text, in their order. Raises RequestError for what can't name one."""
    parts = text if isinstance(text, Iterable) and not isinstance(text, (str, bytes)) else [text]
    names = tuple(n for n in re.split(r"[,\s]+", ",".join(str(part) for part in parts)) if n)
    for name in names:
        if not any(_match(pattern, name) for pattern in (_INDEX, _INSTANCE, _BUS_ID, _UUID)):
            raise RequestError(
                f"{shown(name)!r} names no GPU. Give an index (2), several (1,3), a UUID "
                "(GPU-8f2a...), a MIG instance (1:0) or a PCI bus id (0000:03:00.0)."
            )
    return names


def gpu_index(name: str) -> int | None:
    """The index of the GPU that the name is of, where the name says it: `2`, `GPU2`, `2:0`."""
    match = _match(_INDEX, name) or _match(_INSTANCE, name)
    return int(match[1]) if match else None


def whole_index(name: str) -> int | None:
    """The index that the name is, None for a name of another kind: `2`, `GPU2`, not `2:0`."""
    match = _match(_INDEX, name)
    return int(match[1]) if match else None


def pick(name: str, found: Sequence[Device | Fault]) -> Device | Fault:
    """The one of those found that name means. Raises RequestError if it is none, or several."""
    devices = [one for one in found if isinstance(one, Device)]
    faults = [one for one in found if isinstance(one, Fault)]
    matches = matching(name, devices)
    if len(matches) == 1:
        return matches[0]
    if len(matches) > 1:
        raise RequestError(
            f"{name} is the start of several UUIDs: {', '.join(d.uuid for d in matches)}."
        )
    for fault in faults:
        is_whole = fault.instance is None and fault.index == gpu_index(name)
        if is_whole or (is_one_of(fault, [name]) and whole_index(name) is None):
            return fault
    instances = ", ".join(d.label[3:] for d in devices if d.instance is not None)
    if instances and gpu_index(name) is not None:
        raise RequestError(
            f"GPU{gpu_index(name)} is split by MIG. Name one of its instances: {instances}."
        )
    there = "; ".join(
        [f"{d.label} is {d.uuid}, {d.bus_id}" for d in devices]
        + [f"{f.label}: {f.reason}" for f in faults]
    )
    raise RequestError(f"No GPU is called {name} here ({there}).")


def matching(name: str, devices: Iterable[Device]) -> list[Device]:
    """The devices that name means: at most one by index, perhaps several by the start of a UUID."""
    if match := _match(_INDEX, name):
        return [d for d in devices if d.index == int(match[1]) and d.instance is None]
    if match := _match(_INSTANCE, name):
        return [d for d in devices if (d.index, d.instance) == (int(match[1]), int(match[2]))]
    if match := _match(_BUS_ID, name):
        wanted = (int(match[1] or "0", 16), match[2].lower())
        return [d for d in devices if d.instance is None and _bus(d.bus_id) == wanted]
    return [d for d in devices if d.uuid.lower().startswith(name.lower())]


def is_one_of(one: Device | Fault, wanted: Iterable[str]) -> bool:
    """Whether one of the names means the device, or the GPU that it is an instance of."""
    stand_in = one if isinstance(one, Device) else Device(one.index, "", instance=one.instance)
    return any(whole_index(name) == one.index or matching(name, [stand_in]) for name in wanted)


def model(device: Device) -> str:
    """The model of the GPU, also of one that the device is only an instance of."""
    return (device.name or "").partition(" MIG ")[0]


def require_distinct(found: Sequence[Device | Fault]) -> None:
    """Raise RequestError if one of those that were named stands there twice."""
    for position, one in enumerate(found):
        if one in found[:position]:
            raise RequestError(f"{one.label} is named twice.")


def require_one_kind(found: Sequence[Device | Fault]) -> None:
    """Raise RequestError for a mixture that CUDA does not let one process use."""
    whole = [one.label for one in found if one.instance is None]
    parts = [one.label for one in found if one.instance is not None]
    if whole and parts:
        raise RequestError(
            f"{whole[0]} is a whole GPU and {parts[0]} a MIG instance: CUDA gives a process one or "
            "the other."
        )


def entries(value: str) -> list[int | str]:
    """The entries of a CUDA_VISIBLE_DEVICES value: numbers as strtoul reads them, and UUIDs.

    The list ends at the first entry that can be neither.
    Rules: https://docs.nvidia.com/cuda/cuda-c-programming-guide/#env-vars
    """
    found: list[int | str] = []
    for entry in value.split(","):
        match = re.match(_STRTOUL, entry, re.ASCII)
        uuid = entry.lstrip(_BLANKS)
        if match and len(match[2]) < _TOO_LONG and (match[1] != "-" or match[2] == "0"):
            found.append(int(match[2]))
        elif uuid.startswith(("GPU-", "MIG-")):
            found.append(uuid)
        else:
            break
    return found


def visible(
    listed: Sequence[int | str], everything: Sequence[Device | Fault], numbering: Sequence[int]
) -> list[Device | Fault]:
    """The devices, in PCI bus order, that a CUDA_VISIBLE_DEVICES with these entries leaves visible.

    numbering: the index of the GPU that CUDA gives each number to.
    The list ends at the first entry that means no device; a device that stands twice empties it.
    """
    chosen: list[list[Device | Fault]] = []
    for entry in listed:
        meant = _meant(entry, everything, numbering)
        if not meant:
            if isinstance(entry, str) and meant is None:  # perhaps one that can't be read: say so
                unread = [one for one in everything if isinstance(one, Fault)]
                chosen.append([one for one in unread if [one] not in chosen])
            break
        chosen.append(meant)
    flat = [one for meant in chosen for one in meant]
    if any(one in flat[:position] for position, one in enumerate(flat)):
        return []
    parts = [one for one in flat if one.instance is not None]  # beside them CUDA shows no whole GPU
    return [one for one in everything if one in (parts or flat)]


def numbers_within(listed: Sequence[int], count: int) -> list[int]:
    """What `visible` says of numbers alone, in PCI bus order; that takes no device."""
    inside: list[int] = []
    for number in listed:
        if number >= count:
            break
        inside.append(number)
    return sorted(inside) if len(set(inside)) == len(inside) else []


def _meant(
    entry: int | str, everything: Sequence[Device | Fault], numbering: Sequence[int]
) -> list[Device | Fault] | None:
    """What one entry means: several are the instances of a GPU, [] is ambiguous, None nothing."""
    if isinstance(entry, int):
        if entry >= len(numbering):
            return None
        return [one for one in everything if one.index == numbering[entry]]
    devices = [one for one in everything if isinstance(one, Device)]
    if entry.startswith("GPU-"):  # of a split GPU, its instances
        named = {d.gpu_uuid or d.uuid for d in devices if (d.gpu_uuid or d.uuid).startswith(entry)}
        meant = [d for d in devices if (d.gpu_uuid or d.uuid) in named]
    else:
        meant = [d for d in devices if d.uuid.startswith(entry) or d.old_name == entry]
        named = {d.uuid for d in meant}
    if not named:
        return None
    return list(meant) if len(named) == 1 else []


def _match(pattern: str, text: str) -> re.Match[str] | None:
    return re.fullmatch(pattern, text, re.IGNORECASE | re.ASCII)


def _bus(bus_id: str | None) -> tuple[int, str] | None:
    match = _match(_BUS_ID, bus_id or "")
    return (int(match[1] or "0", 16), match[2].lower()) if match else None
