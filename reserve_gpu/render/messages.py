"""The sentences about a reservation: that there is one, or why not, and what to do next.

Values in, text out. What is said of one device is in `words.py`.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from functools import singledispatch
from typing import TYPE_CHECKING

from reserve_gpu.gpus.names import entries, gpu_index
from reserve_gpu.model import notices
from reserve_gpu.model.devices import Device, Fault, State, Unfit
from reserve_gpu.model.errors import REASON_LIMIT, sanitize, shell_line
from reserve_gpu.model.requests import Lease, Request, ReservationTerms, Size
from reserve_gpu.render import durations, phrases, reasons
from reserve_gpu.render.frontends import MAGIC, Frontend, read_here
from reserve_gpu.render.phrases import labels, listed, named

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from reserve_gpu.model.holders import DeviceStatus
    from reserve_gpu.model.progress import Slow
    from reserve_gpu.model.requests import Variables

VARIABLE = "CUDA_VISIBLE_DEVICES"
NO_DEVICES = ("-1", "NoDevFiles")  # as CUDA_VISIBLE_DEVICES, what hides all of them
ANY = Request()  # a GPU, whichever
TELL_ADMINISTRATOR = "Send the administrator the output of nvidia-smi."
FRAMEWORKS = {"torch": "PyTorch", "tensorflow": "TensorFlow"}


@singledispatch
def say(notice: notices.Notice | notices.Reason) -> str:
    """Return what a person reads."""
    return str(notice)


def said(notices: Iterable[notices.Notice]) -> list[str]:
    """Return the sentences of the notices that have one."""
    return list(filter(None, map(say, notices)))


# -- what was done ---------------------------------------------------------------------------------


def variables(environ: Variables) -> list[str]:
    """Return a line for each variable that is set: `CUDA_VISIBLE_DEVICES = '2'`."""
    return [f"{name} = {value!r}" for name, value in sorted(environ.items()) if value is not None]


def command_ends(lease: Lease, now: float) -> str:
    """Say when a command will be ended."""
    until = lease.until or now
    if lease.is_jobs:
        return f"The job ends at {durations.moment(until, now)}, and the command with it."
    return (
        f"The command gets SIGTERM at {durations.moment(until, now)}, and SIGKILL a minute later."
    )


def released(devices: Sequence[Device], environ: Variables, *, started: bool) -> str:
    """Return what a release prints.

    started: CUDA runs in this process, so its memory on the devices stays in use.
    """
    lines = [f"Released {labels(devices)}." if devices else "This kernel holds no GPU."]
    if started and devices:
        lines.append("CUDA still runs in this kernel: restart it to free the GPU's memory as well.")
    lines += [
        f"{name} is not set" if value is None else f"{name} = {value!r}"
        for name, value in sorted(environ.items())
    ]
    return "\n".join(lines)


def left_with(kept: Sequence[Device], frontend: Frontend) -> str:
    """Say what this process has left after nothing was reserved. kept: what stays reserved."""
    if kept:
        return f"{frontend.here.capitalize()} keeps {labels(kept)}; nothing was changed."
    return f"No GPU is visible to this {frontend.sight}." if frontend.sight else ""


def going_on(held: Sequence[Device], visible: str | None = None) -> str:
    """Say how a kernel goes on that got no GPU, or not the one that it asked for.

    visible: the CUDA_VISIBLE_DEVICES that it goes on with.
    """
    if held:
        return f"Going on with {labels(held)}, as before."
    if visible:
        return f"Going on with CUDA_VISIBLE_DEVICES = {sanitize(visible)!r}, as before."
    return "Going on without a GPU."


# -- why there is no reservation -------------------------------------------------------------------


@say.register
def impossible(reason: notices.Impossible) -> str:
    """Return why no state of this machine could satisfy the request."""
    request, rows, limit = reason
    more = "" if limit is None else f" {limit_line(limit, len(rows))}"
    if request.needed > len(rows):
        what = "device" if any(row.device.instance is not None for row in rows) else "GPU"
        here = f"is 1 {what}" if len(rows) == 1 else f"are {len(rows)} {what}s"
        return f"There {here} here; you asked for {request.needed}.{more}"
    lost = [row.device for row in rows if isinstance(row.device, Fault)]
    known = [row for row in rows if isinstance(row.device, Device)]
    fitting = fit(known)
    instances = [row for row in fitting if row.device.instance is not None]
    by_unfit = ([row for row in known if row.unfit is unfit] for unfit in Unfit)
    groups = [group for group in by_unfit if group]
    against = [_unfit(request, group, len(known)) for group in groups]
    of = "Of 1 GPU" if len(rows) == 1 else f"Of {len(rows)} GPUs"
    says_all = [group[0].unfit for group in groups] in ([Unfit.MEMORY], [Unfit.PART], [Unfit.MODEL])
    if fitting or not says_all:
        what = asked(request._replace(devices=()))
        of = f"{what.replace('a GPU', '1 GPU', 1)} can't be had here. {of}"
        against.insert(0, f"{labels(fitting) if fitting else 'none'} will do")
    if 0 < len(instances) < len(fitting):
        against.append("CUDA gives a process whole GPUs or MIG instances, not both")
    against += [
        f"{fault.label} can't be read: {sanitize(fault.reason, REASON_LIMIT)}" for fault in lost
    ]
    return f"{of} {'; '.join(against)}.{more}"


def _unfit(request: Request, group: Sequence[DeviceStatus], total: int) -> str:
    """Return why these devices will never do, to follow `Of 8 GPUs`. total: of all devices."""
    devices = [row.device for row in group if isinstance(row.device, Device)]
    is_all, unfit = len(group) == total, group[0].unfit
    if unfit in (Unfit.MEMORY, Unfit.PART):
        wanted_mib = request.min_memory_mib or 0.0
        most_mib = max(device.memory_mib or 0 for device in devices)
        if unfit is Unfit.PART:
            wanted_mib = request.memory_limit_mib or 0.0
            most_mib = max(device.usable_mib or 0 for device in devices)
        largest = phrases.room(most_mib)
        if is_all:
            return f"none has {phrases.gib(wanted_mib)}; the largest has {largest}"
        return f"{labels(group)} {'has' if len(group) == 1 else 'have at most'} {largest}"
    if unfit is Unfit.MODEL:
        models = Counter(sanitize(device.name or "without a name") for device in devices)
        short = {name.removeprefix("NVIDIA "): count for name, count in models.items()}
        if is_all:
            models_here = listed([f"{count} {name}" for name, count in short.items()])
            wanted = f"none has {sanitize(request.model)!r} in its name"
            return f"{wanted}; there {phrases.be(len(group))} {models_here}"
        return f"{labels(group)} {phrases.be(len(group))} called {listed([*short])}"
    return "; ".join(f"{row.label} {reasons.reason(row)}" for row in group)


def above(reason: notices.ReservedAbove, frontend: Frontend) -> str:
    """Say that a process above this one has reserved every GPU that this one may use."""
    rows, environ = reason
    held = [row for row in rows if row.holders]
    head = (
        f"{labels(held)} {phrases.be(len(held))} reserved already, by a process that has started "
        "this one, and so for this one too:"
    )
    about = ("; ".join(map(phrases.holder, row.holders)) or reasons.reason(row) for row in rows)
    lines = [f"  {row.label}: {text}" for row, text in zip(rows, about, strict=True)]
    way_out = f"The variables are set already: leave out {frontend.program or 'reserve()'} here."
    return "\n".join([head, *lines, way_out, *variables(environ)])


def hides_all(reason: notices.HidesAll, frontend: Frontend) -> str:
    """Say that CUDA_VISIBLE_DEVICES hides every GPU, why, and how to take that limit away.

    A program is not told to lift the limit: a person may have set it for that program on purpose.
    """
    limit = f"{VARIABLE}={sanitize(reason.limit)!r}"
    why = _why_it_hides(reason.limit, reason.total)
    text = f"{limit} hides every GPU{why}. It was set outside of reserve_gpu. "
    text += left_with(reason.kept, frontend) if reason.kept else "Nothing was reserved or changed."
    if frontend.is_for_program:
        return f"{text} Trying again does not help. Ask the person who set it to unset it."
    again = frontend.typed(reason.request)
    if frontend.place:
        line = f'import os; os.environ.pop("{VARIABLE}", None)'
        before = "" if frontend.program else " before CUDA starts"
        return f"{text} To use a GPU, unset it{before}, and run {again} again:\n{line}"
    line = f"env -u {VARIABLE} {again}"
    return f"{text} To use a GPU, unset it, or leave it out for this command:\n{line}"


def _why_it_hides(limit: str, total: int) -> str:
    """Return the reason for which a CUDA_VISIBLE_DEVICES hides every GPU, as part of a sentence.

    Args:
        limit: The value. CUDA ignores what follows the first entry that means no GPU.
        total: The number of GPUs that are here.
    """
    if hides_on_purpose(limit):
        return ""
    named_in_it = entries(limit)
    if not named_in_it:
        return ", because CUDA knows no such value"
    first, *more = named_in_it
    if first < total if isinstance(first, int) else first in more:
        return ", because it names a GPU twice"
    there = "only GPU0" if total == 1 else f"GPU0 to GPU{total - 1}"
    what = "no GPU" if isinstance(first, int) else "no single GPU"  # it may be the start of several
    return f", because its first entry means {what} here. This machine has {there}"


def too_late(reason: notices.TooLate, frontend: Frontend) -> str:
    """Say why a process that has started CUDA can't get another GPU."""
    held, seen = reason
    keeps = "Nothing was reserved or changed."
    if held:
        keeps = f"This {frontend.place} keeps {labels(held)}."
    restart = "Restart"
    if seen:
        these = "it" if len(seen) == 1 else "these"
        keeps += f" CUDA sees {labels(seen)} here: {these} can still be reserved, with "
        numbers = ",".join(device.number for device in seen)
        keeps += f"{frontend.typed(Request(devices=(numbers,)))}."
        restart = "For another GPU, restart"
    return (
        f"Too late: CUDA has already started in this {frontend.place}, and it reads "
        f"CUDA_VISIBLE_DEVICES only when it starts. {keeps} {restart} the {frontend.place} and run "
        f"{frontend.typed(ANY)} before anything that uses a GPU."
    )


# -- warnings --------------------------------------------------------------------------------------


@say.register
def caution(notice: notices.Caution) -> str:
    """Say why the user of a reserved device should take care: others use it, or it has a fault."""
    row, request = notice
    if row.use_state is State.IDLE:
        return f"{row.label} can be used, but {reasons.cause(row)}"
    if size := request.terms.size:  # what others use is counted, but nothing stops its growth
        part = phrases.part(size)
        return (
            f"You have {part} of {row.label}, which others use without a reservation: "
            f"{reasons.use(row)}. What they use now is not in your part, but they may use more"
        )
    return f"You asked for {row.label}: it is {reasons.use(row)}"


@say.register
def unsigned(notice: notices.Unsigned) -> str:
    """Warn that others can't read the details of a reservation."""
    devices, directory, reason, is_part = notice
    text = (
        f"{labels(devices)} {phrases.be(len(devices))} reserved, but others can't read the end, "
        f"the note or the notebook: {directory} can't be written "
        f"({sanitize(reason, REASON_LIMIT)})."
    )
    counts = " Your part counts as the whole GPU for them." if is_part else ""
    return f"{text}{counts} Free some space there, or tell the administrator."


@say.register
def unusable(notice: notices.Unusable) -> str:
    """Tell the holder of a device that the driver can't use it now."""
    device, reason, is_late = notice
    run = "restart the kernel, then run" if is_late else "run"
    return (
        f"The NVIDIA driver can't use {device.label} now, which this kernel holds: "
        f"{sanitize(reason, REASON_LIMIT)}. To get another GPU, {run} %reserve_gpu --release and "
        f"then %reserve_gpu. {TELL_ADMINISTRATOR}"
    )


@say.register
def lost_device(notice: notices.LostDevice) -> str:
    """Tell the holder of a device that the driver has lost it."""
    device, reason, is_late = notice
    text = f"{device.label} is lost: {sanitize(reason, REASON_LIMIT)}."
    if is_late:
        return f"{text} Restart the kernel: %reserve_gpu then reserves another GPU."
    return f"{text} It is no longer reserved for this kernel."


@say.register
def renumbered(notice: notices.Renumbered) -> str:
    """Tell the holder of a device that its number has changed."""
    before, now, is_late = notice
    text = f"{before.label} is {now.label} now: the driver has renumbered the GPUs"
    if is_late:
        return f"{text}, and CUDA has started on another GPU here. Restart the kernel."
    return f"{text}. The variables are set for {now.label}."


@say.register
def holds_already(reason: notices.HoldsAlready) -> str:
    """Say why a process that holds something can't join another reservation."""
    held = reason.devices
    return f"This kernel holds {labels(held)}. Release {_them(held)} first: %reserve_gpu --release"


def joined(devices: Sequence[Device], name: str | None, environ: Mapping[str, str]) -> str:
    """Say what a guest has joined. name: the holder, in a word."""
    where = sanitize(name or "a process", phrases.NOTEBOOK_LIMIT)
    return "\n".join([f"Joined {where} on {labels(devices)}.", *variables(environ)])


@say.register
def is_guest(reason: notices.IsGuest) -> str:
    """Say why a guest can't have something else."""
    devices, name = reason
    where = sanitize(name or "another process", phrases.NOTEBOOK_LIMIT)
    return (
        f"This kernel has joined {where} on {labels(devices)}. To get something else, release "
        f"{_them(devices)} first: %reserve_gpu --release"
    )


@say.register
def left_alone(notice: notices.LeftAlone) -> str:
    """Tell a guest that the holder that it has joined has gone."""
    devices, name = notice
    what = _them(devices)
    return (
        f"{sanitize(name or 'The process', phrases.NOTEBOOK_LIMIT)} has released "
        f"{labels(devices)}, "
        f"which this kernel has joined. Reserve {what} with %reserve_gpu, or release {what} with "
        "%reserve_gpu --release."
    )


def kept(devices: Sequence[Device], until: float) -> str:
    """Say that devices are kept for this kernel, which has restarted and not asked for them yet."""
    at = time.strftime("%H:%M:%S", time.localtime(until))
    return (
        f"{labels(devices)} {phrases.be(len(devices))} kept for this kernel until {at}. "
        f"%reserve_gpu takes {_them(devices)} again."
    )


@say.register
def left_running(notice: notices.LeftRunning) -> str:
    """Tell a user which own processes, from before a restart, still use a held device."""
    row = notice.row
    pids = " ".join(str(process.pid) for process in row.processes if not process.zombie_of)
    processes, it = ("process", "it") if len(row.processes) == 1 else ("processes", "them")
    text = (
        f"{row.label} is still used by your own {processes} from before the restart: "
        f"{phrases.users(row.processes)}."
    )
    if not pids or read_here(MAGIC).is_for_program:  # a program might end what a person needs
        return text
    return f"{text} To free the memory, end {it}:\n{shell_line(f'kill {pids}')}"


@say.register
def used_by_others(notice: notices.UsedByOthers) -> str:
    """Warn that somebody else uses a device that this kernel holds."""
    use = reasons.use(notice.row)
    return f"{notice.row.label} is reserved for this kernel, but others use it: {use}"


@say.register
def stays(notice: notices.Stays) -> str:
    """Say why a smaller request leaves more reserved than it asks for."""
    devices, is_late = notice
    why = "The `with` block around this has asked for more"
    if is_late:
        why = "CUDA has started in this kernel and goes on using what it saw then"
    stay = "stays" if len(devices) == 1 else "stay"
    return f"{why}, so {labels(devices)} {stay} reserved as well."


@say.register
def changed(notice: notices.Changed) -> str:
    """Say that other code has changed variables during a reservation."""
    values, held, is_late, is_mended = notice
    ways = [
        f"{name} was unset" if value is None else f"{name} was set to {sanitize(value)!r}"
        for name, value in values.items()
    ]
    what, gpus = f"{listed(ways)} after the reservation", labels(held)
    if is_late:
        return f"{what}, and CUDA has not started on {gpus} alone: restart, and reserve again"
    if is_mended:
        return f"{what}; the variables are set for {gpus} again"
    return (
        f"{what} of {gpus}. Undo that, or run the cell with %reserve_gpu again, before CUDA starts"
    )


@say.register
def locked_anew(notice: notices.LockedAnew) -> str:
    """Say that a lock was lost and taken again, as nobody else had taken the device."""
    device, path = notice
    what = f"Other code in this process had closed the lock of {device.label}"
    if path is not None:
        what = f"Somebody deleted or replaced {path}, the lock of {device.label}"
    return f"{what}. It is locked anew, and {device.label} is still reserved for this kernel."


@say.register
def lost(reason: notices.Lost) -> str:
    """Say that a reservation was lost, and who has the device now."""
    device, path, holders = reason
    what = f"Other code in this process had closed the lock of {device.label}"
    if path is not None:
        what = f"Somebody deleted {path}, the lock of {device.label}"
    return (
        f"{what}, and the device is now {'; '.join(map(phrases.holder, holders))}. Nothing was "
        "changed: agree with them, or restart this kernel."
    )


@say.register
def private(notice: notices.Private) -> str:
    """Warn that this container has a lock directory of its own."""
    return (
        f"this container sees only the reservations made inside of it (in {notice.path}). To share "
        f"them with the whole machine, {notice.bind}."
    )


@say.register
def caps_stand(notice: notices.CapsStand) -> str:
    """Say that these variables, which the user has set, were left as they are."""
    (names,) = notice
    keep = "keeps its value" if len(names) == 1 else "keep their values"
    return f"{listed(names)} {phrases.be(len(names))} set already and {keep}, as the cap there."


@say.register
def to_type(notice: notices.ToType) -> str:
    """Return how the user can cap a framework that reads no variable."""
    framework = FRAMEWORKS.get(notice.framework, notice.framework)
    return f"To keep {framework} within the part, run this right after its import:\n{notice.line}"


@say.register
def exceeded(notice: notices.Exceeded) -> str:
    """Warn a process that uses more of a device than its part."""
    device, used_mib, request, caps = notice
    used, over = phrases.gib(used_mib), phrases.gib(used_mib - (request.memory_limit_mib or 0.0))
    size = Size(math.ceil(used_mib / phrases.MIB_OF_GIB) * phrases.MIB_OF_GIB)
    more = Request(request.devices, terms=ReservationTerms(size))
    capped = f" It is capped by {listed(caps)}, which not every program reads." if caps else ""
    return (
        f"This kernel uses {used} of {device.label}, {over} more than it has reserved: others "
        f"may run out of memory.{capped} Free memory (a restart frees all of it), or ask for "
        f"more:\n{MAGIC.typed(more)}"
    )


# -- limits of the administrator -------------------------------------------------------------------


@say.register
def too_many(reason: notices.TooMany) -> str:
    """Say that a rule never allows so many GPUs."""
    rule, request = reason
    count = request.needed
    return f"You asked for {count} GPU{'' if count == 1 else 's'}. The limit is {named(rule)}."


@say.register
def too_long(reason: notices.TooLong) -> str:
    """Say that a rule allows no reservation for so long."""
    rule, asked_s = reason
    most = durations.duration(rule.value)
    return (
        f"You asked for {durations.duration(asked_s)}. The limit is {named(rule)}. "
        f"Ask for {most} or less; {most} is also the default."
    )


@say.register
def ends_anyway(reason: notices.EndsAnyway) -> str:
    """Say that a rule ends the reservation, so that `if_wanted` can't hold."""
    return (
        f"The limit {named(reason.rule)} ends a reservation even if nobody waits for it. Leave out "
        "if_wanted (--if-wanted)."
    )


@say.register
def shortened(notice: notices.Shortened) -> str:
    """Say that a reservation can't be prolonged for as long as was asked."""
    until, rule = durations.moment(notice.last, time.time()), notice.rule
    return f"The reservation lasts until {until}: {named(rule)} counts from its start"


@say.register
def cannot_prolong(reason: notices.CannotProlong) -> str:
    """Say that a reservation can't be prolonged at all."""
    rule, last = reason
    return (
        f"The reservation can't be prolonged: {named(rule)} counts from its start, and was reached "
        f"at {durations.moment(last, time.time())}. Release it, and reserve again."
    )


# -- a wait ----------------------------------------------------------------------------------------


def asked(request: Request) -> str:
    """Return the request in words: `GPU0 and GPU1:0`, `2 GPUs of 16.0 GiB or more`."""
    what = "a GPU" if request.needed == 1 else f"{request.needed} GPUs"
    if request.devices:
        what = listed([_label(name) for name in request.devices])
    if request.min_memory_mib:
        what += f" of {phrases.gib(request.min_memory_mib)} or more"
    if request.model:
        what += f" with {sanitize(request.model)!r} in the name"
    if size := request.terms.size:
        of = "of each of" if request.needed > 1 else "of"
        return f"{phrases.part(size)} {of} {what}"
    return what


def slow(news: Slow) -> str:
    """Say what is waited for. A GPU that nobody uses can take 3 s to wake up."""
    what = f" ({news.what})" if news.what else ""
    return f"Waiting for the NVIDIA driver for {durations.duration(news.waited_s)}{what}."


def interrupted(held: Sequence[Device], frontend: Frontend) -> str:
    """Say what is left after a wait was interrupted."""
    if held:
        return f"Stopped waiting. {frontend.here.capitalize()} keeps {labels(held)}."
    return f"Stopped waiting; nothing is reserved. {left_with((), frontend)}".rstrip()


# -- parts of them ---------------------------------------------------------------------------------


def limit_line(limit: str, count: int) -> str:
    """Say how an inherited CUDA_VISIBLE_DEVICES limits this process. count: of its devices."""
    inside = "that one" if count == 1 else "those"
    return f"{VARIABLE}={sanitize(limit)!r} was set elsewhere: it limits this process to {inside}."


def hides_on_purpose(limit: str) -> bool:
    """Return whether this CUDA_VISIBLE_DEVICES is one of the usual values that hide every GPU."""
    return not limit.strip() or limit.strip() in NO_DEVICES


def fit(rows: Sequence[DeviceStatus]) -> list[DeviceStatus]:
    """Return those of the devices that would do."""
    return [row for row in rows if row.state is not State.UNFIT]


def _them(devices: Sequence[Device]) -> str:
    return "it" if len(devices) == 1 else "them"


def _label(name: str) -> str:
    """Return `GPU2` for the typed names `2` and `gpu2`, and other names as they are."""
    is_number = gpu_index(name) is not None
    return f"GPU{name.lower().removeprefix('gpu').removeprefix('cuda:')}" if is_number else name
