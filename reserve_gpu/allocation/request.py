"""Parse requests, timeouts and settings, and read the administrator's rules."""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from reserve_gpu.gpus import cuda_environment, names
from reserve_gpu.model import parsing
from reserve_gpu.model.devices import MIB
from reserve_gpu.model.errors import RequestError
from reserve_gpu.model.requests import UNITS, Lease, Request, ReservationTerms, Rules, Size
from reserve_gpu.model.untrusted import sanitize
from reserve_gpu.system import settings

# A number without a unit is in MiB. Every CUDA GPU has more memory than this, so a smaller number
# such as 16 probably means 16 GB.
_LEAST_BARE_MIB = 1000
_WITHOUT_LIMIT = {"forever", "always", "inf", "infinite", "infinity", "indefinitely", "unlimited"}


class Deadline(NamedTuple):
    """The deadline for a wait.

    Attributes:
        limit_s: The maximum wait in seconds, or None if the request does not wait.
        at: The time of the deadline, as measured by time.monotonic().
        asks: The request as text.
    """

    limit_s: float | None
    at: float
    asks: str = ""

    @classmethod
    def after(cls, wait: object) -> "Deadline":
        """Return the deadline for a wait that starts now.

        Args:
            wait: A duration that `parsing.parse_duration` accepts, or None for no wait.

        Raises:
            RequestError: The duration is invalid.
        """
        hint = ""
        if isinstance(wait, str) and names.is_name(wait):
            hint = f" To wait for specific GPUs: {sanitize(wait)} --wait."
        elif isinstance(wait, str) and wait.strip().lower() in _WITHOUT_LIMIT:
            hint = " To wait without a limit, leave it out: --wait (in Python: wait=True)."
        limit_s = None if wait is None else parsing.parse_duration(wait, hint=hint)
        return cls(limit_s, time.monotonic() + (limit_s or 0.0))

    @property
    def waits(self) -> bool:
        """Return whether the request waits."""
        return self.limit_s is not None

    @property
    def left_s(self) -> float:
        """Return the seconds until the deadline, or 0 if it has passed."""
        return max(0.0, self.at - time.monotonic())


def parse(  # noqa: PLR0913 - takes the same arguments as reserve()
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
    """Build a request from the arguments of `reserve()`.

    Raises:
        RequestError: An argument is invalid, or the arguments contradict each other.
    """
    named = () if devices is None or devices == () else names.parse(devices)
    if devices is not None and not named:
        raise RequestError("No GPU was given. To get the first free GPU, omit the argument.")
    if count is not None and (type(count) is not int or count < 1):
        raise RequestError(f"The number of GPUs must be 1 or more, not {count!r}.")
    if named and count is not None and count != len(named):
        raise RequestError(
            f"GPUs named: {len(named)}; number requested: {count}. Give either the names or the "
            "number."
        )
    for keyword, text in (("name", name), ("note", note)):
        if text is not None and not isinstance(text, str):
            raise RequestError(f"The {keyword} must be a string, not {text!r}.")
    least = Size(0.0) if min_memory is None else _memory("min_memory", min_memory)
    size = None if memory is None else _part(memory)
    if for_ is not None and until is not None:
        raise RequestError("Give either a duration or an end time, not both.")
    lease = Lease(
        lasts_s=None if for_ is None else _lease_duration(for_),
        until=None if until is None else _end_time(until),
        idle_s=None if idle is None else _limited_duration(idle),
        if_wanted=if_wanted,
        end_kernel=end_kernel,
    )
    if lease != Lease() and not lease.has_end:
        action = (
            "release the GPU only if another process is waiting for one"
            if if_wanted
            else "end the kernel with the lease"
        )
        when = "for_ (--for 4h), until (--until 18:00) or idle (--idle 1h)"
        raise RequestError(f"To {action}, also say when: {when}.")
    return Request(
        devices=named,
        count=count,
        min_memory_mib=least.mib,
        memory_unit=least.unit,
        model=name or "",
        terms=ReservationTerms(size, lease, note),
    )


def idle_mib() -> float | None:
    """Return the maximum memory use of an idle device in MiB, or None for the default.

    Raises:
        RequestError: The setting is not a valid size.
    """
    return cuda_environment.read_size_mib(settings.IDLE_MEMORY)


def rules() -> Rules | None:
    """Return the rules that currently apply to this user, or None if there is no rules file."""
    file = settings.config_file()
    if file is None:
        return None
    # Import the parser only if there is a rules file, because the import is slow and few machines
    # have such a file.
    from reserve_gpu.allocation import admin_rules

    return admin_rules.read(file)


def _part(memory: str | float) -> Size:
    """Parse the size of a part of a GPU, or raise RequestError if it is invalid."""
    if percent := parsing.parse_percent(memory):
        return Size(0.0, percent=percent)
    size = _memory("memory", memory)
    if not size.mib:
        raise RequestError("A part of a GPU must be larger than 0. Give its size, such as 10GB.")
    return size


def _memory(keyword: str, size: str | float) -> Size:
    """Parse a memory size, or raise RequestError if it is invalid or lacks a unit.

    The error message refers to `keyword`, the parameter of `reserve()` that sets this size.
    """
    number, unit = parsing.size_and_unit(size)
    if unit is None and 0 < number < _LEAST_BARE_MIB:
        raise RequestError(_unit_question(keyword, size))
    unit = unit or "MiB"
    return Size(number * UNITS[unit] / MIB, unit)


def _limited_duration(text: float | str) -> float:
    """Parse a finite duration above 0, or raise RequestError if it is invalid."""
    duration_s = parsing.parse_duration(text)
    if duration_s <= 0:
        raise RequestError("Give a duration above 0, such as 30m, 4h or 2d.")
    if duration_s >= parsing.LONGEST_S:  # longer durations are parsed as LONGEST_S
        raise RequestError(f"{sanitize(str(text))!r} is too long. Give 34722d or less.")
    return duration_s


def _lease_duration(text: float | str) -> float:
    """Parse the duration of a lease, or raise RequestError if it is invalid or a time."""
    try:
        return _limited_duration(text)
    except RequestError:
        if isinstance(text, str) and _is_valid(parsing.parse_moment, text, time.time()):
            raise RequestError(_swapped(text, "a time, not a duration", "until")) from None
        raise


def _end_time(text: object) -> float:
    """Parse the end time of a lease, or raise RequestError if it is invalid or a duration."""
    try:
        return parsing.parse_moment(text, time.time())
    except RequestError:
        if isinstance(text, str) and _is_valid(parsing.parse_duration, text):
            raise RequestError(_swapped(text, "a duration, not a time", "for")) from None
        raise


def _is_valid(parser: Callable[..., object], *arguments: object) -> bool:
    """Return whether a parser accepts these arguments."""
    with suppress(RequestError):
        parser(*arguments)
        return True
    return False


def _swapped(text: str, problem: str, keyword: str) -> str:
    """Return the message that `for` and `until` were confused."""
    word = text if text.split() == [text] else repr(text)
    python = f"{keyword.replace('for', 'for_')}={text!r}"
    return f"{text!r} is {problem}. Use --{keyword} {word} (in Python: {python})."


def _unit_question(keyword: str, size: str | float) -> str:
    """Return a message that asks for the unit of a number that is too small to be in MiB."""
    number = str(size).strip()
    forms = [f"{number}GB", f"{number}MiB"]
    if not isinstance(size, str):
        forms = [f'{keyword}="{form}"' for form in forms]
    return f"{number} MiB or {number} GB? Write {forms[0]} or {forms[1]}."
