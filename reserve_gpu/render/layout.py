"""Build the layout of a GPU table: a headline, an entry for each device, and hints below them.

The displays of a status, a refusal and a wait all use this layout. The `html` and `terminal`
modules only draw it, so both show the same content. Untrusted text is sanitized either here or in
`phrases`.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from reserve_gpu.gpus import names
from reserve_gpu.gpus.usage import idle_limit_mib
from reserve_gpu.model.devices import GRAPHICS, Device, Process, State
from reserve_gpu.model.untrusted import sanitize
from reserve_gpu.render import durations, phrases, reasons
from reserve_gpu.render.phrases import FAINT, MARK, Line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reserve_gpu.model.holders import DeviceStatus, Holder
    from reserve_gpu.render.tables import Sheet

NAME_LIMIT = 40  # characters
# In a table with more than FOLDED_FROM entries, a run of at least LEAST_ALIKE similar free GPUs is
# shown as a single entry.
FOLDED_FROM, LEAST_ALIKE = 16, 3
NEVER_S = 60.0  # seconds; a cell that ends this soon after a reservation starts does not count
NEW_S = 600.0  # idle seconds before this process's own device is displayed as idle


class Entry(NamedTuple):
    """An entry in a GPU table, for one device or several similar ones.

    Attributes:
        number: The device's number, or `2-63` for several similar GPUs.
        name: The model. Empty if all devices are the same model, which the headline then names.
        state: The state, or None for a GPU that is split by MIG.
        memory: The used and total memory, as text.
        share: The fraction of the memory that is in use, from 0 to 1, or None if unknown.
        taken: The fraction of the memory that is in use or reserved, from 0 to 1. None if no part
            of the device is reserved or requested.
        load: The utilization, from 0 to 1, or None if unknown.
        temperature: The temperature, as text.
        power: The power draw, as text.
        who: The first line about holders and processes.
        more: The remaining lines about them, shown below the first line.
        is_instance: Whether the entry is a MIG instance, which is indented below its GPU.
        is_mine: Whether this process has reserved the device.
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
        """Return the utilization as text, such as `71 %`, or an empty string if it is unknown."""
        return "" if self.load is None else f"{self.load * 100:.0f} %"


class Layout(NamedTuple):
    """The content of a GPU table, from top to bottom.

    Attributes:
        head: The headline, and any other lines above the devices.
        entries: The entries for the devices.
        queue: A line for each waiter in the queue.
        foot: Hints and warnings below the devices.
        sections: More layouts to show below this one, one for each machine.
        sheets: Tables of numbers.
    """

    head: Sequence[Line]
    entries: Sequence[Entry] = ()
    queue: Sequence[Line] = ()
    foot: Sequence[Line] = ()
    sections: Sequence[Layout] = ()
    sheets: Sequence[Sheet] = ()


class View(NamedTuple):
    """Display options for the entries in a GPU table.

    Attributes:
        now: The time of the snapshot, in seconds since the epoch.
        this_process: The phrase for this process, such as `this kernel`.
        is_all: Whether to show similar free GPUs as separate entries.
        user: The user who reads the table, whose own waiters are called `your train.ipynb`.
    """

    now: float
    this_process: str = ""
    is_all: bool = False
    user: str | None = None


def entries(rows: Sequence[DeviceStatus], view: View) -> list[Entry]:
    """Return an entry for each device and for each GPU that is split by MIG.

    A split GPU's entry comes before the entries for its instances. On a machine with many GPUs,
    similar free GPUs share an entry.
    """
    single = _entries(rows, view)
    if _shared_name(rows):
        single = [entry._replace(name="") for entry in single]
    if view.is_all or len(single) <= FOLDED_FROM:
        return single
    folded: list[Entry] = []
    for _, similar in groupby(single, key=_fold_key):
        group = list(similar)
        folded += [_folded(group)] if len(group) >= LEAST_ALIKE else group
    return folded


def common_model(rows: Sequence[DeviceStatus], before: str = "  ") -> Line:
    """Return `8 x A100-SXM4-80GB` for the headline if all readable devices are the same model."""
    name, count = _shared_name(rows), sum(isinstance(row.device, Device) for row in rows)
    rest = f" and {len(rows) - count} that can't be read" if count < len(rows) else ""
    return ((f"{before}{count} x {name}{rest}", FAINT),) if name else ()


def _shared_name(rows: Sequence[DeviceStatus]) -> str:
    """Return the model name that all devices share.

    The name is empty for different models, MIG instances or a single device.
    """
    devices = [row.device for row in rows if isinstance(row.device, Device)]
    device_names = {device.name for device in devices}
    is_split = any(device.instance is not None for device in devices)
    is_shared = len(devices) > 1 and len(device_names) == 1 and not is_split
    return _name(device_names.pop()) if is_shared else ""


def _fold_key(entry: Entry) -> tuple[object, ...]:
    """Return a key by which to group similar free GPUs. All other entries get unique keys."""
    is_quiet = entry.state is State.FREE and not (entry.who or entry.is_instance or entry.load)
    return (is_quiet, entry.name, entry.memory) if is_quiet else (entry.number,)


def _folded(group: Sequence[Entry]) -> Entry:
    number = f"{group[0].number}-{group[-1].number}"
    return group[0]._replace(number=number, temperature="", power="")


def _entries(rows: Sequence[DeviceStatus], view: View) -> list[Entry]:
    result: list[Entry] = []
    split: set[int] = set()
    for row in rows:
        index = row.device.index
        if row.device.instance is not None and index not in split:
            split.add(index)
            parts = (each.device for each in rows if each.device.index == index)
            model = next((names.model(part) for part in parts if isinstance(part, Device)), None)
            result.append(Entry(str(index), _name(model), memory="split by MIG"))
        result.append(_entry(row, view))
    return result


def is_awaited(row: DeviceStatus) -> bool:
    """Return whether the device is free but must first be offered to waiters."""
    return row.state in (State.FREE, State.AWAITED) and row.awaited_by is not None


def free(rows: Sequence[DeviceStatus]) -> list[DeviceStatus]:
    """Return the devices that are available now."""
    return [row for row in rows if row.state is State.FREE and not is_awaited(row)]


def state(row: DeviceStatus, now: float) -> State:
    """Return the state to display.

    This is `AWAITED` if waiters come first, `KEPT` while the holders' kernels are restarting, and
    otherwise the row's own state.
    """
    if is_awaited(row):
        return State.AWAITED
    return State.KEPT if is_kept(row, now) else row.state


def is_kept(row: DeviceStatus, now: float) -> bool:
    """Return whether all holders of the device are kernels that are restarting."""
    are_kept = [holder.is_kept(now) for holder in row.holders]
    return row.state is State.RESERVED and bool(are_kept) and all(are_kept)


def idle_s(row: DeviceStatus, now: float) -> float | None:
    """Return how many seconds a reserved device has been idle, or None if unknown.

    The time is measured from the end of the holder's last cell, or from the start of the
    reservation if no cell has ended since then. It is unknown if several holders share the device.
    """
    holders = [holder for holder in row.holders if not holder.beside]
    if not row.is_unused or len(holders) != 1:
        return None
    since = holders[0].last_cell or holders[0].since
    return None if since is None else durations.time_since(since, now)


def is_in_parts(row: DeviceStatus) -> bool:
    """Return whether the device is partly reserved, or has no room for the requested part."""
    has_parts = any(holder.memory_limit_mib is not None for holder in row.holders)
    return row.promisable_mib is not None and (has_parts or row.state is State.FULL)


def _entry(row: DeviceStatus, view: View) -> Entry:
    device = row.device
    is_instance = device.instance is not None
    name, total_mib = None, None
    if isinstance(device, Device):
        name, total_mib = device.name, device.memory_mib
        if name and is_instance:  # the GPU's entry names the model, so keep only the profile
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
    """Return the fraction of a device's memory that is in use or reserved.

    Return None if no part of the device is reserved or requested.
    """
    device = row.device
    if not isinstance(device, Device) or not device.memory_mib or not is_in_parts(row):
        return None
    available_mib = (row.promisable_mib or 0.0) + (device.reserve_mib or 0)
    return min(1.0, max(0.0, 1 - available_mib / device.memory_mib))


def _name(name: str | None) -> str:
    """Return a sanitized model name without the vendor, such as `A100-SXM4-80GB`."""
    return sanitize((name or "").removeprefix("NVIDIA "), NAME_LIMIT)


def _memory(used_mib: float | None, total_mib: int | None) -> str:
    """Return used and total memory, such as `10.2 of 80.0 GiB`. An unknown number is `?`."""
    if used_mib is None and total_mib is None:
        return ""
    used, total = ("?" if m is None else f"{m / 1024:.1f}" for m in (used_mib, total_mib))
    return f"{used} of {total} GiB"


def _lines(row: DeviceStatus, view: View) -> list[Line]:
    """Return the lines about a device: its holders, other processes, and remarks."""
    lines = [_holder(row, holder, view) for holder in row.holders]
    if row.awaited_by and is_awaited(row):
        waiter = phrases.person_or_own_process(row.awaited_by, view.user)
        lines.append((("by ", FAINT), waiter, *phrases.note(row.awaited_by)))
    lines += _uses(row)
    if is_in_parts(row):
        lines.append((reasons.promisable(row),))
    mode = reasons.MODES.get(row.usage.mode or 0) if row.usage else None
    lines += [(text,) for text in (reasons.reason(row), mode) if text]
    drawing = [process for process in row.background if process.kind == GRAPHICS]
    graphics_mib = sum(process.memory_mib or 0 for process in drawing)
    if row.usage and graphics_mib > idle_limit_mib(row.usage):  # more than a desktop uses
        processes = phrases.users(_by_memory(drawing), has_kind=False)
        lines.append((("graphics: ", FAINT), processes))
    if processes := _without_memory(row):
        lines.append(((f"no memory: {processes}", FAINT),))
    return lines


def _without_memory(row: DeviceStatus) -> str:
    """Describe the processes that hold no memory of a device, except its holders' processes."""
    processes = (p for p in row.background if p.kind != GRAPHICS and not p.has_reserved)
    return phrases.users([process._replace(memory_mib=None) for process in processes])


def _holder(row: DeviceStatus, holder: Holder, view: View) -> Line:
    """Return the line about a holder.

    For example, `this kernel: alice, train.ipynb (pid 4321) for 2 h, idle for 1 h: a note`.
    """
    prefix: Line = ()
    if not isinstance(row.device, Device):  # only the holder's record identifies the device
        prefix = (f"reserved as {sanitize(holder.record.label or row.label)} by ",)
    idle: Line = ()
    seconds = idle_s(row, view.now)
    is_new = row.is_mine and (seconds is None or seconds < NEW_S)
    if row.is_unused and not is_new and not holder.is_kept(view.now):
        idle = ", ", (_idle(holder, seconds), MARK)
    this_process = view.this_process if row.is_mine and holder is row.holders[0] else ""
    return prefix + phrases.holder_line(holder, view.now, more=idle, this_process=this_process)


def _idle(holder: Holder, seconds: float | None) -> str:
    """Return `idle for 2 h`, `never used`, or just `idle` if the time is unknown."""
    if holder.since is None or seconds is None or seconds < durations.MINUTE_S:
        return durations.idle(seconds)
    if holder.last_cell is None:  # a script might have used the device earlier
        return "idle"
    return "never used" if holder.last_cell - holder.since < NEVER_S else durations.idle(seconds)


def _uses(row: DeviceStatus) -> list[Line]:
    """Return lines about the processes that no holder is known to have started.

    A holder's processes are left out, because the holder has its own line.
    """
    titles: dict[Line, list[Process]] = {}
    for process in _by_memory(row.processes):
        if process.has_reserved:
            continue
        label: Line = (("used by ", FAINT),)
        if process.left_by:
            name = sanitize(process.left_by, phrases.NOTEBOOK_LIMIT)
            label = ((f"left over from {name}: ", MARK),)
        elif not row.holders:
            label = (("no reservation: ", MARK),) if row.is_unreserved_use else label
        elif process.beside:
            name = sanitize(process.beside, phrases.NOTEBOOK_LIMIT)
            label = ((f"not joined to {name}: ", FAINT),)
        elif process.has_reserved is False:
            label = (("without a reservation: ", MARK),)
        titles.setdefault(label, []).append(process)
    return [(*label, phrases.users(group)) for label, group in titles.items()]


def _by_memory(processes: Sequence[Process]) -> list[Process]:
    return sorted(processes, key=lambda process: -(process.memory_mib or 0))
