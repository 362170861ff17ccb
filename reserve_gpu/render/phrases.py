"""Format memory sizes, devices, holders and processes as short phrases."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, TypeAlias

from reserve_gpu.model.devices import GRAPHICS, Device, Fault, Process, State
from reserve_gpu.model.errors import REASON_LIMIT
from reserve_gpu.model.parsing import LONGEST_S
from reserve_gpu.model.untrusted import sanitize
from reserve_gpu.render import durations

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reserve_gpu.model.holders import DeviceStatus, Holder, ProcessInfo
    from reserve_gpu.model.queue import Ticket
    from reserve_gpu.model.requests import Rule, Size


# Text styles. MARK is for problems such as idle or overdue reservations, and TYPED for commands.
STRONG, FAINT, MARK, TYPED = "strong", "faint", "mark", "typed"
Line: TypeAlias = "tuple[str | tuple[str, str], ...]"  # plain strings and (text, style) pairs

TITLES = ("GPU", "state", "name", "memory", "util", "temp", "power", "who")  # column titles
QUEUE_TITLE = "waiting in the queue"
# States that share a color. In all of them, a user has reserved the device or is waiting for it.
TAKEN = (State.RESERVED, State.KEPT, State.FULL, State.AWAITED)

MIB_OF_GIB = 1024
LEAST_HOURS = 0.05  # the smallest number that does not round to 0.0
LISTED_PROCESSES = 3
COMMAND_LIMIT = 40  # characters
NOTEBOOK_LIMIT = 40  # characters
NAMED_SHARERS = 3
MOST_NAMED = 12  # maximum number of GPUs and GPU ranges in a list
NAMED_IDLE = 3  # maximum number of hints about idle reservations
UNKNOWN_USER = "unknown user"
DYING = "killed, but has not ended (state D): if this lasts, only a reboot can free the GPU"


def gib(mib: float) -> str:
    """Format a memory size: `10.2 GiB`, or `<0.1 GiB` for a size just above zero."""
    return f"{hours(mib / MIB_OF_GIB)} GiB"


def part(size: Size) -> str:
    """Format the size of a partial reservation: `9.3 GiB`, or `50%` if it was given in percent."""
    return gib(size.mib) if size.percent is None else f"{size.percent:.12g}%"


def rounded_down(mib: float) -> float:
    """Round a size in MiB down to a multiple of 0.1 GiB."""
    tenths = math.floor(mib * 10 / MIB_OF_GIB)
    return max(0.0, next(n * MIB_OF_GIB / 10 for n in (tenths, tenths - 1) if n * 102.4 <= mib))


def room(mib: float) -> str:
    """Format the size of available memory, rounded down: `6.2 GiB`."""
    return gib(rounded_down(mib))


def hours(number: float, *, shows_zero: bool = True) -> str:
    """Format a number with one decimal place: `31.0`, or `<0.1` for a number just above zero.

    Args:
        number: The number, which is not negative.
        shows_zero: Whether to format zero as `0.0` rather than as an empty string.
    """
    if 0 < number < LEAST_HOURS:
        return "<0.1"
    return f"{number:.1f}" if number or shows_zero else ""


def listed(words: Sequence[str]) -> str:
    """Join words into a list: `a`, `a and b`, or `a, b and c`."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def be(count: int) -> str:
    """Return `is` for a count of one, and `are` otherwise."""
    return "is" if count == 1 else "are"


def labels(devices: Sequence[Device | Fault | DeviceStatus]) -> str:
    """Join the labels of devices: `GPU0, GPU1 and GPU3`."""
    return listed([device.label for device in devices])


def ranges(rows: Sequence[DeviceStatus]) -> str:
    """Join the labels of devices, using ranges: `GPU0, GPU2 to GPU5 and GPU7`.

    Three or more consecutive GPUs are shown as a range.
    """
    runs: list[list[DeviceStatus]] = []
    for row in rows:
        last = runs[-1][-1].device if runs else None
        is_next = last and last.index + 1 == row.device.index
        if is_next and last and last.instance is row.device.instance is None:
            runs[-1].append(row)
        else:
            runs.append([row])
    named = [
        [f"{run[0].label} to {run[-1].label}"] if len(run) > 2 else [row.label for row in run]
        for run in runs
    ]
    labels_ = [label for names in named for label in names]
    if len(labels_) > MOST_NAMED:
        labels_ = [*labels_[: MOST_NAMED - 1], f"{len(labels_) - MOST_NAMED + 1} more"]
    return listed(labels_)


def escape(text: str) -> str:
    """Escape text for HTML."""
    import html  # slow to import, and only needed for HTML

    return html.escape(text)


def holder(holder: Holder, what: str = "reserved") -> str:
    """Describe a holder: `reserved by alice, train.ipynb (pid 4321) for 2 h, until 18:00`.

    Unknown details are left out.

    Args:
        holder: The holder of a device.
        what: The first word of the description.
    """
    return plain(holder_line(holder, time.time(), f"{what} by "))


def holder_line(
    holder: Holder,
    now: float,
    what: str = "",
    *,
    more: Line = (),
    this_process: str = "",
) -> Line:
    """Describe a holder in a styled line.

    Args:
        holder: A holder of a device.
        now: The current time, in seconds since the epoch.
        what: Text to put before the description.
        more: Styled text to put before the note.
        this_process: The phrase for this process, such as `this kernel`. Empty if another process
            is the holder.
    """
    line: Line = ((what, FAINT),) if what else ()
    if this_process:
        line += (this_process, MARK), ": "
    line += _user_and_name(holder)
    line += _where(holder)
    line += _part(holder)
    seconds = None if holder.since is None else durations.time_since(holder.since, now)
    if seconds is not None:
        line += (f"{',' if holder.is_over else ''} for {durations.duration(seconds)}",)
    if holder.is_dying:
        line += ", ", (DYING, MARK)
    else:
        line += lease_end(holder, now, is_own=bool(this_process))
    line += more
    return line + note(holder)


def waiter_line(ticket: Ticket, now: float, what: str, user: str | None) -> Line:
    """Describe a waiter: `bob, sweep.ipynb (pid 99) has waited 12 min for 2 GPUs: "thesis"`.

    Args:
        ticket: The waiter's ticket.
        now: The current time, in seconds since the epoch.
        what: Text to put before the description.
        user: The user who reads the line, whose own waiters are called `your sweep.ipynb`.
    """
    holder = ticket.holder
    is_own = is_of(holder, user)
    name = ((owner_or_own_process(holder, user), STRONG),) if is_own else _user_and_name(holder)
    line: Line = ((what, FAINT), *name, *_where(holder), *wait(holder, now, ticket.asks))
    return line + note(holder)


def wait(holder: Holder, now: float, asks: str | None) -> Line:
    """Describe a wait, such as ` has waited 12 min for 2 GPUs`.

    Args:
        holder: The waiter.
        now: The current time, in seconds since the epoch.
        asks: The waiter's request, in words.
    """
    seconds = None if holder.since is None else durations.time_since(holder.since, now)
    verb = "is waiting" if seconds is None else f"has waited {durations.duration(seconds)}"
    return f" {verb} for ", (sanitize(asks or "a GPU"), STRONG)


def _user_and_name(holder: Holder) -> Line:
    """Return `alice, train.ipynb`, or just the user."""
    name = holder.name
    line: Line = ((user_of(holder), STRONG),)
    return (*line, ", ", (sanitize(name, NOTEBOOK_LIMIT), STRONG)) if name else line


def _where(holder: Holder) -> Line:
    """Return ` from lab1 (pid 4321) joined to train.ipynb`, or just the parts that apply."""
    line: Line = ()
    if origin := holder.record.who.origin:
        line += (" from ", FAINT), (sanitize(origin, NOTEBOOK_LIMIT), STRONG)
    if process := _process_of(holder):
        line += (f" ({process})",)
    if holder.beside:
        line += (" joined to ", FAINT), (sanitize(holder.beside, NOTEBOOK_LIMIT), STRONG)
    return line


def lease_end(holder: Holder, now: float, *, is_own: bool = False) -> Line:
    """Describe when a reservation ends.

    For example, `, until 18:00 or after 1 h idle, longer if no other process waits`. The line is
    empty if the reservation has no end time and no idle limit.

    Args:
        holder: The holder of a device.
        now: The current time, in seconds since the epoch.
        is_own: Whether this process is the holder. The line then includes the remaining time.
    """
    kept_until = holder.record.kept_until
    if kept_until is not None and holder.is_kept(now):
        restart = f"kept for its restart ({durations.remaining(kept_until - now)} left)"
        record = holder.record._replace(kept_until=None)
        return (", ", (restart, MARK), *lease_end(holder._replace(record=record), now))
    if holder.record.guest_of is not None and not holder.beside:
        return ", ", ("overdue: the reservation that it joined has been released", MARK)
    if (since := durations.overdue_since(holder, now)) is not None:
        return ", ", (f"overdue since {durations.moment(since, now)}", MARK)
    at, lease = durations.end(holder, now), holder.lease
    if at is not None and at < now:
        past = f"past {durations.moment(at, now)}"
        if is_own:
            return (f", {past}: kept until another process waits",)
        return ", ", (f"{past}: join the queue to get it", MARK)
    idle_s = lease.idle_s
    is_shown = idle_s is not None and idle_s <= LONGEST_S
    after = f"after {durations.time_limit(idle_s or 0.0)} idle" if is_shown else None
    if at is None:
        if_wanted = " if another process waits" if lease.if_wanted else ""
        return (f", released {after}{if_wanted}",) if after else ()
    left = f" ({durations.remaining(at - now)} left)" if is_own else ""
    longer = ", longer if no other process waits" if lease.if_wanted and not lease.is_jobs else ""
    jobs = ", the job's end" if lease.is_jobs and not holder.record.overdue else ""
    until = f", until {durations.moment(at, now)}{jobs}{left}"
    return (f"{until}{f' or {after}' if after else ''}{longer}",)


def plain(line: Line) -> str:
    """Return the text of a styled line."""
    return "".join(part if isinstance(part, str) else part[0] for part in line)


def user_of(holder: Holder) -> str:
    """Return `alice`, or `alice (claude)` if a coding agent made the reservation for alice."""
    user, agent = sanitize(holder.user or UNKNOWN_USER), holder.record.who.agent
    return f"{user} ({sanitize(agent, NOTEBOOK_LIMIT)})" if agent else user


def person(*holders: Holder) -> str:
    """Return a user and the names of that user's holders, such as `alice (train.ipynb)`.

    All of the holders must belong to the same user.
    """
    user = sanitize(holders[0].user or UNKNOWN_USER)
    texts = (text for holder in holders for text in (holder.record.who.agent, holder.name))
    names = dict.fromkeys(sanitize(text) for text in texts if text)
    return f"{user} ({listed([*names][:NAMED_SHARERS])})" if names else user


def is_of(holder: Holder, user: str | None) -> bool:
    """Return whether the Linux kernel confirms that a holder or waiter belongs to this user."""
    return user is not None and holder.seen and holder.user == user


def owner_or_own_process(holder: Holder, user: str | None) -> str:
    """Return a holder's owner, such as `alice`.

    If `user`, who reads the message, is the owner, return `your train.ipynb` instead.
    """
    if not is_of(holder, user):
        return sanitize(holder.user or UNKNOWN_USER)
    return f"your {sanitize(holder.name or f'process {holder.pid}', NOTEBOOK_LIMIT)}"


def person_or_own_process(holder: Holder, user: str | None) -> str:
    """Return `alice (train.ipynb)`, or `your train.ipynb` if `user` owns the process."""
    is_own = is_of(holder, user)
    return owner_or_own_process(holder, user) if is_own else person(holder)


def name_of(holder: Holder) -> str:
    """Return a holder's name and pid, such as `train.ipynb (pid 4321)`, or just the name."""
    name = sanitize(holder.name or "a process", NOTEBOOK_LIMIT)
    return f"{name} (pid {holder.pid})" if holder.pid else name


def note(holder: Holder) -> Line:
    """Return a colon and the holder's quoted note, or an empty line if there is no note."""
    return (": ", (f'"{sanitize(holder.note)}"', STRONG)) if holder.note else ()


def users(processes: Sequence[Process], *, has_kind: bool = True) -> str:
    """Describe the first few processes of a device, such as `bob, python (pid 9876)`.

    Args:
        processes: The processes of one device.
        has_kind: Whether to mark graphics processes.
    """
    words = [
        _process(process, has_memory=len(processes) > 1, has_kind=has_kind)
        for process in processes[:LISTED_PROCESSES]
    ]
    if more := len(processes) - len(words):
        words.append(f"{more} more")
    return "; ".join(words)


def named(rule: Rule) -> str:
    """Return a rule and its source: `gpus = 1 ([groups.students] in /etc/reserve_gpu.toml)`."""
    return f"{rule.text} ({rule.table} in {sanitize(rule.file, REASON_LIMIT)})"


def _process_of(holder: Holder) -> str:
    """Return `pid 4321`, or `pid 4321, unverified` if the Linux kernel does not confirm it."""
    pid = f"pid {holder.pid}" if holder.pid else ""
    if holder.is_other_namespace:
        pid += " in another container"
    in_job = _in_job(holder.record.who) if holder.record.who.job else ""
    is_unverified = not holder.seen and bool(holder.pid or holder.user or holder.notebook)
    return ", ".join(filter(None, [pid, in_job, "unverified" if is_unverified else ""]))


def _in_job(who: ProcessInfo) -> str:
    """Describe the batch job of a process, such as `job 4711, part of train.sh`."""
    of = f", part of {sanitize(who.job_name, NOTEBOOK_LIMIT)}" if who.job_name else ""
    return f"job {sanitize(who.job or '')}{of}"


def _part(holder: Holder) -> Line:
    """Describe how much memory a part's holder is using, such as ` 12.1 of 9.3 GiB: over`.

    If the memory use is unknown, return ` up to 9.3 GiB`. The line is empty for the holder of a
    whole device.
    """
    if holder.memory_limit_mib is None:
        return ()
    if holder.used_mib is None:
        return (f" up to {gib(holder.memory_limit_mib)}",)
    line: Line = (f" {holder.used_mib / MIB_OF_GIB:.1f} of {gib(holder.memory_limit_mib)}",)
    return (*line, ": ", ("over", MARK)) if holder.is_over else line


def _process(process: Process, *, has_memory: bool, has_kind: bool) -> str:
    """Describe a process, such as `bob, python (pid 9876) 1.2 GiB`."""
    user = f"{sanitize(process.user)}, " if process.user else ""
    memory = "" if process.memory_mib is None or not has_memory else gib(process.memory_mib)
    pid = f"pid {process.pid}{', a zombie' if process.zombie_of else ''}"
    if has_kind and process.kind == GRAPHICS:
        pid += ", graphics"
    if not process.command:
        return f"{user}{pid}{', ' if memory else ''}{memory}"
    return f"{user}{sanitize(process.command, COMMAND_LIMIT)} ({pid}) {memory}".rstrip()
