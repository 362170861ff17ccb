"""Pure functions that match device names: indices, UUIDs and their prefixes, and PCI bus ids.

The first half handles names that users type. The second half interprets the entries of
`CUDA_VISIBLE_DEVICES` as CUDA does.
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
DeviceNames: TypeAlias = str | int | Iterable[str | int]  # device names as callers pass them

# These patterns are not compiled at import, because most requests name no device.
_INDEX = r"(?:gpu|cuda:)?([0-9]{1,4})"
_RANGE = r"(?:gpu)?([0-9]{1,4})-(?:gpu)?([0-9]{1,4})"
# Only one digit is accepted as an instance number, so that 18:00 is not mistaken for a MIG
# instance.
_INSTANCE = r"(?:gpu)?([0-9]{1,4}):([0-9])"
_BUS_ID = r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}:[0-9a-f]{2}\.[0-7])"
_UUID = r"(?:GPU|MIG)-[0-9a-z/-]+"
_STRTOUL = r"\s*([+-]?)0*([0-9]+)"  # the prefix that C's strtoul() reads as a number
_STRTOUL_BLANKS = " \t\n\v\f\r"
_MAX_DIGITS = 9  # more than any index needs; int() rejects numbers with thousands of digits


def parse(text: DeviceNames) -> tuple[str, ...]:
    """Split text into device names, keeping their order. For example, `0-3` gives four names.

    Args:
        text: Names separated by commas or whitespace, an index, or an iterable of either.

    Raises:
        RequestError: A word can't be a device name.
    """
    parts = text if isinstance(text, Iterable) and not isinstance(text, (str, bytes)) else [text]
    joined = ",".join(str(part) for part in parts)
    return tuple(
        name for word in re.split(r"[,\s]+", joined) if word for name in _names_in_word(word)
    )


def is_name(word: str) -> bool:
    """Return whether a word could be a device name on some machine."""
    try:
        return bool(parse(word))
    except RequestError:
        return False


def gpu_index(name: str) -> int | None:
    """Return the GPU index from a name such as `2`, `GPU2` or `2:0`, or None if it has no index."""
    match = _match(_INDEX, name) or _match(_INSTANCE, name)
    return int(match[1]) if match else None


def pick(name: str, devices: Sequence[Device | Fault]) -> Device | Fault:
    """Return the device with this name.

    Args:
        name: An index, a UUID or a UUID's prefix, or a PCI bus id.
        devices: All devices on the machine.

    Raises:
        RequestError: The name matches no device, or more than one.
    """
    usable = [device for device in devices if isinstance(device, Device)]
    matches = matching(name, usable)
    if len(matches) == 1:
        return matches[0]
    if len(matches) > 1:
        uuids = ", ".join(sanitize(device.uuid) for device in matches)
        raise RequestError(f"{sanitize(name)} matches several UUIDs: {uuids}.")
    index = gpu_index(name)
    for fault in devices:
        if isinstance(fault, Fault) and (
            _is_match(name, fault) or (fault.instance is None and fault.index == index)
        ):
            return fault
    instances = [d.number for d in usable if d.instance is not None and d.index == index]
    if instances:
        raise RequestError(
            f"GPU{index} is split into MIG instances. Name one of them: {', '.join(instances)}."
        )
    if (match := _match(_INSTANCE, name)) and any(device.index == index for device in usable):
        is_range = int(match[1]) < int(match[2])
        hint = f" For a range of GPUs, write {match[1]}-{match[2]}." if is_range else ""
        raise RequestError(
            f"No GPU is named {sanitize(name)}, because GPU{index} has no MIG instances.{hint}"
        )
    faults = "".join(f" {_describe(each)}." for each in devices if isinstance(each, Fault))
    first, last = devices[0].label, devices[-1].label
    short_lists = {1: first, 2: f"{first} and {last}"}
    listed = short_lists.get(len(devices), f"{first} to {last}")
    raise RequestError(f"No GPU is named {sanitize(name)}. This machine has {listed}.{faults}")


def matching(name: str, devices: Iterable[AnyDevice]) -> list[AnyDevice]:
    """Return the devices that match a name. Only a UUID's prefix can match more than one."""
    return [device for device in devices if _is_match(name, device)]


def is_one_of(device: Device | Fault, names: Iterable[str]) -> bool:
    """Return whether one of the names matches the device, or the GPU that contains it."""
    gpu = device._replace(instance=None)
    if isinstance(gpu, Device) and gpu.gpu_uuid:
        gpu = gpu._replace(uuid=gpu.gpu_uuid)
    return any(_is_match(name, each) for name in names for each in (device, gpu))


def bare_uuid(uuid: str) -> str:
    """Return a UUID in the form that CUDA uses, in lowercase and without `GPU-` or `MIG-`."""
    return uuid.lower().removeprefix("mig-").removeprefix("gpu-")


def model(device: Device) -> str:
    """Return the model name of a GPU, or of the GPU that contains a MIG instance."""
    name = device.name or ""
    if device.instance is None:
        return name
    return name.partition(" MIG ")[0]  # for example, "NVIDIA A100-SXM4-40GB MIG 1g.5gb"


def require_distinct(devices: Sequence[Device | Fault]) -> None:
    """Raise RequestError if a device is named twice."""
    for position, device in enumerate(devices):
        if device in devices[:position]:
            raise RequestError(f"{device.label} is named twice.")


def require_one_kind(devices: Sequence[Device | Fault]) -> None:
    """Raise RequestError if GPUs and MIG instances are mixed, which CUDA does not allow.

    https://docs.nvidia.com/datacenter/tesla/mig-user-guide/mig-device-names.html
    """
    gpus = [device.label for device in devices if device.instance is None]
    instances = [device.label for device in devices if device.instance is not None]
    if gpus and instances:
        raise RequestError(
            f"{gpus[0]} is a whole GPU and {instances[0]} is a MIG instance. CUDA does not let one "
            "process use both."
        )


def entries(value: str) -> list[int | str]:
    """Split CUDA_VISIBLE_DEVICES into UUIDs and numbers, parsing numbers as strtoul() does.

    The list ends at the first entry that is neither a number nor a UUID.
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
    """Return the devices that these CUDA_VISIBLE_DEVICES entries make visible.

    CUDA stops at the first entry that matches no device. If a device is listed twice, CUDA shows no
    devices at all.

    Args:
        listed: The result of `entries`.
        devices: All devices on the machine, in PCI bus order.

    Returns:
        The visible devices, in PCI bus order.
    """
    chosen: list[Device | Fault] = []
    for entry in listed:
        matches = _match_entry(entry, devices)
        if matches is None:
            # The entry might be the UUID of a device that can't be read. Include all faults, so
            # that the user sees the reason.
            chosen += [d for d in devices if isinstance(d, Fault) and d not in chosen]
        if not matches:
            break
        if any(device in chosen for device in matches):
            return []
        chosen += matches
    # If a MIG instance is visible, CUDA shows no whole GPUs.
    instances = [device for device in chosen if device.instance is not None]
    return [device for device in devices if device in (instances or chosen)]


def numbers_within(listed: Sequence[int], count: int) -> list[int]:
    """Return the indices of the GPUs that numeric CUDA_VISIBLE_DEVICES entries make visible.

    Unlike `visible`, this function does not need a list of devices.

    Args:
        listed: The entries, which are indices in PCI bus order.
        count: The number of GPUs in the machine.
    """
    numbers = list(takewhile(lambda number: number < count, listed))
    return sorted(numbers) if len(set(numbers)) == len(numbers) else []


def _match_entry(
    entry: int | str, devices: Sequence[Device | Fault]
) -> list[Device | Fault] | None:
    """Return the devices that a CUDA_VISIBLE_DEVICES entry selects.

    Returns:
        A list of one device, or of all instances of a GPU. The list is empty if the index does not
        exist or the UUID is ambiguous. The result is None if no readable device has the UUID.
    """
    if isinstance(entry, int):
        return [device for device in devices if device.index == entry]
    usable = [device for device in devices if isinstance(device, Device)]
    if entry.startswith("GPU-"):
        matches = [d for d in usable if (d.gpu_uuid or d.uuid).startswith(entry)]
        uuids = {d.gpu_uuid or d.uuid for d in matches}
    else:
        matches = [d for d in usable if d.uuid.startswith(entry) or d.old_name == entry]
        uuids = {d.uuid for d in matches}
    if not uuids:
        return None
    return list(matches) if len(uuids) == 1 else []


def _is_match(name: str, device: Device | Fault) -> bool:
    """Return whether a name typed by a user matches a device. A Fault matches only by index."""
    if match := _match(_INDEX, name):
        return (device.index, device.instance) == (int(match[1]), None)
    if match := _match(_INSTANCE, name):
        return (device.index, device.instance) == (int(match[1]), int(match[2]))
    if isinstance(device, Fault):
        return False
    if _match(_BUS_ID, name):
        return device.instance is None and _bus(device.bus_id or "") == _bus(name)
    return device.uuid.lower().startswith(name.lower())


def _names_in_word(word: str) -> list[str]:
    """Return the indices in a range such as `0-3`, or the word itself if it is a single name."""
    if match := _match(_RANGE, word):
        first, last = int(match[1]), int(match[2])
        if first <= last:
            return [str(index) for index in range(first, last + 1)]
    if any(_match(pattern, word) for pattern in (_INDEX, _INSTANCE, _BUS_ID, _UUID)):
        return [word]
    raise RequestError(
        f"{sanitize(word)!r} is not a GPU name. Give an index (2, GPU2 or cuda:2), several (1,3), "
        "a range (0-3), a UUID or its beginning (GPU-8f2a), a MIG instance (1:0) or a PCI bus ID "
        "(0000:03:00.0)."
    )


def _bus(bus_id: str) -> tuple[int, str] | None:
    """Split a PCI bus id into its domain, which is 0 by default, and the rest."""
    match = _match(_BUS_ID, bus_id)
    return (int(match[1] or "0", 16), match[2].lower()) if match else None


def _match(pattern: str, text: str) -> re.Match[str] | None:
    return re.fullmatch(pattern, text, re.IGNORECASE | re.ASCII)


def _describe(fault: Fault) -> str:
    return f"{fault.label} can't be used: {sanitize(fault.reason, REASON_LIMIT)}"
