"""The holders of devices: what their lock files say of them, and the devices that they hold."""

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from reserve_gpu.model import untrusted
from reserve_gpu.model.clocks import Instant
from reserve_gpu.model.devices import Device, Fault, Process, State, Unfit, Usage
from reserve_gpu.model.requests import (
    MOST_AHEAD,
    MOST_WANTED,
    UNITS,
    Lease,
    ReservationTerms,
    Rule,
    Size,
    TicketAhead,
    WaitRequest,
)

LONGEST_RESTART_S = 3600.0  # for which devices are kept over the restart of a kernel


class ProcessInfo(NamedTuple):
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


class Record(NamedTuple):
    """What a holder or a waiter says of itself in its lock file.

    since: when it took the lock. written: when it wrote this. Both in seconds since the epoch.
    label, index: of the device: once a GPU is lost nobody can read its UUID.
    visible: its CUDA_VISIBLE_DEVICES.
    overdue: since when its reservation should have ended, where it has not.
    kept_until: for how long it is kept for the restart of its kernel.
    guest_of: of a joined process, since when the holder that it has joined has the device.
    since_boot, written_boot: The same two by the boot clock. Older versions write neither.
    write_locked: Whether the writer has the file locked with `file_control.write_lock`. If the
        file says so and is not, its holder has ended.
    """

    who: ProcessInfo = ProcessInfo()
    terms: ReservationTerms = ReservationTerms()
    asks: WaitRequest | None = None
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

        `since` and `written` stay as they are: joined processes know their holder by `since`.
        """
        terms = self.terms._replace(lease=self.terms.lease.at(now))
        set_s = 0.0 if self.written is None else now.clock_set_s(self.written, self.written_boot)
        overdue, kept_until = (
            at if at is None else max(0.0, at + set_s) for at in (self.overdue, self.kept_until)
        )
        return self._replace(terms=terms, overdue=overdue, kept_until=kept_until)

    def to_dict(self) -> dict[str, Any]:
        """Return the record as JSON takes it, without what is not known."""
        (size, lease, note), asks = self.terms, self.asks
        behind = asks.tickets_ahead if asks else None
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
        limit = untrusted.TEXT_LIMIT
        texts = {k: v[:limit] if isinstance(v, str) else v for k, v in fields.items()}
        return {name: value for name, value in texts.items() if value is not None}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Record":
        """Return what somebody wrote, as far as it makes sense."""
        said = untrusted.Fields(fields)
        memory_limit_mib, unit = said.number("part_mib"), said.text("part_unit")
        size = (
            Size(memory_limit_mib, unit if unit in UNITS else "GiB") if memory_limit_mib else None
        )
        wants, texts = (
            frozenset(said.texts(name, MOST_WANTED)) if isinstance(fields.get(name), list) else None
            for name in ("wants", "behind")
        )
        behind = None if texts is None else frozenset(filter(None, map(TicketAhead.parse, texts)))
        return cls(
            ProcessInfo(**untrusted.fields_of(ProcessInfo, fields)),
            ReservationTerms(size, Lease(**untrusted.fields_of(Lease, fields)), said.text("note")),
            WaitRequest(said.text("asks"), said.integer("needs") or 1, wants, behind),
            **untrusted.fields_of(cls, fields),
        )


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
        return self.record.terms.lease

    @property
    def note(self) -> str | None:
        """Return its line for others to read."""
        return self.record.terms.note

    @property
    def memory_limit_mib(self) -> float | None:
        """Return the most memory of the device that it was promised, None for all of it."""
        return self.record.terms.memory_limit_mib

    def is_kept(self, now: float) -> bool:
        """Tell whether its kernel has ended, and what it had is kept for its restart."""
        until = self.record.kept_until
        return until is not None and now < until <= now + LONGEST_RESTART_S

    @property
    def is_over(self) -> bool:
        """Tell whether it uses more than it was promised."""
        if self.memory_limit_mib is None or self.used_mib is None:
            return False
        return self.used_mib > self.memory_limit_mib


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


class DeviceStatus(NamedTuple):
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
    rows: tuple[DeviceStatus, ...]
    began_boot: float | None = None

    @classmethod
    def among(cls, rows: Sequence[DeviceStatus]) -> "list[Reserved]":
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
