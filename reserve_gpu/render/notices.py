"""Warnings about reservations, and errors that prevent them.

For most errors, a function returns the public exception. If an error's hints depend on the
frontend, the error has a class instead. An instance of the class is raised inside a `Failure`, and
its `error()` method later creates the public exception.
"""

import math
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from reserve_gpu.gpus.names import entries
from reserve_gpu.model import errors
from reserve_gpu.model.devices import Device, Fault, State, Unfit
from reserve_gpu.model.errors import REASON_LIMIT, shell_line
from reserve_gpu.model.holders import DeviceStatus, Holder
from reserve_gpu.model.progress import Refusal
from reserve_gpu.model.requests import Request, ReservationTerms, Rule, Size, Variables
from reserve_gpu.model.untrusted import sanitize
from reserve_gpu.render import durations, messages, phrases, reasons
from reserve_gpu.render.frontends import MAGIC, Frontend, for_this_process, typed_size
from reserve_gpu.render.messages import VARIABLE, pronoun
from reserve_gpu.render.phrases import NOTEBOOK_LIMIT, labels, listed, named
from reserve_gpu.system.forks import no_fork

PART_STAYS = "The enclosing `with` block asked for a larger part, which stays reserved."
ALREADY_RELEASED = "This reservation has been released. Make a new one."
LEASE_EXPIRED = "This reservation has passed its end time, so it can no longer be joined."
JUST_RELEASED = "This reservation has just been released. To see the current ones, run:"
CAPS_ARE_LATE = (
    "CUDA is already running: JAX, TensorFlow and CuPy keep the limit that they started with until "
    "you restart."
)
ANOTHER_THREAD_WAITS = (
    "Another thread of this process is waiting in the queue for a GPU. To get the same GPU, wait "
    "as well: wait=True."
)
NAMELESS = "without a name"
COUNT_AGAIN = (
    "Restart and reserve before PyTorch counts the GPUs, or make it count again:\n"
    "torch.cuda.device_count.cache_clear()"
)
FRAMEWORKS = {"torch": "PyTorch", "tensorflow": "TensorFlow"}

# Minimum, maximum and default of `retry_after_s`, in seconds. A program should retry when the first
# reservation is expected to end. Retrying more often gains nothing, and reservations might be
# extended.
SOONEST_S, LATEST_S, UNKNOWN_S = 5, 600, 60

# -- warnings --------------------------------------------------------------------------------------


def caution(row: DeviceStatus, request: Request) -> str:
    """Return the warning that a reserved device is faulty or in use by other processes."""
    if row.use_state is State.IDLE:
        return f"{row.label} can be used, but {reasons.cause(row)}"
    if size := request.terms.size:  # the part excludes memory that is in use now
        part = phrases.part(size)
        return (
            f"You have {part} of {row.label}, which other processes are using without a "
            f"reservation: {reasons.use(row)}. The memory that they are using now is not in your "
            "part, but they may use more"
        )
    return f"You asked for {row.label}: it is {reasons.use(row)}"


def private_directory(path: str, bind: str) -> str:
    """Return the warning that a container has its own lock directory.

    Args:
        path: The container's lock directory.
        bind: A clause that tells the user how to use the host's lock directory.
    """
    return (
        f"this container sees only the reservations made inside it (in {path}). To "
        f"share them with all users of this machine, {bind}."
    )


def unsigned(devices: Sequence[Device], directory: str, reason: str, *, is_part: bool) -> str:
    """Return the warning that devices are reserved but other users can't see the details.

    Args:
        devices: The reserved devices.
        directory: The lock directory, which is not writable.
        reason: The operating system's error message.
        is_part: Whether only part of a GPU is reserved. Other users' processes then treat the whole
            GPU as reserved.
    """
    text = (
        f"{labels(devices)} {phrases.be(len(devices))} reserved, but other users can't see the "
        f"reservation's end time, note or notebook: {directory} can't be written "
        f"({sanitize(reason, REASON_LIMIT)})."
    )
    counts = " Other users see the whole GPU as reserved." if is_part else ""
    return f"{text}{counts} Free some space there, or tell the administrator."


def unusable(device: Device, reason: str, *, is_late: bool) -> str:
    """Return the warning that the driver currently can't use a held device.

    Args:
        device: The device.
        reason: The driver's error message.
        is_late: Whether CUDA has started.
    """
    run = "restart the kernel and run" if is_late else "run"
    return (
        f"This kernel holds {device.label}, but the NVIDIA driver currently can't use it: "
        f"{sanitize(reason, REASON_LIMIT)}. Send the output of nvidia-smi to the administrator. "
        f"To get another GPU, {run}:\n%reserve_gpu --release\n%reserve_gpu"
    )


def lost_device(device: Device, reason: str, *, is_late: bool) -> str:
    """Return the warning that the driver has lost a held device.

    Args:
        device: The device.
        reason: The driver's error message.
        is_late: Whether CUDA has started.
    """
    text = f"{device.label} is lost: {sanitize(reason, REASON_LIMIT)}."
    if is_late:
        return f"{text} To reserve another GPU, restart the kernel and run:\n%reserve_gpu"
    return f"{text} It is no longer reserved for this kernel."


def renumbered(before: Device, now: Device, *, is_late: bool) -> str:
    """Return the warning that a held device's number has changed.

    Args:
        before: The device with the number that it had when it was reserved.
        now: The device with its current number.
        is_late: Whether CUDA has started on another device.
    """
    text = f"{before.label} is now {now.label}: the driver has renumbered the GPUs"
    if is_late:
        return f"{text}, and CUDA has started on another GPU here. Restart the kernel."
    return f"{text}. The variables are set for {now.label}."


def left_running(row: DeviceStatus) -> str:
    """Return the warning that processes from before a restart are still using a held device."""
    processes = row.processes
    pids = " ".join(str(process.pid) for process in processes if not process.zombie_of)
    noun, target = ("process", "it") if len(processes) == 1 else ("processes", "them")
    text = (
        f"{row.label} is still in use by your own {noun} from before the restart: "
        f"{phrases.users(processes)}."
    )
    if not pids or for_this_process(MAGIC).is_for_program:  # a program might kill the wrong process
        return text
    return f"{text} To free the memory, end {target}:\n{shell_line(f'kill {pids}')}"


def used_by_others(row: DeviceStatus) -> str:
    """Return the warning that other processes are using a held device."""
    use = reasons.use(row)
    return f"{row.label} is reserved for this kernel, but other processes are using it: {use}"


def devices_stay(devices: Sequence[Device], *, is_late: bool) -> str:
    """Return the warning that devices stay reserved after a request for fewer devices.

    Args:
        devices: The devices that stay reserved.
        is_late: Whether they stay reserved because CUDA has started, rather than because of an
            enclosing `with` block.
    """
    cause = "The enclosing `with` block asked for more"
    if is_late:
        cause = "CUDA has started in this kernel and keeps using the GPUs that it saw then"
    stay = "stays" if len(devices) == 1 else "stay"
    return f"{cause}, so {labels(devices)} {stay} reserved as well."


def changed(values: Variables, held: Sequence[Device], *, is_late: bool, is_restored: bool) -> str:
    """Return the warning that other code changed environment variables during a reservation.

    Args:
        values: The changed variables and their current values.
        held: The devices that this process holds.
        is_late: Whether CUDA has started on a different set of devices.
        is_restored: Whether the variables have been changed back.
    """
    changes = [
        f"{name} was unset" if value is None else f"{name} was set to {sanitize(value)!r}"
        for name, value in values.items()
    ]
    text, gpus = f"{listed(changes)} after the reservation", labels(held)
    if is_late:
        return f"{text}, so CUDA is not using exactly {gpus}: restart, and reserve again."
    if is_restored:
        return f"{text}; the variables are set for {gpus} again."
    undo = "Undo the change, or run the %reserve_gpu cell again, before CUDA starts."
    return f"{text} of {gpus}. {undo}"


def relocked(device: Device, path: str | None) -> str:
    """Return the warning that a lock was lost and has been acquired again.

    Args:
        device: The device.
        path: The lock file's path if the file was deleted or replaced, or None if other code in
            this process closed the lock file's descriptor.
    """
    label = device.label
    cause = f"Other code in this process closed the lock file of {label}"
    if path is not None:
        cause = f"The lock file of {label} ({path}) was deleted or replaced"
    return f"{cause}. {label} has been locked again, and is still reserved for this kernel."


def holder_released(devices: Sequence[Device], name: str | None) -> str:
    """Return the warning that the holder of a joined reservation has released its devices.

    Args:
        devices: The released devices.
        name: The name of the holder that released them.
    """
    it = pronoun(devices)
    return (
        f"{sanitize(name or 'The process', NOTEBOOK_LIMIT)} has released "
        f"{labels(devices)}, which this kernel had joined. Reserve {it} for this kernel, or "
        f"release {it}:\n%reserve_gpu\n%reserve_gpu --release"
    )


def shortened(rule: Rule, last: float) -> str:
    """Return the warning that a rule limits how long a reservation can be extended.

    Args:
        rule: The rule. Its time limit counts from the start of the reservation.
        last: The time at which the reservation ends, in seconds since the epoch.
    """
    until = durations.moment(last, time.time())
    return (
        f"The reservation lasts until {until}: {named(rule)} counts from the start of the "
        "reservation"
    )


def memory_limits_kept(names: Sequence[str]) -> str:
    """Return the warning that the user has already set variables that limit memory use."""
    keep = "keeps its value as the limit" if len(names) == 1 else "keep their values as the limits"
    return f"{listed(names)} {phrases.be(len(names))} already set, and {keep}."


def early_count(count: int) -> str:
    """Return the warning that PyTorch counted the GPUs before the reservation.

    Args:
        count: The number of GPUs that PyTorch counted.
    """
    return f"{cause_of_early_count(count)} in this process. {COUNT_AGAIN}"


def cause_of_early_count(count: int) -> str:
    """Return the beginning of a sentence about GPUs that PyTorch counted before the reservation."""
    noun = "GPU" if count == 1 else "GPUs"
    return f"PyTorch counted {count} {noun} before the reservation, and keeps that number"


def framework_limit_hint(framework: str, line: str) -> str:
    """Return the hint that a framework's memory limit must be set in Python.

    This is necessary for a framework that reads no memory limit from the environment.

    Args:
        framework: The name of the framework or its module.
        line: The line of Python that sets the limit.
    """
    framework = FRAMEWORKS.get(framework, framework)
    return f"To keep {framework} within your part, run this right after importing it:\n{line}"


def exceeded(device: Device, used_mib: float, request: Request, caps: Sequence[str]) -> str:
    """Return the warning that this process is using more device memory than it reserved.

    Args:
        device: The device.
        used_mib: The memory that this process is using, in MiB.
        request: The request that reserved part of the device.
        caps: The names of the environment variables that limit this process's memory use.
    """
    over = phrases.gib(used_mib - (request.terms.memory_limit_mib or 0.0))
    size = Size(math.ceil(used_mib / phrases.MIB_OF_GIB) * phrases.MIB_OF_GIB)
    more = Request(request.devices, terms=ReservationTerms(size))
    capped = ""
    if caps:
        capped = f" It is limited by {listed(caps)}, which not every program reads."
    return (
        f"This kernel is using {phrases.gib(used_mib)} of {device.label}, {over} more "
        f"than it has reserved: other users may run out of memory.{capped} Free some memory "
        f"(a restart frees all of it), or ask for more:\n{MAGIC.typed(more)}"
    )


# -- errors ----------------------------------------------------------------------------------------


def lost(device: Device, path: str | None, holders: Sequence[Holder]) -> errors.LockError:
    """Return the error for a lost lock that another process has acquired in the meantime.

    Args:
        device: The device.
        path: The lock file's path if the file was deleted or replaced, or None if other code in
            this process closed the lock file's descriptor.
        holders: The processes that now hold the device.
    """
    cause = f"Other code in this process closed the lock file of {device.label}"
    if path is not None:
        cause = f"The lock file of {device.label} ({path}) was deleted"
    return errors.LockError(
        f"{cause}, and the device is now {'; '.join(map(phrases.holder, holders))}. "
        "Nothing was changed. Talk to its owner, or restart this kernel."
    )


class TooLate(NamedTuple):
    """CUDA has already started, so this process can't switch to other devices.

    Attributes:
        held: The devices that this process keeps.
        seen: The devices that CUDA sees, or an empty sequence if they are unknown.
        can_reserve: Whether this process can still reserve the devices that CUDA sees.
    """

    held: Sequence[Device]
    seen: Sequence[Device] = ()
    can_reserve: bool = False

    def error(self, frontend: Frontend) -> errors.TooLateError:
        keeps, restart = "Nothing was reserved or changed.", "Restart"
        if self.held:
            keeps = f"This {frontend.place} keeps {labels(self.held)}."
        if self.seen:
            keeps += f" CUDA sees {labels(self.seen)} here"
            if self.can_reserve:
                these = "it" if len(self.seen) == 1 else "these"
                numbers = ",".join(device.number for device in self.seen)
                typed = frontend.typed(Request(devices=(numbers,)))
                keeps += f": {these} can still be reserved, with {typed}."
                restart = "For another GPU, restart"
            elif self.held:
                keeps += ", and nothing else can be reserved."
            else:
                keeps += ": a reservation can no longer limit it to some of them."
        return errors.TooLateError(
            f"Too late: CUDA has already started in this {frontend.place}, and it reads "
            f"CUDA_VISIBLE_DEVICES only when it starts. {keeps} {restart} the {frontend.place} and "
            f"run {frontend.typed(messages.ANY)} before anything that uses a GPU."
        )


class ReservedAbove(NamedTuple):
    """An ancestor of this process has reserved every GPU that this process may use.

    Attributes:
        rows: The GPUs that this process may use.
        environ: This process's CUDA environment variables.
    """

    rows: Sequence[DeviceStatus]
    environ: Variables

    def error(self, frontend: Frontend) -> errors.ReservedAboveError:
        held = [row for row in self.rows if row.holders]
        head = f"The process that started this one has already reserved {labels(held)} for both:"
        lines = [
            f"  {row.label}: {'; '.join(map(phrases.holder, row.holders)) or reasons.reason(row)}"
            for row in self.rows
        ]
        command = frontend.program or "reserve()"
        hint = f"The variables are already set, so leave out {command} here."
        text = "\n".join([head, *lines, hint, *messages.variables(self.environ)])
        return errors.ReservedAboveError(text, self.rows)


class Refused(Refusal):
    """The request was refused because no device is available."""

    def error(self, frontend: Frontend) -> errors.NoFreeDeviceError:
        kind = errors.NoFreeDeviceError if self.waited_s is None else errors.WaitTimeoutError
        return kind(lambda: self._draw(frontend), self.rows, lambda: self._to_dict(frontend))

    def _draw(self, frontend: Frontend) -> "errors.Showable | str":
        """Return the table of the devices, or only text if its modules can't be loaded."""
        try:
            with no_fork:
                from reserve_gpu.render import pictures  # only needed if the refusal is displayed
        except (ImportError, OSError) as error:  # such as a removed package
            return f"No device is available. The devices can't be displayed: {error}"
        return pictures.refusal(self, frontend)

    def _to_dict(self, frontend: Frontend) -> dict[str, Any]:
        """Return the refusal as JSON data, in the format described in docs/formats.md.

        A program might run the suggested commands immediately. So no command ends a process or
        releases a reservation, and none reserves a device that is in use.
        """
        with no_fork:
            from reserve_gpu.render import contacts, pictures, status_view

        # Processes that were started together might be ranks that wait for each other. But they
        # might also be independent runs, and a run's device becomes free when the run ends. So a
        # program is told to wait even if only such processes hold the devices.
        now, waits = time.time(), pictures.can_wait(self._replace(siblings=()))
        first = contacts.first_end(self.rows, now)
        after_s = first["at"] - now if first else UNKNOWN_S
        if any(row.last_holder and row.last_holder.is_falling for row in self.rows):
            after_s = SOONEST_S
        status = status_view.Status(tuple(self.rows), tuple(self.ahead), time=now, user=self.user)
        fields = status.to_dict()
        return {
            **{name: fields[name] for name in ("time", "user", "devices")},
            "asks": messages.request_text(self.request),
            "first_free": first,
            "place": 1 + len(self.ahead) if waits else None,
            "retry_after_s": min(max(math.ceil(after_s), SOONEST_S), LATEST_S) if waits else None,
            "next": pictures.next_lines(self, frontend, waits=waits)[:2],
        }


def impossible(
    request: Request, rows: Sequence[DeviceStatus], limit: str | None
) -> errors.ImpossibleError:
    """Return the error for a request that this machine can never satisfy.

    Args:
        request: The request.
        rows: All devices that this process may use.
        limit: The inherited CUDA_VISIBLE_DEVICES, or None if the variable was not set.
    """
    limited = "" if limit is None else f" {messages.limit_line(limit, len(rows))}"
    return errors.ImpossibleError(f"{_cause_of_impossible(request, rows)}.{limited}")


def _cause_of_impossible(request: Request, rows: Sequence[DeviceStatus]) -> str:
    if request.needed > len(rows):
        noun = "device" if any(row.device.instance is not None for row in rows) else "GPU"
        count = f"is 1 {noun}" if len(rows) == 1 else f"are {len(rows)} {noun}s"
        return f"There {count} here; you asked for {request.needed}"
    lost = [row.device for row in rows if isinstance(row.device, Fault)]
    known = [row for row in rows if isinstance(row.device, Device)]
    fitting = messages.fit(known)
    instances = [row for row in fitting if row.device.instance is not None]
    by_unfit = ([row for row in known if row.unfit is unfit] for unfit in Unfit)
    groups = [group for group in by_unfit if group]
    causes = [_unfit(request, group, len(known)) for group in groups]
    of = "Of 1 GPU" if len(rows) == 1 else f"Of {len(rows)} GPUs"
    explains_all = ([Unfit.MEMORY], [Unfit.PART], [Unfit.MODEL])
    if fitting or [group[0].unfit for group in groups] not in explains_all:
        text = messages.request_text(request._replace(devices=()))
        of = f"{text.replace('a GPU', '1 GPU', 1)} can't be reserved here. {of}"
        be = phrases.be(len(fitting) or 1)
        causes.insert(0, f"{labels(fitting) if fitting else 'none'} {be} suitable")
    if 0 < len(instances) < len(fitting):
        causes.append("CUDA gives a process whole GPUs or MIG instances, not both")
    causes += [
        f"{fault.label} can't be read: {sanitize(fault.reason, REASON_LIMIT)}" for fault in lost
    ]
    return f"{of}, {'; '.join(causes)}"


def _unfit(request: Request, group: Sequence[DeviceStatus], total: int) -> str:
    """Explain why a group of devices can't match the request.

    The explanation is a clause that follows `Of 8 GPUs`.

    Args:
        request: The request.
        group: Devices that can't match the request for the same reason.
        total: The total number of devices.
    """
    devices = [row.device for row in group if isinstance(row.device, Device)]
    is_all, unfit = len(group) == total, group[0].unfit
    if unfit in (Unfit.MEMORY, Unfit.PART):
        required = Size(request.min_memory_mib or 0.0, request.memory_unit)
        most_mib = max(device.memory_mib or 0 for device in devices)
        if unfit is Unfit.PART:
            required = request.terms.size or required
            most_mib = max(device.usable_mib or 0 for device in devices)
        largest = phrases.room(most_mib)
        if is_all:
            return f"none has {_as_typed(required)}; the largest has {largest}"
        return f"{labels(group)} {'has' if len(group) == 1 else 'have at most'} {largest}"
    if unfit is Unfit.MODEL:
        models = Counter(sanitize(device.name or NAMELESS) for device in devices)
        short = {name.removeprefix("NVIDIA "): count for name, count in models.items()}
        if is_all:
            models_here = listed([f"{count} {name}" for name, count in short.items()])
            text = f"none has {sanitize(request.model)!r} in its name"
            return f"{text}; there {phrases.be(len(group))} {models_here}"
        model_names = [name for name in short if name != NAMELESS]
        described = [f"called {listed(model_names)}"] if model_names else []
        described += [NAMELESS] if NAMELESS in short else []
        return f"{labels(group)} {phrases.be(len(group))} {listed(described)}"
    return "; ".join(f"{row.label} {reasons.reason(row)}" for row in group)


def _as_typed(asked: Size) -> str:
    """Format a requested size as it was typed, and in GiB if it was typed in another unit."""
    gib = phrases.gib(asked.mib)
    return gib if asked.unit == "GiB" else f"{typed_size(asked.mib, asked.unit)} ({gib})"


class HidesAll(NamedTuple):
    """The inherited CUDA_VISIBLE_DEVICES hides every device from this process.

    Attributes:
        request: The request.
        limit: The value of CUDA_VISIBLE_DEVICES.
        total: The number of GPUs that the driver reports.
        kept: The devices that this process keeps.
    """

    request: Request
    limit: str
    total: int
    kept: Sequence[Device] = ()

    def error(self, frontend: Frontend) -> errors.NoVisibleDeviceError:
        limit = f"{VARIABLE}={sanitize(self.limit)!r}"
        keeps = "Nothing was reserved or changed."
        if self.kept:
            keeps = messages.left_with(self.kept, frontend)
        return errors.NoVisibleDeviceError(
            f"{limit} hides every GPU{self._cause()}. The variable was set outside reserve_gpu. "
            f"{keeps} {self._hint(frontend)}"
        )

    def _hint(self, frontend: Frontend) -> str:
        """Return instructions for unsetting CUDA_VISIBLE_DEVICES.

        A program gets no instructions, because a user might have limited the program on purpose.
        """
        if frontend.is_for_program:
            return "Trying again won't help. Ask the person who set it to unset it."
        again = frontend.typed(self.request)
        if frontend.place:
            line = f'import os; os.environ.pop("{VARIABLE}", None)'
            before = "" if frontend.program else " before CUDA starts"
            return f"To use a GPU, unset it{before}, and run {again} again:\n{line}"
        line = f"env -u {VARIABLE} {again}"
        return f"To use a GPU, unset it, or leave it out for this command:\n{line}"

    def _cause(self) -> str:
        """Return a clause that explains why this CUDA_VISIBLE_DEVICES hides every GPU.

        CUDA ignores the first entry that matches no GPU, and all entries after it.
        """
        if messages.hides_on_purpose(self.limit):
            return ""
        listed_entries = entries(self.limit)
        if not listed_entries:
            return ", because CUDA does not recognize this value"
        first, *rest = listed_entries
        if first < self.total if isinstance(first, int) else first in rest:
            return ", because it names a GPU twice"
        gpus = "only GPU0" if self.total == 1 else f"GPU0 to GPU{self.total - 1}"
        # A string might be the prefix of several UUIDs.
        matches = "no GPU" if isinstance(first, int) else "no single GPU"
        return f", because its first entry matches {matches} here. This machine has {gpus}"


def has_joined(devices: Sequence[Device], name: str | None) -> errors.RequestError:
    """Return the error for a kernel that has joined a reservation but requests other devices.

    Args:
        devices: The devices of the joined reservation.
        name: The holder's name.
    """
    holder = sanitize(name or "another process", NOTEBOOK_LIMIT)
    return errors.RequestError(
        f"This kernel has joined {holder} on {labels(devices)}. To reserve other GPUs, "
        f"release {pronoun(devices)} first:\n%reserve_gpu --release"
    )


def holds_already(devices: Sequence[Device]) -> errors.RequestError:
    """Return the error for a kernel that holds devices but tries to join a reservation."""
    return errors.RequestError(
        f"This kernel holds {labels(devices)}. Release {pronoun(devices)} first:\n"
        "%reserve_gpu --release"
    )


def too_many(rule: Rule, request: Request) -> errors.ImpossibleError:
    """Return the error for requesting more GPUs than a rule allows."""
    count = request.needed
    return errors.ImpossibleError(
        f"You asked for {count} GPU{'' if count == 1 else 's'}. The limit is {named(rule)}."
    )


def too_long(rule: Rule, asked_s: float) -> errors.RequestError:
    """Return the error for requesting a longer reservation than a rule allows."""
    limit = durations.duration(rule.value)
    return errors.RequestError(
        f"You asked for {durations.duration(asked_s)}. The limit is {named(rule)}. "
        f"Ask for {limit} or less; {limit} is also the default."
    )


def ends_anyway(rule: Rule) -> errors.RequestError:
    """Return the error for using `if_wanted` when a rule limits every reservation's duration."""
    return errors.RequestError(
        f"The limit {named(rule)} ends a reservation even if no other process is waiting. "
        "Leave out if_wanted (--if-wanted)."
    )


def cannot_extend(rule: Rule, last: float) -> errors.RequestError:
    """Return the error for extending a reservation that has reached a rule's time limit.

    Args:
        rule: The rule. Its time limit counts from the start of the reservation.
        last: The time at which the limit was reached, in seconds since the epoch.
    """
    return errors.RequestError(
        f"The reservation can't be extended: {named(rule)} counts from the start of the "
        f"reservation, and was reached at {durations.moment(last, time.time())}. Release it, and "
        "reserve again."
    )
