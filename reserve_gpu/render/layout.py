"""The one picture: what is free or why nothing is, a line for each GPU, and what to do.

A status, a refusal and a wait are all this picture, in words; `html` and `terminal` decide how it
looks, so they can't disagree. All that somebody else may have written is made fit to print here or
in `words`, once.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from reserve_gpu.gpus import names
from reserve_gpu.gpus.usage import idle_limit_mib
from reserve_gpu.model.devices import Device, Process, State
from reserve_gpu.model.untrusted import sanitize
from reserve_gpu.render import durations, phrases, reasons
from reserve_gpu.render.phrases import FAINT, MARK, Line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reserve_gpu.model.holders import DeviceStatus, Holder
    from reserve_gpu.render.tables import Sheet

NAME_LIMIT = 40  # characters
# On a machine of more rows than this, so many free GPUs in a row that are alike have one.
FOLDED_FROM, LEAST_ALIKE = 16, 3
NEVER_S = 60.0  # who has ended no cell since has not used what was reserved
NEW_S = 600.0  # a reservation of one's own is not called idle in its first minutes


class Entry(NamedTuple):
    """One device: what each column says.

    number: of several that are alike, `2-63`. name: empty where all devices share one, which the
    head has then. share: of the memory that is in use, 0 to 1. taken: the same plus what is
    promised but not in use; None if nothing is promised. state: None for a GPU that is split by
    MIG. load: the utilisation, 0 to 1. more: lines below it. is_instance: it stands under its GPU.
    is_mine: this process has reserved it.
    """

    number: str
    name: str
    state: State | None = None
    memory: str = ""
    share: float | None = None
    taken: float | None = None
    load: float | None = None
    temperature: str = ""
    power: str = ""
    who: Line = ()
    more: Sequence[Line] = ()
    is_instance: bool = False
    is_mine: bool = False

    @property
    def util(self) -> str:
        """Return `71 %`, empty if the load is not known."""
        return "" if self.load is None else f"{self.load * 100:.0f} %"


class Layout(NamedTuple):
    """The whole picture: head lines, the devices, who waits, and below it what to do or to know.

    sections: more of the same below it, one for each of several machines.
    sheets: tables of figures.
    """

    head: Sequence[Line]
    entries: Sequence[Entry] = ()
    queue: Sequence[Line] = ()
    foot: Sequence[Line] = ()
    sections: Sequence[Layout] = ()
    sheets: Sequence[Sheet] = ()


class View(NamedTuple):
    """What a picture is made for.

    now: in seconds since the epoch. this_process: what this process is called.
    is_all: also what is alike has lines of its own.
    """

    now: float
    this_process: str = ""
    is_all: bool = False


def entries(rows: Sequence[DeviceStatus], view: View) -> list[Entry]:
    """Return an entry for each device, and one above the instances of each GPU split by MIG.

    On a machine of many GPUs those that are free and alike have one for all of them.
    """
    made = _entries(rows, view)
    if _shared_name(rows):
        made = [entry._replace(name="") for entry in made]
    if view.is_all or len(made) <= FOLDED_FROM:
        return made
    folded: list[Entry] = []
    for _, alike in groupby(made, key=_likeness):
        group = list(alike)
        folded += [_folded(group)] if len(group) >= LEAST_ALIKE else group
    return folded


def common_model(rows: Sequence[DeviceStatus], before: str = "  ") -> Line:
    """Return `8 x A100-SXM4-80GB`, for the head, if all devices that can be read share one name."""
    name, count = _shared_name(rows), sum(isinstance(row.device, Device) for row in rows)
    rest = f" and {len(rows) - count} that can't be read" if count < len(rows) else ""
    return ((f"{before}{count} x {name}{rest}", FAINT),) if name else ()


def _shared_name(rows: Sequence[DeviceStatus]) -> str:
    """Return the name of all devices, empty if they differ or it is only one."""
    devices = [row.device for row in rows if isinstance(row.device, Device)]
    found = {device.name for device in devices}
    is_split = any(device.instance is not None for device in devices)
    return _name(found.pop()) if len(devices) > 1 and len(found) == 1 and not is_split else ""


def _likeness(entry: Entry) -> tuple[object, ...]:
    """Return what two entries have to share to be shown as one; nothing else is like a busy one."""
    is_quiet = entry.state is State.FREE and not (entry.who or entry.is_instance or entry.load)
    return (is_quiet, entry.name, entry.memory) if is_quiet else (entry.number,)


def _folded(group: Sequence[Entry]) -> Entry:
    number = f"{group[0].number}-{group[-1].number}"
    return group[0]._replace(number=number, temperature="", power="")


def _entries(rows: Sequence[DeviceStatus], view: View) -> list[Entry]:
    made: list[Entry] = []
    split: set[int] = set()
    for row in rows:
        index = row.device.index
        if row.device.instance is not None and index not in split:
            split.add(index)
            parts = (each.device for each in rows if each.device.index == index)
            model = next((names.model(part) for part in parts if isinstance(part, Device)), None)
            made.append(Entry(str(index), _name(model), memory="split by MIG"))
        made.append(_entry(row, view))
    return made


def is_awaited(row: DeviceStatus) -> bool:
    """Tell whether the device is free but for those who wait for it."""
    return row.state in (State.FREE, State.AWAITED) and row.awaited_by is not None


def free(rows: Sequence[DeviceStatus]) -> list[DeviceStatus]:
    """Return the devices that can be had at once."""
    return [row for row in rows if row.state is State.FREE and not is_awaited(row)]


def state(row: DeviceStatus, now: float) -> State:
    """Return the state that is shown: also whether a device is awaited, or kept for a restart."""
    if is_awaited(row):
        return State.AWAITED
    return State.KEPT if is_kept(row, now) else row.state


def is_kept(row: DeviceStatus, now: float) -> bool:
    """Tell whether all holders of the device are kernels that restart."""
    kept = [holder.is_kept(now) for holder in row.holders]
    return row.state is State.RESERVED and bool(kept) and all(kept)


def idle_s(row: DeviceStatus, now: float) -> float | None:
    """Return for how long a reserved device has been idle; None if that is not known.

    It counts from the holder's last cell, or from the start of the reservation. With several
    holders it is not known.
    """
    holders = [holder for holder in row.holders if not holder.beside]
    if not row.is_unused or len(holders) != 1:
        return None
    since = holders[0].last_cell or holders[0].since
    return None if since is None else durations.time_since(since, now)


def is_in_parts(row: DeviceStatus) -> bool:
    """Tell whether somebody was promised a part of the device, or wants one and finds it full."""
    has_parts = any(holder.memory_limit_mib is not None for holder in row.holders)
    return row.promisable_mib is not None and (has_parts or row.state is State.FULL)


def _entry(row: DeviceStatus, view: View) -> Entry:
    device = row.device
    is_instance = device.instance is not None
    name, total_mib = None, None
    if isinstance(device, Device):
        name, total_mib = device.name, device.memory_mib
        if name and is_instance:  # the profile alone: the model stands above it
            name = name.removeprefix(f"{names.model(device)} MIG ")
    used_mib = row.usage.used_mib if row.usage else None
    who, *more = _lines(row, view) or [()]
    return Entry(
        device.number,
        _name(name),
        state(row, view.now),
        _memory(used_mib, total_mib),
        None if used_mib is None or not total_mib else min(1.0, used_mib / total_mib),
        _taken(row),
        None if row.utilisation is None else min(1.0, row.utilisation / 100),
        "" if row.temperature_c is None else f"{row.temperature_c} \N{DEGREE SIGN}C",
        "" if row.power_w is None else f"{row.power_w:.0f} W",
        who,
        more,
        is_instance,
        row.is_mine,
    )


def _taken(row: DeviceStatus) -> float | None:
    """Return the share of a device's memory that can't be promised; None if it has no parts."""
    device = row.device
    if not isinstance(device, Device) or not device.memory_mib or not is_in_parts(row):
        return None
    left_mib = (row.promisable_mib or 0.0) + (device.reserve_mib or 0)
    return min(1.0, max(0.0, 1 - left_mib / device.memory_mib))


def _name(name: str | None) -> str:
    """Return `A100-SXM4-80GB`, without the maker, whom everybody knows."""
    return sanitize((name or "").removeprefix("NVIDIA "), NAME_LIMIT)


def _memory(used_mib: float | None, total_mib: int | None) -> str:
    """Return `10.2 of 80.0 GiB`, as far as it is known."""
    if used_mib is None and total_mib is None:
        return ""
    used, total = ("?" if m is None else f"{m / 1024:.1f}" for m in (used_mib, total_mib))
    return f"{used} of {total} GiB"


def _lines(row: DeviceStatus, view: View) -> list[Line]:
    """Return who has the device, who else uses it, and remarks; mostly one line."""
    lines = [_holder(row, holder, view) for holder in row.holders]
    if row.awaited_by and is_awaited(row):
        lines.append(
            (("by ", FAINT), phrases.person(row.awaited_by), *phrases.note(row.awaited_by))
        )
    lines += _uses(row)
    if is_in_parts(row):
        lines.append((reasons.promisable(row),))
    mode = reasons.MODES.get(row.usage.mode or 0) if row.usage else None
    lines += [(text,) for text in (reasons.reason(row), mode) if text]
    graphics_mib = sum(process.memory_mib or 0 for process in row.graphics)
    if row.usage and graphics_mib > idle_limit_mib(row.usage):  # else nobody wonders about it
        drawing = phrases.users(_by_memory(row.graphics), has_kind=False)
        lines.append((("graphics: ", FAINT), drawing))
    return lines


def _holder(row: DeviceStatus, holder: Holder, view: View) -> Line:
    """Return `this kernel: alice, train.ipynb (pid 4321) for 2 h, idle for 1 h: a note`."""
    what: Line = ()
    if not isinstance(row.device, Device):  # only the record says that it is this one
        what = (f"reserved as {sanitize(holder.record.label or row.label)} by ",)
    idle: Line = ()
    seconds = idle_s(row, view.now)
    is_new = row.is_mine and (seconds is None or seconds < NEW_S)
    if row.is_unused and not is_new and not holder.is_kept(view.now):
        idle = ", ", (_idle(holder, seconds), MARK)
    this_process = view.this_process if row.is_mine and holder is row.holders[0] else ""
    return what + phrases.holder_line(holder, view.now, more=idle, this_process=this_process)


def _idle(holder: Holder, seconds: float | None) -> str:
    """Return `idle for 2 h`, and in short where that is as long as it has been reserved."""
    if holder.since is None or seconds is None or seconds < durations.MINUTE_S:
        return durations.idle(seconds)
    if holder.last_cell is None:  # a script, which may have used it before
        return "idle"
    return "never used" if holder.last_cell - holder.since < NEVER_S else durations.idle(seconds)


def _uses(row: DeviceStatus) -> list[Line]:
    """Return the processes that no holder is known to have started.

    A holder's own processes are left out: the holder has a line already.
    """
    processes = _by_memory(row.processes)
    if not row.holders:
        title = ("no reservation: ", MARK) if row.is_unreserved_use else ("used by ", FAINT)
        return [(title, phrases.users(processes))] if processes else []
    titles: dict[Line, list[Process]] = {}
    for process in processes:
        if process.has_reserved:
            continue
        what: Line = (("used by ", FAINT),)
        if process.beside:
            name = sanitize(process.beside, phrases.NOTEBOOK_LIMIT)
            what = ((f"not joined, beside {name}: ", FAINT),)
        elif process.has_reserved is False:
            what = (("without a reservation: ", MARK),)
        titles.setdefault(what, []).append(process)
    return [(*what, phrases.users(those)) for what, those in titles.items()]


def _by_memory(processes: Sequence[Process]) -> list[Process]:
    return sorted(processes, key=lambda process: -(process.memory_mib or 0))
