"""A request, its terms, its lease, and the administrator's rules.

Memory is in MiB. Times are in seconds since the epoch unless a name says otherwise.
"""

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import NamedTuple, TypeAlias

from reserve_gpu.model.clocks import Instant
from reserve_gpu.model.devices import MIB, Device

Variables: TypeAlias = Mapping[str, str | None]  # of the environment; None: it is not set


Fact: TypeAlias = str | float | bool  # what a feature leaves to itself


MOST_WANTED = 1024  # devices that a waiter names


MOST_AHEAD = 512  # tickets that a waiter lists


LONG_ENTRY = 32  # characters, more than two times have


# Bytes in the units of memory that people give sizes in.
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


UNITS |= {"KiB": 2**10, "MiB": MIB, "GiB": 2**30, "TiB": 2**40}


class Size(NamedTuple):
    """An amount of memory, and the unit in which somebody asked for it.

    percent: of the memory of each device, in place of an amount, which is known `of` a device.
    """

    mib: float
    unit: str = "GiB"
    percent: float | None = None

    def of(self, device: Device) -> "Size":
        """Return the amount that it is of that device's memory, less what the driver keeps."""
        if self.percent is None:
            return self
        return Size(max(1.0, (device.usable_mib or 0) * self.percent // 100))


class Lease(NamedTuple):
    """Until when somebody holds what they have reserved: by their own word, or by a rule.

    lasts_s: for so long from the start of the reservation; it becomes `until` then.
    until: up to that moment.
    idle_s: until nothing has run, and nothing has used the device, for so long.
    if_wanted: not before somebody waits who could use it.
    end_kernel: end the process if nothing else frees the memory.
    is_strict: end it in the midst of a cell too; only an administrator's rule says so.
    is_jobs: Whether `until` is the end of the batch job. The batch system enforces that end.
    until_boot: The same by the boot clock, if `until` comes from a duration. Then it decides.
    own_until, own_until_boot: If `is_jobs`, the later end by the user's word or a rule. It holds
        if the job outlives its end.
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
        """Tell whether it ends at all before its process does."""
        return not (self.lasts_s is None and self.until is None and self.idle_s is None)

    def is_by_idleness(self, at: float) -> bool:
        """Tell whether it is idleness that ends it at that moment, and not the clock."""
        return self.idle_s is not None and (self.until is None or at < self.until)

    def begun(self, now: Instant) -> "Lease":
        """Return the lease of a reservation that starts now."""
        if self.lasts_s is None:
            return self
        return self._replace(lasts_s=None).ending(now.later(self.lasts_s))

    @property
    def own(self) -> "Lease":
        """Return the lease without the end of a job."""
        if not self.is_jobs:
            return self
        until, boot = self.own_until, self.own_until_boot
        return self._replace(
            until=until, until_boot=boot, is_jobs=False, own_until=None, own_until_boot=None
        )

    def within(self, job_end: float | None, now: Instant) -> "Lease":
        """Return the lease in a job with that end, if it has one.

        The first end counts. A job's end in the past is ignored.
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
        """Return the lease with its ends by the wall clock as that is set now.

        Call this before you compare or show the end of a lease that has started. A job's end in the
        past is ignored.
        """
        if self.is_jobs and self.until is not None and self.until <= now.wall:
            return self.own.at(now)
        return self._replace(
            until=_as_set(now, self.until, self.until_boot),
            own_until=_as_set(now, self.own_until, self.own_until_boot),
        )

    def ending(self, end: Instant) -> "Lease":
        """Return the lease with another end, which the boot clock decides."""
        return self._replace(until=end.wall, until_boot=end.boot)

    def changed_by(self, new: "Lease") -> "Lease":
        """Return this lease, changed by a new one, without the end of a job."""
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
    """The terms of a reservation, for each device.

    Attributes:
        size: The most memory that its user will use; None for the whole device.
        lease: When the reservation ends.
        note: A line for others to read.
    """

    size: Size | None = None
    lease: Lease = NO_LEASE
    note: str | None = None

    @property
    def memory_limit_mib(self) -> float | None:
        """Return the size in MiB, None for the whole device."""
        return self.size.mib if self.size else None

    def changed_by(self, new: "ReservationTerms") -> "ReservationTerms":
        """Return these terms after a new call, which sets the size and keeps what it leaves out."""
        note = self.note if new.note is None else new.note
        return ReservationTerms(new.size, self.lease.changed_by(new.lease), note)


class TicketAhead(NamedTuple):
    """A ticket that a waiter lists as one ahead of it.

    name, number: The name and the number of the ticket.
    left: When it was left, in seconds since the boot, or None if it was there at the last look.
    """

    name: str
    number: int
    left: float | None = None

    @property
    def key(self) -> tuple[str, int]:
        """Return the identity of the ticket, as in `Ticket.key`."""
        return self.name, self.number

    def __str__(self) -> str:
        """Return the text for a record."""
        return f"{self.name} {self.number}{'' if self.left is None else f' {self.left:.0f}'}"

    @classmethod
    def parse(cls, text: str) -> "TicketAhead | None":
        """Parse an entry of a list, or return None if it is invalid."""
        name, _, rest = text.partition(" ")
        number, has_left, left = rest.partition(" ")
        texts = (number, left) if has_left else (number,)
        if not all(each.isascii() and each.isdecimal() for each in texts) or len(rest) > LONG_ENTRY:
            return None
        return cls(name, int(number), float(left) if has_left else None)


class WaitRequest(NamedTuple):
    """What somebody waits for.

    text: in words. needs: how many devices at once.
    wants: UUIDs of the devices that would do, None for any.
    tickets_ahead: The tickets ahead of this one. Older versions do not write them.
    """

    text: str | None = None
    needs: int = 1
    wants: frozenset[str] | None = None
    tickets_ahead: frozenset[TicketAhead] | None = None


class Rule(NamedTuple):
    """One line of the administrator's file that applies to a user.

    text: the line, `time = "24h"`. table: its table, `[users.alice]`. file: its path.
    value: a number, seconds, or 1 for `after_cuda = "warn"`; a larger one is more generous.
    """

    text: str
    table: str
    file: str
    value: float


class Rules(NamedTuple):
    """The rules of the administrator's file for one user; None for each rule that it does not have.

    message: for all to read. history: whether it is logged who used what, None for "if there is a
    directory for it". gpus, time, idle, after_cuda: the limits, as docs/rules.md has
    them. drain, drained: the rule that devices are not handed out, and their names. problems: what
    is wrong in the file, a line for each.
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
    """A request for devices."""

    devices: tuple[str, ...] = ()  # as typed; none for "any"
    # If no device is named; None for "one, or all that I have already".
    count: int | None = None  # type: ignore[assignment]
    min_memory_mib: float = 0.0  # total memory of each
    memory_unit: str = "GiB"  # in which that was asked for
    model: str = ""  # text that the name of each must contain
    terms: ReservationTerms = ReservationTerms()  # of each

    @property
    def needed(self) -> int:
        """Return how many devices that makes."""
        return len(self.devices) or self.count or 1

    def on(self, devices: Sequence[Device]) -> "Request":
        """Return the request for these devices: a percentage is of the smallest of them."""
        size = self.terms.size
        if size is None or size.percent is None:
            return self
        size = min(map(size.of, devices))
        return self._replace(terms=self.terms._replace(size=size))


class End(Enum):
    """How a reservation or a wait has ended."""

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
    """Convert a moment to the wall clock as it is set now. boot: The moment by the boot clock."""
    return None if until is None else max(0.0, until + now.clock_set_s(until, boot))
