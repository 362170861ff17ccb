"""Words for single things: memory, times, a device, who has it, and why it was not taken."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, TypeAlias

from reserve_gpu.errors import REASON_LIMIT, shown
from reserve_gpu.gpus.usage import is_usable
from reserve_gpu.model import MIB, STUCK, UNITS, ComputeMode, Fault, Holder, State, Unfit
from reserve_gpu.quantities import LONGEST_S

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reserve_gpu.model import Device, Process, Refusal, Row, Rule, Usage

# How words are set off. MARK is for what people argue about.
STRONG, FAINT, MARK = "strong", "faint", "mark"
Line: TypeAlias = "tuple[str | tuple[str, str], ...]"  # plain words, and words with their style

TITLES = ("GPU", "state", "name", "memory", "use", "heat", "who")  # of the columns
QUEUE_TITLE = "waiting in the queue"

LISTED_PROCESSES = 3
COMMAND_LIMIT = 40  # characters
NOTEBOOK_LIMIT = 40  # characters
NAMED_SHARERS = 3
NAMED_IDLE = 3  # reserved devices on which nothing runs
# Where processes can't be seen, a device with less memory in use than this has none on it: the CUDA
# context of a program that computes nothing takes some hundred MiB.
CONTEXT_MIB = 64.0
MINUTE_S = 60
CLOCK_SKEW_S = 60  # a time further in the future than this is not shown
WEEK_S = 6 * 86400  # as long as this a day of the week means one day alone
# What to do where no device can come free by itself.
TROUBLE = "Waiting alone won't help: "
LOOK = "look at what nvidia-smi says, and "  # not for what is only drained
LOST = " (a GPU that is lost needs a reset or a reboot)"
# By the compute mode of a device, what it means for those who would use it.
MODES = {
    ComputeMode.PROHIBITED: "compute mode is prohibited: nobody can use it",
    ComputeMode.EXCLUSIVE_PROCESS: "compute mode is exclusive: one process at a time",
}


def gib(mib: float) -> str:
    """Memory for people: `10.2 GiB`, and `512 MiB` below one GiB."""
    return f"{mib / 1024:.1f} GiB" if mib >= 1024 else f"{mib:.0f} MiB"


def size(mib: float, unit: str) -> str:
    """Memory in the unit that somebody asked in: `200 GB`."""
    return f"{_in(mib, unit)} {unit}"


def rounded_down(mib: float, unit: str) -> float:
    """The most memory in MiB that is a short number in that unit, and no more than that much."""
    steps = 10 if mib * MIB >= UNITS[unit] else 1000
    number = math.floor(mib * MIB / UNITS[unit] * steps)
    shorter = (n / steps * UNITS[unit] / MIB for n in (number, number - 1))
    return next((size_mib for size_mib in shorter if 0 <= size_mib <= mib), 0.0)


def room(mib: float, unit: str) -> str:
    """Memory that can still be promised, rounded down: `6.2 GB`."""
    return size(rounded_down(mib, unit), unit)


def duration(seconds: float) -> str:
    """`45 s`, `12 min`, `2 h 10 min`, `2 h`, `3 d 4 h`."""
    minutes, hours, days = int(seconds // 60), int(seconds // 3600), int(seconds // 86400)
    if days:
        return f"{days} d {hours % 24} h".removesuffix(" 0 h")
    if hours:
        return f"{hours} h {minutes % 60} min".removesuffix(" 0 min")
    return f"{minutes} min" if minutes else f"{int(seconds)} s"


def idle(seconds: float | None) -> str:
    """`idle for 2 h`, and `idle` alone for less than a minute, or if that is not known."""
    return "idle" if seconds is None or seconds < MINUTE_S else f"idle for {duration(seconds)}"


def time_since(moment: float, now: float) -> float | None:
    """The seconds since a moment that somebody noted, None if it lies in the future."""
    return max(0.0, now - moment) if moment < now + CLOCK_SKEW_S else None


def moment(at: float, now: float) -> str:
    """`18:00` today, `Fri 18:00` within six days, else `2026-12-01 18:00`; in local time."""
    there, here = time.localtime(at), time.localtime(now)
    if there[:3] == here[:3]:
        return time.strftime("%H:%M", there)
    is_near = abs(at - now) < WEEK_S
    return time.strftime("%a %H:%M" if is_near else "%Y-%m-%d %H:%M", there)


def end(holder: Holder, now: float) -> float | None:
    """The moment at which it ends, by the holder's word; None for none, or one that makes no sense.

    Of what is overdue it is the moment at which it should have ended.
    """
    if holder.since is None:
        return None
    moments = (holder.overdue, holder.terms.until)
    return next((at for at in moments if at and holder.since <= at <= now + LONGEST_S), None)


def overdue_since(holder: Holder, now: float) -> float | None:
    """Since when it should have ended, by the holder's word; None if that is not so."""
    at = end(holder, now)
    is_over = at is not None and at < now
    return at if is_over and (holder.overdue or not holder.terms.if_wanted) else None


def time_limit(seconds: float) -> str:
    """A duration that somebody asked for: as above, and `0.2 s` where it is below a second."""
    return duration(seconds) if seconds >= 1 else f"{seconds:.2g} s"


def listed(words: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def be(count: int) -> str:
    """`is` or `are`."""
    return "is" if count == 1 else "are"


def labels(devices: Sequence[Device | Fault | Refusal]) -> str:
    """`GPU1`, `GPU1 and GPU3`, `GPU0, GPU1 and GPU3`."""
    return listed([device.label for device in devices])


def escape(text: str) -> str:
    """The text as HTML shows it."""
    import html  # which loads the names of 2,000 letters; most sessions show no HTML

    return html.escape(text)


def described(device: Device) -> str:
    """`0000:03:00.0 16x GeForce GTX 1050 Ti (VBIOS 86.07.22.00.A8)`, less what is not reported."""
    parts = [
        device.bus_id,
        device.link_width and f"{device.link_width}x",
        device.name,
        device.vbios and f"(VBIOS {device.vbios})",
    ]
    return " ".join(shown(part) for part in parts if part)


def holder(holder: Holder, what: str = "reserved") -> str:
    """`reserved by alice, train.ipynb (pid 4321) for 2 h, until 18:00`, as far as it is known."""
    return plain(holder_line(holder, time.time(), f"{what} by "))


def holder_line(  # noqa: PLR0913 - the last ones are keywords
    holder: Holder,
    now: float,
    what: str = "",
    *,
    asks: str = "",
    more: Line = (),
    own: str = "",
) -> Line:
    """The same with styles.

    asks: of one who waits, what for. more: what follows, before the note.
    own: how this process is called, if it is the holder.
    """
    line: Line = ((what, FAINT),) if what else ()
    if own:
        line += (own, MARK), ": "
    line += ((shown(holder.user or "somebody"), STRONG),)
    if name := holder.notebook or holder.command:
        line += ", ", (shown(name, NOTEBOOK_LIMIT), STRONG)
    if origin := _origin(holder):
        line += (f" ({origin})",)
    line += _part(holder)
    if asks:
        line += (" has waited for ", FAINT), (shown(asks), STRONG)
    seconds = None if holder.since is None else time_since(holder.since, now)
    if seconds is not None:
        line += (f"{',' if holder.is_over else ''} for {duration(seconds)}",)
    if not asks:
        line += terms(holder, now, is_own=bool(own))
    line += more
    if holder.note:
        line += ": ", (shown(holder.note), STRONG)
    return line


def terms(holder: Holder, now: float, *, is_own: bool = False) -> Line:
    """`, until 18:00 or after 1 h idle, longer if nobody waits`; empty where there is no end.

    is_own: it is this process's, which is told how much is left.
    """
    if (since := overdue_since(holder, now)) is not None:
        return ", ", (f"overdue since {moment(since, now)}", MARK)
    at, idle_s, is_kind = end(holder, now), holder.terms.idle_s, holder.terms.if_wanted
    if at is not None and at < now:
        if is_own:
            return (f", past {moment(at, now)}, as nobody waits",)
        return ", ", (f"yours since {moment(at, now)} if you wait", MARK)
    after = None if idle_s is None or idle_s > LONGEST_S else f"after {duration(idle_s)} idle"
    if at is None:
        if_wanted = " if somebody waits" if is_kind else ""
        return (f", lets go {after}{if_wanted}",) if after else ()
    # Rounded: a second after `--for 4h` it is 4 h still.
    left = f" ({duration(at - now + MINUTE_S / 2)} left)" if is_own else ""
    longer = ", longer if nobody waits" if is_kind else ""
    return (f", until {moment(at, now)}{left}{f' or {after}' if after else ''}{longer}",)


def plain(line: Line) -> str:
    """A line without its styles."""
    return "".join(part if isinstance(part, str) else part[0] for part in line)


def heat(row: Row) -> str:
    """`61 °C 240 W`, as far as it is known."""
    parts = [
        "" if row.temperature_c is None else f"{row.temperature_c} \N{DEGREE SIGN}C",
        "" if row.power_w is None else f"{row.power_w:.0f} W",
    ]
    return " ".join(filter(None, parts))


def person(holder: Holder) -> str:
    """`alice (train.ipynb)`: whom to talk to."""
    user, name = shown(holder.user or "somebody"), holder.notebook or holder.command
    return f"{user} ({shown(name)})" if name else user


def users(processes: Sequence[Process]) -> str:
    """`bob, python (pid 9876)`, for the first few processes."""
    words = [
        _process(process, has_memory=len(processes) > 1) for process in processes[:LISTED_PROCESSES]
    ]
    if more := len(processes) - len(words):
        words.append(f"{more} more")
    return "; ".join(words)


def cause(state: State, usage: Usage | None) -> str:
    """What in the readings makes the device busy, prohibited or unknown; empty for other states."""
    if state is State.PROHIBITED:
        return MODES[ComputeMode.PROHIBITED]
    if state is State.UNKNOWN:
        return "neither its processes nor its memory can be read"
    if state is not State.BUSY or usage is None:
        return ""
    if usage.compute:
        return f"{usage.compute} compute process{'' if usage.compute == 1 else 'es'}"
    if usage.mps:
        return f"{usage.mps} MPS client{'' if usage.mps == 1 else 's'}"
    if usage.unexplained_mib is not None:
        return f"{gib(usage.unexplained_mib)} in use by no process that can be seen"
    return ""


def use(state: State, usage: Usage | None, processes: Sequence[Process] = ()) -> str:
    """`busy, bob, python (pid 9876)`, or `busy, 2 compute processes` without names."""
    if state is State.PROHIBITED:
        return cause(state, usage)
    if state is not State.BUSY:
        return ": ".join(filter(None, [state.value, cause(state, usage)]))
    is_closed = usage is not None and not is_usable(usage)
    busy = "busy in exclusive mode (one process at a time)" if is_closed else "busy"
    return ", ".join(filter(None, [busy, users(processes) or cause(state, usage)]))


def refusal(refusal: Refusal, unit: str = "GiB") -> str:
    """Why the device was not taken, in words that follow `GPU0: `. unit: of parts of it."""
    return "; ".join(filter(None, [_obstacle(refusal, unit), would_be(refusal)]))


def full(refusal: Refusal, unit: str) -> str:
    """`has room for 6.2 GB; alice 40 GB, bob 30 GB`: what is left, and who has the rest."""
    left_mib = rounded_down(refusal.room_mib or 0.0, unit)
    parts = [
        f"{shown(holder.user or 'somebody')} {_promise(holder)}"
        for holder in refusal.sharers[:NAMED_SHARERS]
    ]
    if more := len(refusal.sharers) - len(parts):
        parts.append(f"{more} more")
    left = f"has room for {size(left_mib, unit)}" if left_mib else "has no room"
    return "; ".join(filter(None, [left, ", ".join(parts)]))


def promisable(mib: float, sharers: Sequence[Holder], unit: str) -> str:
    """`34.2 GiB can still be promised` of a device, or why nothing can."""
    if left_mib := rounded_down(mib, unit):
        return f"{size(left_mib, unit)} can still be promised"
    people = [holder.user or "somebody" for holder in sharers if holder.part_mib is None]
    names = [shown(name) for name in dict.fromkeys(people)][:NAMED_SHARERS]
    return f"nothing can be promised{f': {listed(names)} gave no size' if names else ''}"


def would_be(refusal: Refusal) -> str:
    """What would become of a device that others have or use, were there enough; else empty."""
    if not refusal.would_be_taken or refusal.state is State.FREE:
        return ""
    if refusal.state is State.RESERVED:
        return "it would be shared"
    return "it would be taken all the same, as it was named"


def _obstacle(refusal: Refusal, unit: str) -> str:
    """What speaks against taking the device."""
    device, state = refusal.device, refusal.state
    if isinstance(device, Fault):
        return f"can't be read: {_fault(refusal)}" if refusal.unfit else _fault(refusal)
    if refusal.unfit is not None:
        return _unfit(device, refusal.unfit)
    if state is State.RESERVED:
        return holder(refusal.holder or Holder())
    if state is State.FULL:
        return full(refusal, unit)
    if state is State.AWAITED:
        awaited = holder(refusal.holder or Holder(), "awaited")
        return "; ".join(filter(None, [_use_beside(refusal), awaited]))
    if refusal.fault:
        kind = "can't be read" if state in STUCK else state.value
        return f"{kind}: {_fault(refusal)}"
    return use(state, refusal.usage, refusal.processes or ())


def detail(refusal: Refusal) -> str:
    """What there is to be said beside the state of a device that nobody has."""
    if isinstance(refusal.device, Fault) or refusal.fault:
        return _fault(refusal)
    if refusal.unfit is not None:
        return _unfit(refusal.device, refusal.unfit)
    if refusal.rule is not None:
        return by_rule(refusal)
    return cause(refusal.state, refusal.usage)


def by_rule(refusal: Refusal) -> str:
    """What is said beside a device that an administrator's rule keeps from who asks.

    Of one that is limited all is said above the devices.
    """
    rule = refusal.rule
    return f"by {named(rule)}" if rule and refusal.state is State.DRAINED else ""


def named(rule: Rule) -> str:
    """`gpus = 1 of [groups.students] in /etc/reserve_gpu.toml`: where somebody can look it up."""
    return f"{rule.text} of {rule.table} in {shown(rule.file, REASON_LIMIT)}"


def is_unused(usage: Usage, processes: Sequence[Process] = ()) -> bool | None:
    """Whether nothing of its holders' runs on a reserved device, None if that can't be seen.

    processes: those that could be listed.
    """
    count = (usage.compute or 0) + (usage.mps or 0)
    if any(process.has_reserved for process in processes):
        return False
    if not usage.sees_all or usage.compute is None:
        is_empty = usage.reserve_known and usage.used_mib is not None and not count
        return True if is_empty and (usage.used_mib or 0.0) < CONTEXT_MIB else None
    if len(processes) < count or any(process.has_reserved is None for process in processes):
        return None
    return True


def is_trouble(states: Sequence[State], needed: int = 1) -> bool:
    """Whether too few of the devices in these states can come free unless somebody mends one."""
    stuck = sum(state in STUCK for state in states)
    return stuck > 0 and len(states) - stuck < needed


def trouble(states: Sequence[State]) -> str:
    """What to do where no device can come free by itself."""
    look = LOOK if any(state in STUCK and state is not State.DRAINED for state in states) else ""
    return f"{TROUBLE}{look}ask the administrator{LOST if State.BROKEN in states else ''}."


def _origin(holder: Holder) -> str:
    """`pid 4321` where the kernel says so; else what says it, if anything does."""
    pid = f"pid {holder.pid}" if holder.pid else ""
    if holder.elsewhere:
        pid += " of another container"
    is_word = not holder.seen and bool(holder.pid or holder.user or holder.notebook)
    return ", ".join(filter(None, [pid, "by its own word" if is_word else ""]))


def _part(holder: Holder) -> Line:
    """` 12.1 of 10 GB: over`: what it uses of what it was promised, empty if it was nothing.

    ` up to 10 GB` where its use can't be seen.
    """
    if holder.part_mib is None:
        return ()
    if holder.used_mib is None:
        return (f" up to {_promise(holder)}",)
    line: Line = (f" {_in(holder.used_mib, holder.part_unit, 1)} of {_promise(holder)}",)
    return (*line, ": ", ("over", MARK)) if holder.is_over else line


def _promise(holder: Holder) -> str:
    """`40 GB`: what a sharer was promised, in the unit that it asked in."""
    if holder.part_mib is None:
        return "without a size"
    return size(holder.part_mib, holder.part_unit)


def _in(mib: float, unit: str, digits: int = 2) -> str:
    """The number that so much memory is in that unit; with one digit more where it is below 1."""
    number = mib * MIB / UNITS[unit]
    return f"{round(number, digits if number >= 1 else digits + 1):.12g}"


def _use_beside(refusal: Refusal) -> str:
    """What uses a device that others wait for, empty if nothing does."""
    if refusal.fault:
        return f"can't be read: {_fault(refusal)}"
    if refusal.use in (None, State.IDLE):
        return ""
    return use(refusal.use, refusal.usage, refusal.processes or ())


def _fault(refusal: Refusal) -> str:
    """Why the device can't be used or asked, as the driver or the system says; empty if it can."""
    own = refusal.device.reason if isinstance(refusal.device, Fault) else ""
    return shown(refusal.fault or own, REASON_LIMIT)


def _unfit(device: Device, unfit: Unfit) -> str:
    if unfit is Unfit.MODEL:
        return f"is a {shown(device.name) if device.name else 'GPU without a name'}"
    if unfit is Unfit.MEMORY:
        return f"has {gib(device.memory_mib or 0)}"
    if unfit is Unfit.PART:
        return f"has {gib(device.usable_mib or 0)} to share"
    if unfit is Unfit.MEMORY_UNKNOWN:
        return "does not say how much memory it has"
    return "is a MIG instance; with this driver a process can use only one"


def _process(process: Process, *, has_memory: bool) -> str:
    """has_memory: it is said how much of the device's it has; of one alone the device says it."""
    user = f"{shown(process.user)}, " if process.user else ""
    memory = "" if process.memory_mib is None or not has_memory else gib(process.memory_mib)
    if not process.command:
        return f"{user}pid {process.pid}{', ' if memory else ''}{memory}"
    return f"{user}{shown(process.command, COMMAND_LIMIT)} (pid {process.pid}) {memory}".rstrip()
