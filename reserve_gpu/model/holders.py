"""The holders of devices, the records in their lock files, and the status of each device."""

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

LONGEST_RESTART_S = 3600.0  # maximum seconds for which a restarting kernel's devices are kept


class ProcessInfo(NamedTuple):
    """The description that a process writes about itself.

    The description is untrusted, so it is only displayed.

    Attributes:
        pid: The process ID in the process's own PID namespace.
        user: The name of the process's user.
        notebook: The name of the notebook file.
        command: The command in short, such as `python train.py`.
        cwd: The working directory.
        origin: The machine from which the kernel was started, if it is another machine.
        namespace: The inode of the PID namespace.
        agent: The name of the program that acts for the user, such as a coding agent.
        job: The ID of the batch system's job.
        job_name: The name of that job.
        mounts: The inode of the mount namespace. Processes in one mount namespace have the same
            GPUs under the same numbers, unless a batch job limits some of them.
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
    """The JSON text that a holder or a waiter writes into its lock file.

    Times are in seconds since the epoch unless a name ends in `_boot`.

    Attributes:
        who: The process that wrote the record.
        terms: The terms of the reservation.
        asks: The request of a waiter, or None for a holder.
        since: The time at which the lock was acquired.
        written: The time at which the record was written.
        label: The displayed name of the device. The UUID of a lost GPU can't be read, so the record
            also identifies the device by `label` and `index`.
        index: The number of the GPU.
        visible: The CUDA_VISIBLE_DEVICES of the process.
        overdue: The time at which the reservation should have ended, if it has not.
        kept_until: The time until which the device is kept for the kernel's restart.
        guest_of: The `since` of the holder that this process joined.
        since_boot: The time of `since` by the boot clock. Older versions do not write it.
        written_boot: The time of `written` by the boot clock. Older versions do not write it.
        write_locked: Whether the writer locks the file with `file_control.write_lock`. If this is
            true and the file is not locked, the holder has ended.
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
        """Return the recorded time at which the lock was acquired, or None if unknown."""
        if self.since is None:
            return None
        boot = self.since_boot
        if boot is None:  # a lock can't be older than the boot
            boot = max(0.0, now.boot - max(0.0, now.wall - self.since))
        return Instant(self.since, min(boot, now.boot))

    def at(self, now: Instant) -> "Record":
        """Return the record with its times corrected to the current setting of the wall clock.

        `since` and `written` do not change, because joined processes identify their holder by
        `since`.
        """
        terms = self.terms._replace(lease=self.terms.lease.at(now))
        set_s = 0.0 if self.written is None else now.clock_set_s(self.written, self.written_boot)
        overdue, kept_until = (
            at if at is None else max(0.0, at + set_s) for at in (self.overdue, self.kept_until)
        )
        return self._replace(terms=terms, overdue=overdue, kept_until=kept_until)

    def to_dict(self) -> dict[str, Any]:
        """Return the record as JSON-compatible data, without the unknown fields."""
        (size, lease, note), asks = self.terms, self.asks
        tickets = asks.tickets_ahead if asks else None
        fields = {
            **self.who._asdict(),
            "note": note,
            **({"part_mib": size.mib, "part_unit": size.unit} if size else {}),
            **(lease._asdict() if lease.has_end else {}),
            **({"asks": asks.text, "needs": asks.needs} if asks else {}),
            **({"wants": sorted(asks.wants)} if asks and asks.wants is not None else {}),
            **(
                {}
                if tickets is None
                else {
                    "behind": [*map(str, sorted(tickets, key=lambda each: each.key)[:MOST_AHEAD])]
                }
            ),
            **dict(zip(self._fields[3:], self[3:], strict=True)),
        }
        limit = untrusted.TEXT_LIMIT
        texts = {k: v[:limit] if isinstance(v, str) else v for k, v in fields.items()}
        return {name: value for name, value in texts.items() if value is not None}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Record":
        """Read a record from untrusted data. Invalid fields are treated as unknown."""
        reader = untrusted.Fields(fields)
        memory_limit_mib, unit = reader.number("part_mib"), reader.text("part_unit")
        size = (
            Size(memory_limit_mib, unit if unit in UNITS else "GiB") if memory_limit_mib else None
        )
        wants, texts = (
            frozenset(reader.texts(name, MOST_WANTED))
            if isinstance(fields.get(name), list)
            else None
            for name in ("wants", "behind")
        )
        tickets = None if texts is None else frozenset(filter(None, map(TicketAhead.parse, texts)))
        lease = Lease(**untrusted.fields_of(Lease, fields))
        return cls(
            ProcessInfo(**untrusted.fields_of(ProcessInfo, fields)),
            ReservationTerms(size, lease, reader.text("note")),
            WaitRequest(reader.text("asks"), reader.integer("needs") or 1, wants, tickets),
            **untrusted.fields_of(cls, fields),
        )


class Holder(NamedTuple):
    """The process that holds a lock: its record, and the operating system's facts about it.

    Attributes:
        record: The record in the lock file. It is untrusted, because another process may have
            written it, so it is sanitized before it is displayed.
        listed_pid: The pid in the kernel's list of locks, or None if the list does not show it.
        owner: The name of the user of the listed process, from the system.
        uid: The UID of that user. For a part of a GPU, the owner of the lock file.
        is_other_namespace: Whether the recorded pid belongs to another PID namespace.
        last_cell: The end of the last cell since the lock was acquired, in seconds since the epoch.
        file: The name of the lock file.
        used_mib: The memory in MiB that the process, its children and the processes that joined it
            use, or None if unknown.
        beside: The name of the holder that this process joined, or None without such a holder.
        clock_set_s: Seconds by which the wall clock was set since the lock was acquired.
        record_owner: The UID of the only user who can write the record, or None if others can.
    """

    record: Record = Record()
    listed_pid: int | None = None
    owner: str | None = None
    uid: int | None = None
    is_other_namespace: bool = False
    last_cell: float | None = None
    file: str | None = None
    used_mib: float | None = None
    beside: str | None = None
    clock_set_s: float = 0.0
    record_owner: int | None = None

    @property
    def seen(self) -> bool:
        """Return whether the kernel's list of locks shows the pid."""
        return self.listed_pid is not None

    @property
    def confirmed(self) -> bool:
        """Return whether the record names the same pid as the kernel's list of locks."""
        return self.listed_pid is not None and self.listed_pid == self.record.who.pid

    @property
    def pid(self) -> int | None:
        """Return the pid in the kernel's list of locks, or else the pid in the record."""
        return self.listed_pid or self.record.who.pid

    @property
    def user(self) -> str | None:
        """Return the user name that the system reports, or else the name in the record."""
        return self.owner or self.record.who.user

    @property
    def notebook(self) -> str | None:
        """Return the name of the holder's notebook file."""
        return self.record.who.notebook

    @property
    def name(self) -> str | None:
        """Return the displayed name of the process: its notebook, or else its command."""
        return self.record.who.notebook or self.record.who.command

    @property
    def since(self) -> float | None:
        """Return the time at which the lock was acquired, by the current wall clock."""
        since = self.record.since
        return None if since is None else max(0.0, since + self.clock_set_s)

    @property
    def lease(self) -> Lease:
        """Return the lease of the reservation."""
        return self.record.terms.lease

    @property
    def note(self) -> str | None:
        """Return the holder's note for other users."""
        return self.record.terms.note

    @property
    def memory_limit_mib(self) -> float | None:
        """Return the size of a reserved part in MiB, or None for a whole device."""
        return self.record.terms.memory_limit_mib

    def is_kept(self, now: float) -> bool:
        """Return whether the device is kept for the restart of the holder's kernel.

        Args:
            now: Seconds since the epoch.
        """
        until = self.record.kept_until
        return until is not None and now < until <= now + LONGEST_RESTART_S

    @property
    def is_over(self) -> bool:
        """Return whether the holder uses more memory than it reserved."""
        if self.memory_limit_mib is None or self.used_mib is None:
            return False
        return self.used_mib > self.memory_limit_mib


class Claim(NamedTuple):
    """A holder's claim that its device had a certain number when it was reserved.

    Attributes:
        holder: The holder of the device.
        device: The device, as in the names of lock files.
        devices: All devices for which the same user has such a claim.
    """

    holder: Holder
    device: str
    devices: tuple[str, ...]


class DeviceStatus(NamedTuple):
    """The status of one device: its state, holders and use.

    Attributes:
        device: The device, or the fault that makes it unusable.
        state: The displayed state.
        usage: The readings of its use.
        utilisation: The percentage of time in which the device is active.
        processes: The processes on the device.
        holders: The holders, this process first. Several holders share the device.
        reason: The reason why the device can't be used or read, from the driver or the system.
        is_mine: Whether this process holds the device.
        is_unused: Whether the device is reserved but no holder's process uses it, or None if
            unknown.
        is_unreserved_use: Whether a process without a reservation uses the device, or None if
            unknown.
        awaited_by: The first waiter in the queue that could use the device.
        graphics: The graphics processes that use no more memory than a desktop does.
        temperature_c: The temperature in degrees Celsius.
        power_w: The power draw in watts.
        power_limit_w: The power in watts above which the driver slows the GPU down.
        promisable_mib: The memory in MiB that can still be reserved. On a full device it includes
            this process's own part.
        use_state: The state according to `usage` alone, as `judge` returns it.
        unfit: The reason why the device can never match the request.
        would_be_taken: Whether the request would reserve the device if enough others were free.
        rule: The administrator's rule that makes the device drained or limited.
        counted: The reservations of this user that count toward the quota.
    """

    device: Device | Fault
    state: State
    usage: Usage | None = None
    utilisation: int | None = None
    processes: tuple[Process, ...] = ()
    holders: tuple[Holder, ...] = ()
    reason: str | None = None
    is_mine: bool = False
    is_unused: bool | None = False
    is_unreserved_use: bool | None = False
    awaited_by: Holder | None = None
    graphics: tuple[Process, ...] = ()
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
        """Return the displayed name of the device, such as `GPU2`."""
        return self.device.label


class Reserved(NamedTuple):
    """A reservation as other processes see it: a holder and its devices.

    Attributes:
        holder: The process that holds the devices.
        rows: The status of each device.
        began_boot: The start of the process in seconds since boot, or None if it was not read.
    """

    holder: Holder
    rows: tuple[DeviceStatus, ...]
    began_boot: float | None = None

    @classmethod
    def among(cls, rows: Sequence[DeviceStatus]) -> "list[Reserved]":
        """Return all reservations of these devices, in the order of the devices."""
        reservations: dict[object, Reserved] = {}
        for row in rows:
            for holder in row.holders:
                process = holder.listed_pid or holder.file  # the pid in a record can be forged
                reservation = reservations.get(process, cls(holder, ()))
                reservations[process] = reservation._replace(rows=(*reservation.rows, row))
        return [*reservations.values()]


class Answer(Enum):
    """The result of a request to another process to release its devices, or to end."""

    RELEASED = "the process released its devices"
    CUDA = "CUDA is running in the process"
    CHILD = "a process that it started uses the devices"
    PROGRAM = "the program can't receive the request"
    SILENT = "the process does not answer"
    ANOTHER = "the process did not confirm that it is the selected one"
    GONE = "the process no longer holds a device"
    ENDED = "the process has ended"
    STAYS = "the process can't be ended"
