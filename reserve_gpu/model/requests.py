"""Requests, the terms and the lease of a reservation, and the administrator's rules.

Memory is in MiB. Times are in seconds since the epoch unless a name says otherwise.
"""

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import NamedTuple, TypeAlias

from reserve_gpu.model.clocks import Instant
from reserve_gpu.model.devices import MIB, Device

Variables: TypeAlias = Mapping[str, str | None]  # values of environment variables; None if unset


Fact: TypeAlias = str | float | bool  # value that a feature hands over to the next process


MOST_WANTED = 1024  # maximum number of devices that a waiter's record lists


MOST_AHEAD = 512  # maximum number of tickets that a waiter's record lists


LONG_ENTRY = 32  # maximum length of a listed ticket's number and time, in characters


# Bytes per unit of memory.
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


UNITS |= {"KiB": 2**10, "MiB": MIB, "GiB": 2**30, "TiB": 2**40}


class Size(NamedTuple):
    """An amount of memory, and the unit in which it was requested.

    Attributes:
        mib: The amount in MiB.
        unit: The unit in which the amount is displayed.
        percent: A percentage of each device's memory instead of an amount. `of()` converts it.
    """

    mib: float
    unit: str = "GiB"
    percent: float | None = None

    def of(self, device: Device) -> "Size":
        """Return the size as an amount; a percentage is of the device's usable memory."""
        if self.percent is None:
            return self
        return Size(max(1.0, (device.usable_mib or 0) * self.percent // 100))


class Lease(NamedTuple):
    """The end of a reservation, from the user's request or an administrator's rule.

    Attributes:
        lasts_s: The duration in seconds. When the reservation starts, it is converted to `until`.
        until: The time at which the reservation ends.
        idle_s: Seconds without a running cell and without use of the device, after which the
            reservation ends.
        if_wanted: Whether an idle reservation ends only if a waiter could use the device.
        end_kernel: Whether the process is ended if the memory can't be freed otherwise.
        is_strict: Whether the process is ended even during a cell. Only a rule sets this.
        is_jobs: Whether `until` is the end of the batch job, which the batch system enforces.
        until_boot: The end in seconds since boot, if `until` comes from a duration. It takes
            precedence over `until`.
        own_until: The end from the user or a rule, if `is_jobs`. It applies if the job outlasts
            its announced end.
        own_until_boot: The time of `own_until` in seconds since boot.
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
        """Return whether the reservation may end before its process does."""
        return not (self.lasts_s is None and self.until is None and self.idle_s is None)

    def is_by_idleness(self, at: float) -> bool:
        """Return whether an end at this time is due to idleness.

        Args:
            at: The end of the reservation in seconds since the epoch.
        """
        return self.idle_s is not None and (self.until is None or at < self.until)

    def begun(self, now: Instant) -> "Lease":
        """Return the lease of a reservation that starts now, with `lasts_s` converted."""
        if self.lasts_s is None:
            return self
        return self._replace(lasts_s=None).ending(now.later(self.lasts_s))

    @property
    def own(self) -> "Lease":
        """Return the lease without the end of the batch job."""
        if not self.is_jobs:
            return self
        until, boot = self.own_until, self.own_until_boot
        return self._replace(
            until=until, until_boot=boot, is_jobs=False, own_until=None, own_until_boot=None
        )

    def within(self, job_end: float | None, now: Instant) -> "Lease":
        """Return the lease limited by the end of a batch job.

        The earlier of the two ends counts. A job's end in the past is ignored.

        Args:
            job_end: The end of the job in seconds since the epoch, or None if it has none.
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
        """Return the lease with its ends corrected to the current setting of the wall clock.

        Call this before you compare or display the end of a lease that has started. A job's end in
        the past is ignored.
        """
        if self.is_jobs and self.until is not None and self.until <= now.wall:
            return self.own.at(now)
        return self._replace(
            until=_as_set(now, self.until, self.until_boot),
            own_until=_as_set(now, self.own_until, self.own_until_boot),
        )

    def ending(self, end: Instant) -> "Lease":
        """Return the lease with another end, measured by the boot clock."""
        return self._replace(until=end.wall, until_boot=end.boot)

    def changed_by(self, new: "Lease") -> "Lease":
        """Return this lease with the changes of a new one, and without the end of a batch job."""
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
    """The terms of a reservation, which apply to each of its devices.

    Attributes:
        size: The size of the reserved part, or None for the whole device.
        lease: The end of the reservation.
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
        """Return these terms changed by a new request.

        The size is always replaced. The note and the lease keep the values that the new request
        does not set.
        """
        note = self.note if new.note is None else new.note
        return ReservationTerms(new.size, self.lease.changed_by(new.lease), note)


class TicketAhead(NamedTuple):
    """A ticket that a waiter's record lists as ahead of the waiter.

    Attributes:
        name: The name of the ticket's file.
        number: The number of the ticket.
        left: The time at which the ticket was removed, in seconds since boot, or None if it was
            still there when last checked.
    """

    name: str
    number: int
    left: float | None = None

    @property
    def key(self) -> tuple[str, int]:
        """Return the identity of the ticket, equal to `Ticket.key`."""
        return self.name, self.number

    def __str__(self) -> str:
        """Return the ticket as text for a record."""
        return f"{self.name} {self.number}{'' if self.left is None else f' {self.left:.0f}'}"

    @classmethod
    def parse(cls, text: str) -> "TicketAhead | None":
        """Parse a ticket in a record, or return None if the text is invalid."""
        name, _, rest = text.partition(" ")
        number, has_left, left = rest.partition(" ")
        texts = (number, left) if has_left else (number,)
        if not all(each.isascii() and each.isdecimal() for each in texts) or len(rest) > LONG_ENTRY:
            return None
        return cls(name, int(number), float(left) if has_left else None)


class WaitRequest(NamedTuple):
    """The request of a waiter.

    Attributes:
        text: The request as text.
        needs: The number of devices that the waiter needs at once.
        wants: The UUIDs of the devices that the waiter could use, or None for any device.
        tickets_ahead: The tickets ahead of the waiter's ticket. Older versions do not write them.
    """

    text: str | None = None
    needs: int = 1
    wants: frozenset[str] | None = None
    tickets_ahead: frozenset[TicketAhead] | None = None


class Rule(NamedTuple):
    """One rule in the administrator's file that applies to a user.

    Attributes:
        text: The line of the file, such as `time = "24h"`.
        table: The table that contains the line, such as `[users.alice]`.
        file: The path of the file.
        value: The value as a number; a larger one is more generous. Durations are in seconds, and
            `after_cuda = "warn"` is 1.
    """

    text: str
    table: str
    file: str
    value: float


class Rules(NamedTuple):
    """The rules in the administrator's file for one user.

    A rule that the file does not set is None. docs/rules.md describes the limits.

    Attributes:
        file: The path of the file.
        user: The name of the user.
        message: The message to all users.
        gpus: The limit on the number of GPUs.
        time: The limit on the duration of a reservation.
        idle: The idle limit.
        after_cuda: The action if CUDA still runs when a reservation ends.
        drain: The rule that withdraws devices.
        drained: The names of the withdrawn devices.
        history: Whether a history is kept, or None to keep one if its directory exists.
        problems: The errors in the file, one line each.
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
        count: The number of devices if none is named. None means one device, or all that the
            process already holds.
        min_memory_mib: The minimum total memory of each device in MiB.
        memory_unit: The unit in which the minimum memory was requested.
        model: Text that the name of each device must contain.
        terms: The terms for each device.
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
        """Return the request with a percentage converted to an amount.

        The amount is a percentage of the smallest of the devices.

        Args:
            devices: The devices that would be reserved.
        """
        size = self.terms.size
        if size is None or size.percent is None:
            return self
        size = min(map(size.of, devices))
        return self._replace(terms=self.terms._replace(size=size))


class End(Enum):
    """The cause of the end of a reservation or a wait; the values are written to the history."""

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
    """Use a moment's boot time to correct its wall time to the current setting of the clock."""
    return None if until is None else max(0.0, until + now.clock_set_s(until, boot))
