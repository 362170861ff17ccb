"""What somebody asks for: the request, sizes of memory, durations, and the one setting."""

import math
import os
import re
import time
from typing import NamedTuple

from reserve_gpu import host
from reserve_gpu.errors import RequestError, shown
from reserve_gpu.gpus import names
from reserve_gpu.gpus.names import DeviceNames
from reserve_gpu.model import MIB, UNITS, Request

_DURATION = r"([0-9]{1,12}(?:\.[0-9]{1,12})?)\s*(s|m|min|h|d|)"
_SECONDS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_LONGEST_S = 3e9  # a century, for which Python can still sleep
_SIZE = r"([0-9]{1,12}(?:\.[0-9]{1,12})?)\s*(?:([kmgt])(i?)b?)?"
# No GPU that runs CUDA has so little: who asks for 16 means GB, though a bare number is MiB.
_LEAST_BARE_MIB = 1000


class Deadline(NamedTuple):
    """Until when somebody waits. limit_s: None for not at all. at: by time.monotonic()."""

    limit_s: float | None
    at: float

    @classmethod
    def after(cls, wait: object) -> "Deadline":
        """The deadline that a duration from now makes. Raises RequestError."""
        limit_s = None if wait is None else parse_duration(wait)
        return cls(limit_s, time.monotonic() + (limit_s or 0.0))

    @property
    def waits(self) -> bool:
        """Whether there is anything to wait for."""
        return self.limit_s is not None

    @property
    def left_s(self) -> float:
        """The seconds until then, 0 when it is over."""
        return max(0.0, self.at - time.monotonic())


def parse(  # noqa: PLR0913 - these are reserve()'s
    devices: DeviceNames | None,
    *,
    count: int | None = None,
    min_memory: float | str | None = None,
    name: str | None = None,
    exclude: DeviceNames | None = (),
    share: bool = False,
    memory: float | str | None = None,
    note: str | None = None,
) -> Request:
    """The request that the arguments of reserve() make. Raises RequestError."""
    named, excluded = _names(devices), _names(exclude)
    if devices is not None and not named:
        raise RequestError("No GPU is named. Leave the name out to get the first free one.")
    if count is not None and (type(count) is not int or count < 1):
        raise RequestError(f"The number of GPUs must be 1 or more, not {count!r}.")
    if named and count is not None and count != len(named):
        raise RequestError(
            f"{len(named)} named and {count} asked for: give the names or the number."
        )
    for what, text in (("name", name), ("note", note)):
        if text is not None and not isinstance(text, str):
            raise RequestError(f"The {what} must be a text, not {text!r}.")
    least_mib, least_unit = _memory("min_memory", min_memory)
    part_mib, part_unit = _memory("memory", memory)
    if part_mib == 0:
        raise RequestError("A part of a GPU needs some memory: give its size, as 10GB.")
    return Request(
        devices=named,
        count=count,
        min_memory_mib=least_mib or 0.0,
        memory_unit=least_unit,
        model=name or "",
        exclude=excluded,
        share=share or part_mib is not None,
        part_mib=part_mib,
        part_unit=part_unit,
        note=note,
    )


def parse_size(text: str | float) -> float:
    """A size of memory in MiB: `16GB`, `16GiB`, `16000` (MiB). Raises RequestError."""
    number, unit = _size(text)
    return number * UNITS[unit or "MiB"] / MIB


def parse_duration(text: object) -> float:
    """A time in seconds: `90`, `90s`, `10m`, `2h`, True for ever. Raises RequestError."""
    if text is True:
        return math.inf
    if isinstance(text, (int, float)) and not isinstance(text, bool) and text >= 0:
        return float(min(text, _LONGEST_S))
    match = re.fullmatch(_DURATION, str(text).strip(), re.IGNORECASE | re.ASCII)
    if not match:
        is_name = isinstance(text, str) and names.is_name(text)
        text = shown(str(text))
        hint = f" To wait for GPUs by name: {text} --wait." if is_name else ""
        raise RequestError(f"{text!r} is no duration. Give 90, 90s, 10m or 2h.{hint}")
    return min(float(match[1]) * _SECONDS[match[2].lower()], _LONGEST_S)


def idle_mib() -> float | None:
    """Memory in MiB up to which a device is idle, None for the default. Raises RequestError."""
    return setting_mib(host.IDLE_MEMORY)


def setting_mib(variable: str) -> float | None:
    """A size in MiB that a variable sets, None where it does not. Raises RequestError."""
    size = os.environ.get(variable)
    if not size:
        return None
    try:
        return parse_size(size)
    except RequestError as error:
        raise RequestError(f"{variable}: {error}") from error


def _memory(keyword: str, size: str | float | None) -> tuple[float | None, str]:
    """A size of memory in MiB, and its unit. keyword: of reserve(). Raises RequestError."""
    if size is None:
        return None, "GiB"
    number, unit = _size(size)
    if unit is None and 0 < number < _LEAST_BARE_MIB:
        raise RequestError(_which_unit(keyword, size))
    unit = unit or "MiB"
    return number * UNITS[unit] / MIB, unit


def _size(text: str | float) -> tuple[float, str | None]:
    """A size of memory as a number and its unit, None where none was given. Raises RequestError."""
    if isinstance(text, float) and text.is_integer():
        text = int(text)
    match = re.fullmatch(_SIZE, str(text).strip(), re.IGNORECASE | re.ASCII)
    if not match:
        raise RequestError(f"{shown(str(text))!r} is no size. Give 16GB, 16GiB or 16000 (MiB).")
    unit = f"{match[2].upper()}{match[3].lower()}B" if match[2] else None
    return float(match[1]), unit


def _which_unit(keyword: str, size: str | float) -> str:
    """What is said to a bare number that no GPU is too small for; in Python's words to Python."""
    number = str(size).strip()
    forms = [f"{number}GB", f"{number}MiB"]
    if not isinstance(size, str):
        forms = [f'{keyword}="{form}"' for form in forms]
    return f"{number} MiB or {number} GB? Write {forms[0]} or {forms[1]}."


def _names(devices: DeviceNames | None) -> tuple[str, ...]:
    return () if devices is None or devices == () else names.parse(devices)
