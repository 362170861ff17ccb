"""The values: devices, their use, their holders, requests, rules and the queue.

All of them are plain and immutable, and cheap to define, as every shell loads them. `None` always
means "not reported", never zero. Memory is in MiB, and moments are in seconds since the epoch
unless a name says otherwise.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import Enum
from heapq import heappop, heappush
from typing import Any, NamedTuple, TypeAlias

from reserve_gpu import foreign
from reserve_gpu.clocks import Instant

Variables: TypeAlias = Mapping[str, str | None]  # of the environment; None: it is not set
Fact: TypeAlias = str | float | bool  # what a feature leaves to itself
MIB = 2**20
MOST_WANTED = 1024  # devices that a waiter names
MOST_AHEAD = 512  # tickets that a waiter lists
LONG_ENTRY = 32  # characters, more than two times have
LONGEST_RESTART_S = 3600.0  # for which devices are kept over the restart of a kernel
# Bytes in the units of memory that people give sizes in.
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KiB": 2**10, "MiB": MIB, "GiB": 2**30, "TiB": 2**40}


class State(Enum):
    """How a device stands, in a word."""

    IDLE = "idle"  # by its readings alone: nothing runs on it
    FREE = "free"  # idle, and nobody has reserved it or waits for it
    RESERVED = "reserved"
    KEPT = "kept"  # reserved by a kernel that restarts; only shown
    FULL = "full"  # shared by those who were promised parts of it, with too little left to promise
    AWAITED = "awaited"  # free, but somebody in the queue comes first
    BUSY = "busy"
    PROHIBITED = "prohibited"  # its compute mode lets nobody use it
    UNKNOWN = "unknown"  # whether it is idle or reserved can't be seen
    BROKEN = "broken"  # the driver can't use it
    DENIED = "no permission"  # this user may not use it
    EMPTY = "no instance"  # MIG is on, and there is no instance
    DRAINED = "drained"  # the administrator hands it out no more
    LIMITED = "limited"  # this user may not have more
    UNFIT = "unfit"  # not what was asked for


# What ends only when somebody changes something.
STUCK = frozenset({State.BROKEN, State.DENIED, State.DRAINED, State.EMPTY, State.PROHIBITED})


class ComputeMode:
    """Who may use a GPU: NVML's numbers (nvmlComputeMode_t)."""

    DEFAULT = 0
    EXCLUSIVE_THREAD = 1
    PROHIBITED = 2
    EXCLUSIVE_PROCESS = 3


class Unfit(Enum):
    """Why a device can never be what was asked for."""

    MODEL = "its name is another"
    MEMORY = "it has less memory"
    PART = "it has less memory than the part that is asked for"
    MEMORY_UNKNOWN = "it does not say how much memory it has"
    SECOND_INSTANCE = "this driver gives a process one MIG instance only"
    UNREADABLE = "what it is can't be read"


class Device(NamedTuple):
    """What CUDA can use: a whole GPU, or one MIG instance of it.

    index: of the GPU, as NVML and nvidia-smi number it (PCI bus order).
    instance: number of the MIG instance on that GPU, None for a whole GPU.
    memory_mib: total memory. reserve_mib: what of that the driver keeps for itself.
    link_width: PCIe lanes in use now.
    gpu_uuid, old_name: of an instance, its GPU's UUID, and the name that CUDA had for it before
        instances had UUIDs.
    """

    index: int  # type: ignore[assignment] # a tuple has a method of that name
    uuid: str
    name: str | None = None
    bus_id: str | None = None
    memory_mib: int | None = None
    vbios: str | None = None
    link_width: int | None = None
    instance: int | None = None
    gpu_uuid: str | None = None
    old_name: str | None = None
    reserve_mib: int | None = None

    def __repr__(self) -> str:
        name, uuid = ascii(self.name)[1:-1], ascii(self.uuid)[1:-1]  # the driver's words, escaped
        return f"<{self.label}: {name if self.name else 'a GPU without a name'}, {uuid}>"

    @property
    def number(self) -> str:
        """Return what people type for it: `2`, or `1:0` for a MIG instance."""
        return _number(self.index, self.instance)

    @property
    def entry(self) -> str:
        """Return its entry in CUDA_VISIBLE_DEVICES.

        A whole GPU goes by its NVML index, as much code calls int() on it; a MIG instance has none.
        """
        return str(self.index) if self.instance is None else self.uuid

    @property
    def label(self) -> str:
        """Return what people call it: `GPU2`, or `GPU1:0`."""
        return f"GPU{self.number}"

    @property
    def usable_mib(self) -> int | None:
        """Return the memory that the driver leaves."""
        return None if self.memory_mib is None else self.memory_mib - (self.reserve_mib or 0)


class Board(NamedTuple):
    """What a whole GPU is like, which holds for all parts of it.

    has_screen: a display is active on it.
    awaits_reset: some of its memory is out of use until then.
    has_host_memory: its memory is the host's, or a NUMA node of the host.
    """

    has_screen: bool
    awaits_reset: bool
    has_host_memory: bool


class Fault(NamedTuple):
    """A place where a device should be, and why none there can be used.

    is_lost: the driver has lost the device.
    """

    index: int  # type: ignore[assignment]
    reason: str
    instance: int | None = None
    state: State = State.BROKEN
    is_lost: bool = False

    @property
    def number(self) -> str:
        """Return `3`, or `3:0` of a MIG instance."""
        return _number(self.index, self.instance)

    @property
    def label(self) -> str:
        """Return `GPU3`, or `GPU3:0` of a MIG instance."""
        return f"GPU{self.number}"


GRAPHICS = "graphics"  # the kind of a process that draws, as a desktop or a simulator does


class Process(NamedTuple):
    """A process on a device.

    kind: `compute`, `MPS` or `graphics`, the first that it is.
    zombie_of: its parent, in a word, if it has ended and the parent has not taken notice.
    """

    pid: int
    memory_mib: int | None = None  # device memory that it holds
    user: str | None = None
    command: str | None = None
    has_reserved: bool | None = None  # it or an ancestor has the device; None: not known
    beside: str | None = None  # a holder of the same user, in a word, that it does not belong to
    kind: str = "compute"
    zombie_of: str | None = None


class Usage(NamedTuple):
    """What NVML reports about the use of one device."""

    compute: int | None = None  # how many compute processes
    mps: int | None = None  # how many MPS clients
    sees_all: bool = True  # no process listed means that there is none (not so in a container)
    total_mib: float | None = None
    used_mib: float | None = None  # where the memory is the host's: by processes
    reserve_known: bool = True  # used_mib is without the driver's own reserve
    graphics_mib: float = 0.0  # what listed graphics processes account for
    mode: int | None = None  # one of ComputeMode
    awaits_reset: bool = False  # some of its memory is out of use until then
    is_wsl: bool = False  # Windows uses the device too
    has_host_memory: bool = False  # or a NUMA node of it, where pages are left for nobody

    @property
    def unexplained_mib(self) -> float | None:
        """Return the memory in use of no graphics process; None where that says nothing."""
        is_known = self.used_mib is not None and not self.has_host_memory
        return (self.used_mib or 0.0) - self.graphics_mib if is_known else None


class Gauges(NamedTuple):
    """Readings that decide nothing; a MIG instance has the temperature and power of its GPU.

    utilisation: percent of the time. power_limit_w: above which the driver slows the GPU down.
    """

    utilisation: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None


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


class Promise(NamedTuple):
    """What somebody says of their use of each device.

    size: the most memory that they will use, None for all of it. note: a line for others to read.
    """

    size: Size | None = None
    lease: Lease = NO_LEASE
    note: str | None = None

    @property
    def part_mib(self) -> float | None:
        """Return the size in MiB, None for the whole device."""
        return self.size.mib if self.size else None

    def changed_by(self, new: "Promise") -> "Promise":
        """Return this promise after a new call: it sets the size, and keeps what it leaves out."""
        note = self.note if new.note is None else new.note
        return Promise(new.size, self.lease.changed_by(new.lease), note)


class Who(NamedTuple):
    """What a process says of itself. It is shown to others, and never decides anything.

    notebook: the name of its file. command: in short, as `python train.py`.
    cwd: its working directory. namespace: the inode of its PID namespace.
    origin: the machine from which its kernel was started, where that is another one.
    agent: the name of the program that asks in place of its user.
    job: the number of the batch system's job that it is a part of. job_name: of that.
    mounts: the inode of its mount namespace. In one of these all processes have the same GPUs, by
        the same numbers, unless a job has some of them alone.
    """

    pid: int | None = None
    user: str | None = None
    notebook: str | None = None
    command: str | None = None
    cwd: str | None = None
    origin: str | None = None
    namespace: int | None = None
    agent: str | None = None
    job: str | None = None
    job_name: str | None = None
    mounts: int | None = None


class Ahead(NamedTuple):
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
    def parse(cls, text: str) -> "Ahead | None":
        """Parse an entry of a list, or return None if it is invalid."""
        name, _, rest = text.partition(" ")
        number, has_left, left = rest.partition(" ")
        texts = (number, left) if has_left else (number,)
        if not all(each.isascii() and each.isdecimal() for each in texts) or len(rest) > LONG_ENTRY:
            return None
        return cls(name, int(number), float(left) if has_left else None)


class Asks(NamedTuple):
    """What somebody waits for.

    text: in words. needs: how many devices at once.
    wants: UUIDs of the devices that would do, None for any.
    behind: The tickets ahead of this one. Older versions do not write them.
    """

    text: str | None = None
    needs: int = 1
    wants: frozenset[str] | None = None
    behind: frozenset[Ahead] | None = None


class Record(NamedTuple):
    """What a holder or a waiter says of itself in its lock file.

    since: when it took the lock. written: when it wrote this. Both in seconds since the epoch.
    label, index: of the device: once a GPU is lost nobody can read its UUID.
    visible: its CUDA_VISIBLE_DEVICES.
    overdue: since when its reservation should have ended, where it has not.
    kept_until: for how long it is kept for the restart of its kernel.
    guest_of: of a guest, since when the holder that it has joined has the device.
    since_boot, written_boot: The same two by the boot clock. Older versions write neither.
    write_locked: Whether the writer has the file locked with `lock.write_lock`. If the file says so
        and is not, its holder has ended.
    """

    who: Who = Who()
    promise: Promise = Promise()
    asks: Asks | None = None
    since: float | None = None
    written: float | None = None
    label: str | None = None
    index: int | None = None  # type: ignore[assignment] # a tuple has a method of that name
    visible: str | None = None
    overdue: float | None = None
    kept_until: float | None = None
    guest_of: float | None = None
    since_boot: float | None = None
    written_boot: float | None = None
    write_locked: bool = False

    def taken(self, now: Instant) -> Instant | None:
        """Return the time of the lock, as the record says; None if it does not."""
        if self.since is None:
            return None
        boot = self.since_boot
        if boot is None:  # nothing was locked before the boot
            boot = max(0.0, now.boot - max(0.0, now.wall - self.since))
        return Instant(self.since, min(boot, now.boot))

    def at(self, now: Instant) -> "Record":
        """Return the record with its moments by the wall clock as that is set now.

        `since` and `written` stay as they are: guests know their holder by `since`.
        """
        promise = self.promise._replace(lease=self.promise.lease.at(now))
        set_s = 0.0 if self.written is None else now.clock_set_s(self.written, self.written_boot)
        overdue, kept_until = (
            at if at is None else max(0.0, at + set_s) for at in (self.overdue, self.kept_until)
        )
        return self._replace(promise=promise, overdue=overdue, kept_until=kept_until)

    def to_dict(self) -> dict[str, Any]:
        """Return the record as JSON takes it, without what is not known."""
        (size, lease, note), asks = self.promise, self.asks
        behind = asks.behind if asks else None
        fields = {
            **self.who._asdict(),
            "note": note,
            **({"part_mib": size.mib, "part_unit": size.unit} if size else {}),
            **(lease._asdict() if lease.has_end else {}),
            **({"asks": asks.text, "needs": asks.needs} if asks else {}),
            **({"wants": sorted(asks.wants)} if asks and asks.wants is not None else {}),
            **(
                {}
                if behind is None
                else {"behind": [*map(str, sorted(behind, key=lambda each: each.key)[:MOST_AHEAD])]}
            ),
            **dict(zip(self._fields[3:], self[3:], strict=True)),
        }
        limit = foreign.TEXT_LIMIT
        texts = {k: v[:limit] if isinstance(v, str) else v for k, v in fields.items()}
        return {name: value for name, value in texts.items() if value is not None}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Record":
        """Return what somebody wrote, as far as it makes sense."""
        said = foreign.Fields(fields)
        part_mib, unit = said.number("part_mib"), said.text("part_unit")
        size = Size(part_mib, unit if unit in UNITS else "GiB") if part_mib else None
        wants, texts = (
            frozenset(said.texts(name, MOST_WANTED)) if isinstance(fields.get(name), list) else None
            for name in ("wants", "behind")
        )
        behind = None if texts is None else frozenset(filter(None, map(Ahead.parse, texts)))
        return cls(
            Who(**foreign.fields_of(Who, fields)),
            Promise(size, Lease(**foreign.fields_of(Lease, fields)), said.text("note")),
            Asks(said.text("asks"), said.integer("needs") or 1, wants, behind),
            **foreign.fields_of(cls, fields),
        )


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


class Holder(NamedTuple):
    """The process that has a lock: what the system says of it, beside its record.

    record: another process than the holder may have written it. It is shown, made fit to print,
    and never decides anything.
    listed_pid: by the kernel's list of locks, None where that does not show it.
    owner: the user whose process that is, by the system. uid: the same; of a sharer whose file it
    is.
    elsewhere: the pid is of another PID namespace; here it means another process.
    last_cell: when it last ended a cell, after it took the lock.
    file: the name of its lock file.
    used_mib: of one who shares, with its children, None if that can't be seen.
    beside: the holder that it has joined, in a word, None where that has gone.
    clock_set_s: The seconds by which the wall clock was set since it took the lock.
    record_owner: UID of the only user who can write the record; None if others can.
    """

    record: Record = Record()
    listed_pid: int | None = None
    owner: str | None = None
    uid: int | None = None
    elsewhere: bool = False
    last_cell: float | None = None
    file: str | None = None
    used_mib: float | None = None
    beside: str | None = None
    clock_set_s: float = 0.0
    record_owner: int | None = None

    @property
    def seen(self) -> bool:
        """Tell whether the pid is the kernel's word."""
        return self.listed_pid is not None

    @property
    def confirmed(self) -> bool:
        """Tell whether the record names the same pid as the kernel."""
        return self.listed_pid is not None and self.listed_pid == self.record.who.pid

    @property
    def pid(self) -> int | None:
        """Return its pid by the kernel's word, else by its own."""
        return self.listed_pid or self.record.who.pid

    @property
    def user(self) -> str | None:
        """Return its user by the system's word, else by its own."""
        return self.owner or self.record.who.user

    @property
    def notebook(self) -> str | None:
        """Return the name of its notebook's file."""
        return self.record.who.notebook

    @property
    def name(self) -> str | None:
        """Return what it is, in a word: its notebook, or its command."""
        return self.record.who.notebook or self.record.who.command

    @property
    def since(self) -> float | None:
        """Return the time of the lock, by the wall clock as it is set now."""
        since = self.record.since
        return None if since is None else max(0.0, since + self.clock_set_s)

    @property
    def lease(self) -> Lease:
        """Return until when it has the device."""
        return self.record.promise.lease

    @property
    def note(self) -> str | None:
        """Return its line for others to read."""
        return self.record.promise.note

    @property
    def part_mib(self) -> float | None:
        """Return the most memory of the device that it was promised, None for all of it."""
        return self.record.promise.part_mib

    def is_kept(self, now: float) -> bool:
        """Tell whether its kernel has ended, and what it had is kept for its restart."""
        until = self.record.kept_until
        return until is not None and now < until <= now + LONGEST_RESTART_S

    @property
    def is_over(self) -> bool:
        """Tell whether it uses more than it was promised."""
        if self.part_mib is None or self.used_mib is None:
            return False
        return self.used_mib > self.part_mib


class Claim(NamedTuple):
    """The claim of a holder that its device had a certain number when it was reserved.

    Attributes:
        holder: The holder of the device.
        device: The device, as in the names of lock files.
        devices: All devices of which its user has such a claim.
    """

    holder: Holder
    device: str
    devices: tuple[str, ...]


class Ticket(NamedTuple):
    """A place in the queue."""

    number: int  # the clock since boot when its holder joined, in ns, as its file says
    name: str  # of its file
    wants: frozenset[str] | None  # UUIDs of the devices that its holder could use, None for any
    holder: Holder
    asks: str | None = None  # the request in words, as its holder wrote it
    heartbeat: int = 0  # its holder's last sign of life; only whether it changes means anything
    needs: int = 1  # devices at once
    part_mib: float | None = None  # of each; None for all of it
    behind: frozenset[Ahead] | None = None  # tickets ahead of it, as its owner wrote

    @property
    def key(self) -> tuple[str, int]:
        """Return the identity of the ticket. A later ticket in the same file has another number."""
        return self.name, self.number

    def is_behind(self, keys: Collection[tuple[str, int]]) -> bool:
        """Return whether it lists one of these tickets as ahead of it."""
        return any(ahead.key in keys for ahead in self.behind or ())

    def could_use(self, uuid: str) -> bool:
        """Tell whether its holder waits for that device too."""
        return self.wants is None or uuid in self.wants


def in_order(tickets: Iterable[Ticket]) -> list[Ticket]:
    """Return the tickets in the order of the queue.

    A ticket follows all tickets that it lists in `behind`; to list more gains nothing for its
    owner. The numbers decide between tickets that do not list each other, or both do.
    """
    waiting = {ticket.key: ticket for ticket in sorted(tickets)}
    ahead = {
        key: waiting.keys() & {each.key for each in ticket.behind or ()} - {key}
        for key, ticket in waiting.items()
    }
    followers: dict[tuple[str, int], list[tuple[str, int]]] = {}
    for key, before in ahead.items():
        for each in before:
            followers.setdefault(each, []).append(key)
    free = [ticket for key, ticket in waiting.items() if not ahead[key]]
    ordered: list[Ticket] = []
    while waiting:
        first = heappop(free) if free else next(iter(waiting.values()))
        if waiting.pop(first.key, None) is None:  # the numbers have decided
            continue
        ordered.append(first)
        for key in followers.get(first.key, ()):
            ahead[key].discard(first.key)
            if key in waiting and not ahead[key]:
                heappush(free, waiting[key])
    return ordered


class Earlier(NamedTuple):
    """A ticket ahead of a waiter, as the waiter remembers it.

    number: The number of the ticket.
    pid: The process that waits, or None if it is not visible.
    devices: The inodes of the device files that this process has locked while it waits.
    left: As in `Ahead`.
    """

    number: int
    pid: int | None = None
    devices: frozenset[int] = frozenset()
    left: float | None = None


class Request(NamedTuple):
    """What is asked for."""

    devices: tuple[str, ...] = ()  # as typed; none for "any"
    # If no device is named; None for "one, or all that I have already".
    count: int | None = None  # type: ignore[assignment]
    min_memory_mib: float = 0.0  # total memory of each
    memory_unit: str = "GiB"  # in which that was asked for
    model: str = ""  # text that the name of each must contain
    promise: Promise = Promise()  # of each

    @property
    def part_mib(self) -> float | None:
        """Return the part of each that is asked for, None for all of it."""
        return self.promise.part_mib

    @property
    def needed(self) -> int:
        """Return how many devices that makes."""
        return len(self.devices) or self.count or 1

    def on(self, devices: Sequence[Device]) -> "Request":
        """Return the request for these devices: a percentage is of the smallest of them."""
        size = self.promise.size
        if size is None or size.percent is None:
            return self
        size = min(map(size.of, devices))
        return self._replace(promise=self.promise._replace(size=size))


class Row(NamedTuple):
    """One device: its state, holders and use; in a refusal, also why it was not taken.

    usage: the reading of its use. use_state: the state by that reading alone, as `judge` gives it.
    reason: why the device can't be used or read, as the driver or the system says.
    holders: several if they share it; this process first.
    is_mine: this process is one of them.
    is_unused: it is reserved, but no process of its holders' is on it; None if that can't be seen.
    is_unreserved_use: somebody uses it who has not reserved it; None if that can't be seen.
    awaited_by: the first in the queue who could use it.
    promisable_mib: memory of which a part can still be promised; with this process's own part, if
    that is on a full device.
    would_be_taken: an attempt could have had it; other devices were missing.
    rule: why it is drained or limited. counted: what the user of a limited one has already.
    """

    device: Device | Fault
    state: State
    usage: Usage | None = None
    utilisation: int | None = None  # percent of the time
    processes: tuple[Process, ...] = ()
    holders: tuple[Holder, ...] = ()
    reason: str | None = None
    is_mine: bool = False
    is_unused: bool | None = False
    is_unreserved_use: bool | None = False
    awaited_by: Holder | None = None
    graphics: tuple[Process, ...] = ()  # graphics processes that hold no more than a desktop
    temperature_c: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    promisable_mib: float | None = None
    use_state: State | None = None
    unfit: Unfit | None = None
    would_be_taken: bool = False
    rule: Rule | None = None
    counted: tuple[Holder, ...] = ()

    @property
    def label(self) -> str:
        """Return the label of the device."""
        return self.device.label


class Reserved(NamedTuple):
    """A reservation as it is seen from outside: a process, and the devices that it has.

    began_boot: The start time of the process, by the boot clock; None if it was not read.
    """

    holder: Holder
    rows: tuple[Row, ...]
    began_boot: float | None = None

    @classmethod
    def among(cls, rows: Sequence[Row]) -> "list[Reserved]":
        """Return all reservations of these devices, in the order of the devices."""
        found: dict[object, Reserved] = {}
        for row in rows:
            for holder in row.holders:
                process = holder.listed_pid or holder.file  # a record may name any pid
                before = found.get(process, cls(holder, ()))
                found[process] = before._replace(rows=(*before.rows, row))
        return [*found.values()]


class Answer(Enum):
    """What came of asking a process to release what it holds, or to end."""

    RELEASED = "it has released it"
    CUDA = "CUDA runs in it"
    CHILD = "a process that it has started uses the devices"
    PROGRAM = "it is a program that can't be asked"
    SILENT = "it does not answer"
    ANOTHER = "it did not confirm that it is the chosen one"
    GONE = "it holds nothing any more"
    ENDED = "it has ended"
    STAYS = "it can't be ended"


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


class Waiting(NamedTuple):
    """How a wait stands: what `reserve(progress=...)` calls your function with.

    place: in the queue, 1 is next. waited_s: so far. limit_s: for how long at most.
    rows: why no device can be had yet, one for each.
    first: who is first in the queue, if that is somebody else.
    """

    request: Request
    place: int
    waited_s: float
    rows: tuple[Row, ...]
    limit_s: float = math.inf
    first: Ticket | None = None


class Slow(NamedTuple):
    """A call into the driver that takes long. what: the function. waited_s: so far."""

    what: str
    waited_s: float


News: TypeAlias = "Waiting | Slow"  # what somebody who reserves is told meanwhile


def _as_set(now: Instant, until: float | None, boot: float | None) -> float | None:
    """Convert a moment to the wall clock as it is set now. boot: The moment by the boot clock."""
    return None if until is None else max(0.0, until + now.clock_set_s(until, boot))


def _number(index: int, instance: int | None) -> str:
    return str(index) if instance is None else f"{index}:{instance}"
