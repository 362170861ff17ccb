"""Device holders, the records in their lock files, and the status of each device."""

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
    WaitRequest,
)

LONGEST_RESTART_S = 3600.0  # maximum time to keep devices for a restarting Jupyter kernel


class ProcessInfo(NamedTuple):
    """Information that a process writes about itself.

    The information is untrusted, because a process can write anything about itself.

    Attributes:
        pid: The process ID in the process's own PID namespace.
        user: The name of the user running the process.
        notebook: The notebook's file name.
        command: The shortened command, such as `python train.py`.
        cwd: The working directory.
        origin: The machine from which the Jupyter kernel was started, if it is a different machine.
        namespace: The inode number of the process's PID namespace.
        agent: The name of the program acting on the user's behalf, such as a coding agent.
        job: The ID of the batch job that the process belongs to.
        job_name: The name of the batch job.
        mounts: The inode number of the process's mount namespace. Processes in the same mount
            namespace see the same GPUs with the same numbers, unless a batch job restricts some of
            the processes.
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
    """The JSON record that a holder or waiter writes to its lock file.

    Times are in seconds since the epoch, or since boot if the field name ends in `_boot`.

    Attributes:
        who: The process that wrote the record.
        terms: The reservation terms.
        asks: The waiter's request, or None for a holder.
        since: The time at which the lock was acquired.
        written: The time at which the record was written.
        label: The device's display name. A lost GPU's UUID can't be read, so `label` and `index`
            also identify the device.
        index: The GPU's number.
        visible: The value of CUDA_VISIBLE_DEVICES in the process.
        overdue: The time at which the reservation should have ended, if it is overdue.
        kept_until: The time until which the device is kept while the Jupyter kernel restarts.
        guest_of: The value of `since` for the holder whose reservation this process joined.
        since_boot: The same time as `since` by the boot clock. Older versions do not write this.
        written_boot: The same time as `written` by the boot clock. Older versions do not write
            this.
        write_locked: Whether the process locked the file with `file_control.write_lock`. If this is
            true but the file is no longer locked, the process has exited.
        released: Whether the process released the lock when it wrote the record.
    """

    who: ProcessInfo = ProcessInfo()
    terms: ReservationTerms = ReservationTerms()
    asks: WaitRequest | None = None
    since: float | None = None
    written: float | None = None
    label: str | None = None
    index: int | None = None  # type: ignore[assignment] # tuple has an index() method
    visible: str | None = None
    overdue: float | None = None
    kept_until: float | None = None
    guest_of: float | None = None
    since_boot: float | None = None
    written_boot: float | None = None
    write_locked: bool = False
    released: bool = False

    def taken(self, now: Instant) -> Instant | None:
        """Return the recorded time at which the lock was acquired, or None if unknown."""
        if self.since is None:
            return None
        boot = self.since_boot
        if boot is None:  # no lock survives a reboot
            boot = max(0.0, now.boot - max(0.0, now.wall - self.since))
        return Instant(self.since, min(boot, now.boot))

    def at(self, now: Instant) -> "Record":
        """Return the record with its times adjusted for changes to the wall clock.

        `since` and `written` are not adjusted, because joined processes use `since` to identify
        their holder.
        """
        terms = self.terms._replace(lease=self.terms.lease.at(now))
        set_s = 0.0 if self.written is None else now.clock_set_s(self.written, self.written_boot)
        overdue, kept_until = (
            at if at is None else max(0.0, at + set_s) for at in (self.overdue, self.kept_until)
        )
        return self._replace(terms=terms, overdue=overdue, kept_until=kept_until)

    def to_dict(self) -> dict[str, Any]:
        """Return the record as JSON-compatible data, leaving out fields that are None."""
        (size, lease, note), asks = self.terms, self.asks
        tickets = asks.tickets_ahead if asks else None
        behind = sorted(untrusted.split_lines(tickets))[:MOST_AHEAD]
        fields = {
            **self.who._asdict(),
            "note": note,
            **({"part_mib": size.mib, "part_unit": size.unit} if size else {}),
            **(lease._asdict() if lease.has_end else {}),
            **({"asks": asks.text, "needs": asks.needs} if asks else {}),
            **({"wants": sorted(asks.wants)} if asks and asks.wants is not None else {}),
            **({} if tickets is None else {"behind": behind}),
            **dict(zip(self._fields[3:], self[3:], strict=True)),
        }
        limit = untrusted.TEXT_LIMIT
        texts = {k: v[:limit] if isinstance(v, str) else v for k, v in fields.items()}
        return {name: value for name, value in texts.items() if value is not None}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Record":
        """Build a record from untrusted data, ignoring invalid fields."""
        reader = untrusted.Fields(fields)
        memory_limit_mib, unit = reader.number("part_mib"), reader.text("part_unit")
        size = (
            Size(memory_limit_mib, unit if unit in UNITS else "GiB") if memory_limit_mib else None
        )
        is_any = not isinstance(fields.get("wants"), list)
        lease = Lease(**untrusted.fields_of(Lease, fields))
        return cls(
            ProcessInfo(**untrusted.fields_of(ProcessInfo, fields)),
            ReservationTerms(size, lease, reader.text("note")),
            WaitRequest(
                reader.text("asks"),
                reader.integer("needs") or 1,
                None if is_any else frozenset(reader.texts("wants", MOST_WANTED)),
                reader.lines("behind", MOST_AHEAD),
            ),
            **untrusted.fields_of(cls, fields),
        )


class Holder(NamedTuple):
    """A process that holds a lock, as described by its record and the operating system.

    Attributes:
        record: The record in the lock file. Another process might have written it, so it is
            sanitized before it is displayed.
        listed_pid: The pid in /proc/locks, or None if the process is not listed there.
        owner: The name of the user running the listed process, according to the operating system.
        uid: The UID of that user. For a part of a GPU, this is the UID of the lock file's owner.
        is_other_namespace: Whether the pid in the record belongs to another PID namespace.
        last_cell: The time at which the most recent cell finished, in seconds since the epoch, or
            None if no cell has finished since the lock was acquired.
        file: The lock file's name.
        used_mib: The memory in MiB used by the process, its children, and the processes that joined
            its reservation, or None if unknown.
        beside: The name of the holder whose reservation this process joined, or None if it joined
            none.
        clock_set_s: How far the wall clock has been set forward since the lock was acquired, in
            seconds. A negative value means that it was set back.
        record_owner: The UID of the only user who can write the record, or None if other users can
            also write it.
        is_dying: Whether the process has been killed, but has not ended yet, for example because
            it is stuck in the driver.
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
    is_dying: bool = False

    @property
    def seen(self) -> bool:
        """Return whether /proc/locks lists the process."""
        return self.listed_pid is not None

    @property
    def confirmed(self) -> bool:
        """Return whether the record and /proc/locks show the same pid."""
        return self.listed_pid is not None and self.listed_pid == self.record.who.pid

    @property
    def pid(self) -> int | None:
        """Return the pid from /proc/locks, or else from the record."""
        return self.listed_pid or self.record.who.pid

    @property
    def user(self) -> str | None:
        """Return the user name from the operating system, or else from the record."""
        return self.owner or self.record.who.user

    @property
    def notebook(self) -> str | None:
        """Return the file name of the holder's notebook."""
        return self.record.who.notebook

    @property
    def name(self) -> str | None:
        """Return the process's display name: the notebook's file name, or else the command."""
        return self.record.who.notebook or self.record.who.command

    @property
    def since(self) -> float | None:
        """Return the time when the lock was acquired, adjusted for changes to the wall clock."""
        since = self.record.since
        return None if since is None else max(0.0, since + self.clock_set_s)

    @property
    def lease(self) -> Lease:
        """Return the reservation's lease."""
        return self.record.terms.lease

    @property
    def note(self) -> str | None:
        """Return the holder's note for other users."""
        return self.record.terms.note

    @property
    def memory_limit_mib(self) -> float | None:
        """Return the size of the reserved part in MiB, or None for a whole device."""
        return self.record.terms.memory_limit_mib

    def is_kept(self, now: float) -> bool:
        """Return whether the device is being kept while the holder's Jupyter kernel restarts.

        Args:
            now: The current time in seconds since the epoch.
        """
        until = self.record.kept_until
        return until is not None and now < until <= now + LONGEST_RESTART_S

    @property
    def is_over(self) -> bool:
        """Return whether the holder is using more memory than it reserved."""
        if self.memory_limit_mib is None or self.used_mib is None:
            return False
        return self.used_mib > self.memory_limit_mib


class Claim(NamedTuple):
    """A holder's claim that its device had a particular number when it was reserved.

    Attributes:
        holder: The holder that makes the claim.
        device: The device, in the form used in lock file names.
        devices: All devices that this user's holders make claims about, in the same form.
    """

    holder: Holder
    device: str
    devices: tuple[str, ...]


class LastHolder(NamedTuple):
    """The last holder of a device that is busy, although no process seems to use it.

    The driver might still be freeing the holder's memory.

    Attributes:
        holder: The holder. Its lock is no longer locked.
        released_s: The seconds since it released the device, or None if it ended without releasing
            the device. The time at which a process ended is unknown.
        is_falling: Whether less memory was in use at the second of two readings.
        is_listed: Whether the driver still lists the holder's process, which has ended.
    """

    holder: Holder
    released_s: float | None
    is_falling: bool = False
    is_listed: bool = False

    @property
    def is_recent(self) -> bool:
        """Return whether the device is known to have been released a short time ago."""
        return self.is_falling or self.released_s is not None


class DeviceStatus(NamedTuple):
    """A device's state, holders and usage.

    Attributes:
        device: The device, or a `Fault` if the device is unusable.
        state: The state to display.
        usage: The device's usage, or None if it was not read.
        utilisation: The percentage of time during which the device was active.
        processes: The processes that are using the device.
        holders: The holders, starting with this process if it is one. If there are several, they
            share the device.
        reason: Why the device can't be used or read, as reported by the driver or the operating
            system.
        is_mine: Whether this process holds the device.
        is_unused: Whether the device is reserved but not being used by its holders, or None if
            unknown.
        is_unreserved_use: Whether a process without a reservation is using the device, or None if
            unknown.
        awaited_by: The first waiter in the queue that could use the device.
        background: The listed processes that do not count as use: graphics processes that use no
            more memory than a typical desktop, and processes without device memory.
        temperature_c: The temperature in degrees Celsius.
        power_w: The power draw in watts.
        power_limit_w: The power limit in watts. The driver slows the GPU down to stay below it.
        promisable_mib: The memory still available for partial reservations, in MiB. If this process
            has reserved a part of the device, that part might be included.
        use_state: The state that `judge` derives from `usage` alone.
        unfit: Why the device can never match the request, or None if it can.
        would_be_taken: Whether the request would reserve this device if enough other devices were
            free.
        rule: The administrator's rule that led to the drained or limited state.
        counted: This user's holders that count toward the quota.
        openers: This user's processes that have opened a busy device, if no process that the driver
            lists explains the memory in use.
        last_holder: The last holder, if the driver might still be freeing its memory.
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
    background: tuple[Process, ...] = ()
    temperature_c: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    promisable_mib: float | None = None
    use_state: State | None = None
    unfit: Unfit | None = None
    would_be_taken: bool = False
    rule: Rule | None = None
    counted: tuple[Holder, ...] = ()
    openers: tuple[Process, ...] = ()
    last_holder: LastHolder | None = None

    @property
    def label(self) -> str:
        """Return the device's display name, such as `GPU2`."""
        return self.device.label


class Reserved(NamedTuple):
    """A reservation, as other processes see it.

    Attributes:
        holder: The process that holds the devices.
        rows: The status of each device that it holds.
        began_boot: The process's start time in seconds since boot, or None if it was not read.
    """

    holder: Holder
    rows: tuple[DeviceStatus, ...]
    began_boot: float | None = None

    @classmethod
    def among(cls, rows: Sequence[DeviceStatus]) -> "list[Reserved]":
        """Return all reservations of these devices, in device order."""
        reservations: dict[object, Reserved] = {}
        for row in rows:
            for holder in row.holders:
                process = holder.listed_pid or holder.file  # the pid in a record might be forged
                reservation = reservations.get(process, cls(holder, ()))
                reservations[process] = reservation._replace(rows=(*reservation.rows, row))
        return [*reservations.values()]


class Answer(Enum):
    """The outcome of asking another process to release its devices or to exit."""

    RELEASED = "the process released its devices"
    CUDA = "CUDA is running in the process"
    CHILD = "a process that it started is using the devices"
    PROGRAM = "the program can't receive the request"
    SILENT = "the process does not respond"
    ANOTHER = "the process did not confirm that it is the selected one"
    GONE = "the process no longer holds a device"
    ENDED = "the process has ended"
    STAYS = "the process can't be ended"
