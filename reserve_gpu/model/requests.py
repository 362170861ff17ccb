"""Data types for requests, leases and the administrator's rules.

Unless a name says otherwise, memory sizes are in MiB and times are in seconds since the epoch.
"""

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import NamedTuple, TypeAlias

from reserve_gpu.model.clocks import Instant
from reserve_gpu.model.devices import MIB, Device

Variables: TypeAlias = Mapping[str, str | None]  # environment variables; an unset one is None


Fact: TypeAlias = str | float | bool  # value that a feature passes on in a reservation handover


MOST_WANTED = 1024  # maximum number of devices listed in a waiter's record


MOST_AHEAD = 512  # maximum number of tickets listed in a waiter's record


LONG_ENTRY = 32  # maximum combined length of a listed ticket's number and time, in characters


# The number of bytes in each unit.
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


UNITS |= {"KiB": 2**10, "MiB": MIB, "GiB": 2**30, "TiB": 2**40}


class Size(NamedTuple):
    """A memory size and the unit in which to display it.

    Attributes:
        mib: The size in MiB.
        unit: The unit in which the size is displayed.
        percent: The size as a percentage of a device's memory, or None. `of()` converts it to MiB.
    """

    mib: float
    unit: str = "GiB"
    percent: float | None = None

    def of(self, device: Device) -> "Size":
        """Return this size, converting a percentage to MiB based on the device's usable memory."""
        if self.percent is None:
            return self
        return Size(max(1.0, (device.usable_mib or 0) * self.percent // 100))


class Lease(NamedTuple):
    """The conditions that end a reservation, as set by the user or an administrator's rule.

    Attributes:
        lasts_s: The duration in seconds. It is converted to `until` when the reservation starts.
        until: The time at which the reservation ends.
        idle_s: The idle limit in seconds. The reservation ends once it has been idle for this long.
            It is idle when no cell is running and no device is in use.
        if_wanted: Whether the reservation ends only if a waiter could use a device.
        end_kernel: Whether to end the process if the device memory can't be freed otherwise.
        is_strict: Whether the reservation ends even if a cell is running. Only an administrator's
            rule sets this.
        is_jobs: Whether `until` is the time at which the batch system ends the batch job.
        until_boot: `until` in seconds since boot, if it was calculated from a duration.
            It takes precedence over `until`.
        own_until: If `is_jobs` is true, the end time set by the user or a rule. It applies if the
            job runs past its announced end time.
        own_until_boot: `own_until` in seconds since boot, if it was calculated from a duration.
    """

    lasts_s: float | None = None
    until: float | None = None
    idle_s: float | None = None
    if_wanted: bool = False
    end_kernel: bool = False
    is_strict: bool = False
    is_jobs: bool = False
    until_boot: float | None = None
    own_until: float | None = None
    own_until_boot: float | None = None

    @property
    def has_end(self) -> bool:
        """Return whether the lease can end the reservation while its process is still running."""
        return not (self.lasts_s is None and self.until is None and self.idle_s is None)

    def is_by_idleness(self, at: float) -> bool:
        """Return whether a reservation that ends at this time ends because of the idle limit.

        Args:
            at: The time at which the reservation ends, in seconds since the epoch.
        """
        return self.idle_s is not None and (self.until is None or at < self.until)

    def begun(self, now: Instant) -> "Lease":
        """Return the lease of a reservation that starts now, converting `lasts_s` to `until`."""
        if self.lasts_s is None:
            return self
        return self._replace(lasts_s=None).ending(now.later(self.lasts_s))

    @property
    def own(self) -> "Lease":
        """Return the lease without the batch job's end time."""
        if not self.is_jobs:
            return self
        until, boot = self.own_until, self.own_until_boot
        return self._replace(
            until=until, until_boot=boot, is_jobs=False, own_until=None, own_until_boot=None
        )

    def within(self, job_end: float | None, now: Instant) -> "Lease":
        """Return the lease limited by the end time of a batch job.

        Whichever of the two end times comes first applies. A job end time in the past is ignored.

        Args:
            job_end: The job's end time in seconds since the epoch, or None if it has none.
            now: The current time.
        """
        own = self.own
        until = own.at(now).until
        if job_end is None or job_end <= now.wall or (until is not None and until <= job_end):
            return own
        return own._replace(
            until=job_end,
            until_boot=None,
            is_jobs=True,
            own_until=own.until,
            own_until_boot=own.until_boot,
        )

    def at(self, now: Instant) -> "Lease":
        """Return the lease with its end times adjusted for changes to the wall clock.

        Call this before you compare or display the end time of a lease that has started. A job end
        time in the past is ignored.
        """
        if self.is_jobs and self.until is not None and self.until <= now.wall:
            return self.own.at(now)
        return self._replace(
            until=_as_set(now, self.until, self.until_boot),
            own_until=_as_set(now, self.own_until, self.own_until_boot),
        )

    def ending(self, end: Instant) -> "Lease":
        """Return the lease with a different end time, measured by the boot clock."""
        return self._replace(until=end.wall, until_boot=end.boot)

    def changed_by(self, new: "Lease") -> "Lease":
        """Return this lease, updated from a new lease but without a batch job's end time."""
        ends = self.own if new.until is None else new.own
        return Lease(
            until=ends.until,
            until_boot=ends.until_boot,
            idle_s=self.idle_s if new.idle_s is None else new.idle_s,
            if_wanted=new.if_wanted or self.if_wanted,
            end_kernel=new.end_kernel or self.end_kernel,
            is_strict=new.is_strict or self.is_strict,
        )


NO_LEASE = Lease()


class ReservationTerms(NamedTuple):
    """The terms that apply to each device of a reservation.

    Attributes:
        size: The size of the reserved part, or None for the whole device.
        lease: The conditions that end the reservation.
        note: The note for other users.
    """

    size: Size | None = None
    lease: Lease = NO_LEASE
    note: str | None = None

    @property
    def memory_limit_mib(self) -> float | None:
        """Return the size of the reserved part in MiB, or None for the whole device."""
        return self.size.mib if self.size else None

    def changed_by(self, new: "ReservationTerms") -> "ReservationTerms":
        """Return these terms, updated with those of a new request.

        The size is always replaced. The note and the values in the lease are only replaced if the
        new request sets them.
        """
        note = self.note if new.note is None else new.note
        return ReservationTerms(new.size, self.lease.changed_by(new.lease), note)


class TicketAhead(NamedTuple):
    """A ticket that a waiter's record lists as being ahead of the waiter's own.

    A thousand waiters list hundreds of thousands of tickets, so `WaitRequest` keeps these as text.

    Attributes:
        name: The ticket file's name.
        number: The ticket's number.
        left: The time at which the ticket's waiter left the queue, in seconds since boot, or None
            if the waiter was still in the queue when last checked.
    """

    name: str
    number: int
    left: float | None = None

    def __str__(self) -> str:
        """Return the ticket as it is written in a record."""
        return f"{self.name} {self.number}{'' if self.left is None else f' {self.left:.0f}'}"

    @classmethod
    def parse(cls, text: str) -> "TicketAhead | None":
        """Parse a ticket listed in a record; return None if it is invalid."""
        name, _, rest = text.partition(" ")
        number, has_left, left = rest.partition(" ")
        texts = (number, left) if has_left else (number,)
        if not all(each.isascii() and each.isdecimal() for each in texts) or len(rest) > LONG_ENTRY:
            return None
        return cls(name, int(number), float(left) if has_left else None)


class WaitRequest(NamedTuple):
    """A waiter's request.

    Attributes:
        text: The request in words.
        needs: The number of devices that the waiter needs at the same time.
        wants: The UUIDs of the devices that the waiter could use, or None for any device.
        tickets_ahead: The tickets ahead of the waiter's own, one per line in the form that
            `TicketAhead.parse` accepts. None if an older version wrote the record, or if its list
            is invalid. Single lines might be invalid as well.
    """

    text: str | None = None
    needs: int = 1
    wants: frozenset[str] | None = None
    tickets_ahead: str | None = None


class Rule(NamedTuple):
    """A rule in the administrator's file that applies to a user.

    Attributes:
        text: The line in the file, such as `time = "24h"`.
        table: The TOML table that contains the line, such as `[users.alice]`.
        file: The file's path.
        value: The value as a number, where a larger number is more generous. Durations are in
            seconds. For `after_cuda`, "warn" is 1 and "end" is 0.
    """

    text: str
    table: str
    file: str
    value: float


class Rules(NamedTuple):
    """The rules in the administrator's file that apply to one user.

    A rule is None if the file does not set it. docs/rules.md describes the limits.

    Attributes:
        file: The file's path.
        user: The user name.
        message: The administrator's message to all users.
        gpus: The limit on the number of GPUs.
        time: The limit on the duration of a reservation.
        idle: The idle limit.
        after_cuda: The action to take if CUDA has started in a process whose reservation ends.
        drain: The rule that withdraws devices.
        drained: The names of the withdrawn devices.
        history: Whether to keep a history, or None to keep one if the history directory exists.
        problems: The errors in the file. Each is a single line.
    """

    file: str
    user: str
    message: str | None = None
    gpus: Rule | None = None
    time: Rule | None = None
    idle: Rule | None = None
    after_cuda: Rule | None = None
    drain: Rule | None = None
    drained: tuple[str, ...] = ()
    history: bool | None = None
    problems: tuple[str, ...] = ()


class Request(NamedTuple):
    """A request for devices.

    Attributes:
        devices: The names of the devices as the user typed them, or an empty tuple for any devices.
        count: The number of devices to reserve if `devices` is empty. None means one device, or all
            devices that the process already holds.
        min_memory_mib: The minimum total memory that each device must have, in MiB.
        memory_unit: The unit in which the minimum memory was requested.
        model: Text that each device's name must contain, ignoring case.
        terms: The terms that apply to each device.
    """

    devices: tuple[str, ...] = ()
    count: int | None = None  # type: ignore[assignment]
    min_memory_mib: float = 0.0
    memory_unit: str = "GiB"
    model: str = ""
    terms: ReservationTerms = ReservationTerms()

    @property
    def needed(self) -> int:
        """Return the number of requested devices."""
        return len(self.devices) or self.count or 1

    def on(self, devices: Sequence[Device]) -> "Request":
        """Return this request with its size converted to MiB if it is a percentage.

        The percentage applies to the device with the least usable memory.

        Args:
            devices: The devices to reserve.
        """
        size = self.terms.size
        if size is None or size.percent is None:
            return self
        size = min(map(size.of, devices))
        return self._replace(terms=self.terms._replace(size=size))


class End(Enum):
    """Reasons why a reservation or wait ended. The values are written to the history."""

    RELEASED = "released"
    ASKED = "released from elsewhere"
    OVER = "its time was over"
    CHANGED = "another reservation took its place"
    RESTART = "kept for a restart"
    EXIT = "its process ended"
    LOST = "its process was killed"
    GRANTED = "got it"
    GAVE_UP = "gave up"


def _as_set(now: Instant, until: float | None, boot: float | None) -> float | None:
    """Adjust a wall-clock time for changes to the clock since the time was recorded."""
    return None if until is None else max(0.0, until + now.clock_set_s(until, boot))
