"""What somebody asks for: the request, until when to wait, and the settings."""

import time
from typing import NamedTuple

from reserve_gpu.gpus import cuda_environment, names
from reserve_gpu.model import parsing
from reserve_gpu.model.devices import MIB
from reserve_gpu.model.errors import RequestError
from reserve_gpu.model.requests import UNITS, Lease, Request, ReservationTerms, Rules, Size
from reserve_gpu.model.untrusted import sanitize
from reserve_gpu.system import settings

# No GPU that runs CUDA has so little: who asks for 16 means GB, though a bare number is MiB.
_LEAST_BARE_MIB = 1000


class Deadline(NamedTuple):
    """Until when somebody waits.

    limit_s: None for not at all. at: by time.monotonic(). asks: for what, in words.
    """

    limit_s: float | None
    at: float
    asks: str = ""

    @classmethod
    def after(cls, wait: object) -> "Deadline":
        """Make a deadline of a duration from now. Raises RequestError."""
        is_name = isinstance(wait, str) and names.is_name(wait)
        hint = f" To wait for GPUs by name: {sanitize(str(wait))} --wait." if is_name else ""
        limit_s = None if wait is None else parsing.parse_duration(wait, hint=hint)
        return cls(limit_s, time.monotonic() + (limit_s or 0.0))

    @property
    def waits(self) -> bool:
        """Tell whether there is anything to wait for."""
        return self.limit_s is not None

    @property
    def left_s(self) -> float:
        """Return the seconds until then, 0 when it is over."""
        return max(0.0, self.at - time.monotonic())


def parse(  # noqa: PLR0913 - these are reserve()'s
    devices: names.DeviceNames | None,
    *,
    count: int | None = None,
    min_memory: float | str | None = None,
    name: str | None = None,
    memory: float | str | None = None,
    note: str | None = None,
    for_: float | str | None = None,
    until: str | None = None,
    idle: float | str | None = None,
    if_wanted: bool = False,
    end_kernel: bool = False,
) -> Request:
    """Make a request of the arguments of reserve(). Raises RequestError."""
    named = () if devices is None or devices == () else names.parse(devices)
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
    least = Size(0.0) if min_memory is None else _memory("min_memory", min_memory)
    size = None if memory is None else _part(memory)
    if for_ is not None and until is not None:
        raise RequestError("For how long, or until when? Give one of the two.")
    lease = Lease(
        lasts_s=None if for_ is None else _some_time(for_),
        until=None if until is None else parsing.parse_moment(until, time.time()),
        idle_s=None if idle is None else _some_time(idle),
        if_wanted=if_wanted,
        end_kernel=end_kernel,
    )
    if lease != Lease() and not lease.has_end:
        what = "if wanted" if if_wanted else "with the end of the kernel"
        raise RequestError(f"To release it {what}, say when: after 4h, at 18:00, or idle for 1h.")
    return Request(
        devices=named,
        count=count,
        min_memory_mib=least.mib,
        memory_unit=least.unit,
        model=name or "",
        terms=ReservationTerms(size, lease, note),
    )


def idle_mib() -> float | None:
    """Return the memory in MiB up to which a device is idle, or None for the default.

    Raises:
        RequestError: The setting is not a size.
    """
    return cuda_environment.read_size_mib(settings.IDLE_MEMORY)


def rules() -> Rules | None:
    """Return what the administrator's file says now to this user, None if there is none."""
    file = settings.config_file()
    if file is None:
        return None
    # Few machines have such a file, and its parser loads slowly.
    from reserve_gpu.allocation import admin_rules

    return admin_rules.read(file)


def _part(memory: str | float) -> Size:
    """Return the part of each GPU that somebody typed. Raises RequestError."""
    if percent := parsing.parse_percent(memory):
        return Size(0.0, percent=percent)
    size = _memory("memory", memory)
    if not size.mib:
        raise RequestError("A part of a GPU needs some memory: give its size, as 10GB.")
    return size


def _memory(keyword: str, size: str | float) -> Size:
    """Return the size that somebody typed. keyword: of reserve(). Raises RequestError."""
    number, unit = parsing.size_and_unit(size)
    if unit is None and 0 < number < _LEAST_BARE_MIB:
        raise RequestError(_which_unit(keyword, size))
    unit = unit or "MiB"
    return Size(number * UNITS[unit] / MIB, unit)


def _some_time(text: float | str) -> float:
    """Parse a duration that has an end, and is not over at once. Raises RequestError."""
    duration_s = parsing.parse_duration(text)
    if not 0 < duration_s < parsing.LONGEST_S:  # what is longer is parsed as the longest
        which = "Give 30m, 4h or 2d, and 34722d at most."
        raise RequestError(f"{sanitize(str(text))!r} is no time to hold a GPU. {which}")
    return duration_s


def _which_unit(keyword: str, size: str | float) -> str:
    """Return what to say to a number without a unit that is too small to be MiB."""
    number = str(size).strip()
    forms = [f"{number}GB", f"{number}MiB"]
    if not isinstance(size, str):
        forms = [f'{keyword}="{form}"' for form in forms]
    return f"{number} MiB or {number} GB? Write {forms[0]} or {forms[1]}."
