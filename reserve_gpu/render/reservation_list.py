"""Messages about a user's reservations on this machine, and about releasing them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from reserve_gpu.gpus import names
from reserve_gpu.model import errors
from reserve_gpu.model.holders import Answer, DeviceStatus, Reserved
from reserve_gpu.render import durations, layout, phrases
from reserve_gpu.render.phrases import MARK, Line, labels

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reserve_gpu.render.frontends import Frontend


NONE = "You hold no GPU on this machine."
SIMPLE = r"[A-Za-z_][\w.-]*"  # a name that needs no quotes in a shell


def missing_separator() -> str:
    """Return the error message for a `join` command that lacks `--`."""
    line = errors.command_line("join [WHICH] -- COMMAND ...")
    return f"Put -- before the command, as in: {line}"


def name(reserved: Reserved, every: Sequence[Reserved]) -> str:
    """Return the shortest unambiguous name of a reservation: its notebook, its pid, or a GPU.

    Args:
        reserved: The reservation.
        every: All of the user's reservations.
    """
    holder = reserved.holder
    notebook, pid = holder.notebook or "", str(holder.pid)
    same_name = [each for each in every if each.holder.notebook == notebook]
    if re.fullmatch(SIMPLE, notebook, re.ASCII) and len(same_name) == 1:
        return notebook
    # In a container, a pid can be so low that it equals the number of a GPU.
    is_gpu = any(names.matching(pid, [row.device]) for each in every for row in each.rows)
    return reserved.rows[0].label if is_gpu else pid


def idle(reserved: Reserved, now: float) -> Line:
    """Return `, idle for 2 h` if all of a reservation's devices are idle, or else an empty line."""
    if reserved.holder.is_kept(now) or not all(row.is_unused for row in reserved.rows):
        return ()
    known = [layout.idle_s(row, now) for row in reserved.rows]
    seconds = None if None in known else min(known, key=lambda each: each or 0.0)
    return ", ", (durations.idle(seconds), MARK)


def line(reserved: Reserved, now: float) -> str:
    """Describe a reservation in one line.

    For example, `GPU0 and GPU1  alice, train.ipynb (pid 4321) for 3 h, idle for 2 h: "thesis"`.
    """
    about = phrases.holder_line(reserved.holder, now, more=idle(reserved, now))
    return f"{labels(reserved.rows)}  {phrases.plain(about)}"


def ambiguous(every: Sequence[Reserved], command: str, now: float) -> str:
    """Return the message that asks which of several reservations the user means.

    Args:
        every: All of the user's reservations.
        command: The command to type before a reservation's name.
        now: The current time, in seconds since the epoch.
    """
    lines = [f"{command} {name(each, every)}\n  {line(each, now)}" for each in every]
    return "\n".join([f"There are {len(every)} reservations. Which one do you mean?", *lines])


def no_match(
    word: str, every: Sequence[Reserved], command: str, now: float, *, are_own: bool = True
) -> str:
    """Return the error message for a name that matches none of the reservations.

    Args:
        word: The name that the user typed.
        every: All reservations that the command can select.
        command: The command that the user typed before the name.
        now: The current time, in seconds since the epoch.
        are_own: Whether all reservations are this user's. Root can also release those of others.
    """
    host, colon, remote_name = word.partition(":")
    if colon and not names.is_name(word) and not command.startswith("%"):
        _, _, verb = command.rpartition(" ")
        typed = errors.command_line(f"{verb} {remote_name}", f"ssh -t {host} ")
        return f"'{word}' is not on this machine. Run: {typed}"
    if not every:
        return NONE
    hint = " Did you mean --all?" if word == "all" and command.endswith(" release") else ""
    head = f"You don't hold '{word}'.{hint} You hold:"
    if not are_own:
        head = f"No reservation matches '{word}'.{hint} There are:"
    return "\n".join([head, *(line(each, now) for each in every)])


def still_in_use(done: Sequence[Reserved], rows: Sequence[DeviceStatus]) -> list[str]:
    """Return a line for each released device that is still in use.

    Args:
        done: The released reservations.
        rows: The status of all devices after the release.
    """
    labels_ = {row.label for each in done for row in each.rows}
    lines = []
    for row in rows:
        people = [phrases.name_of(holder) for holder in row.holders]
        uses = [phrases.users([process]) for process in row.processes if not process.has_reserved]
        if row.label in labels_ and (people or uses):
            lines.append(f"{row.label} is still in use: {phrases.listed([*people, *uses])}.")
    return lines


def released(
    reserved: Reserved, answer: Answer, every: Sequence[Reserved], frontend: Frontend
) -> str:
    """Return the message about the outcome of asking a process to release its devices or exit.

    Args:
        reserved: The process's reservation.
        answer: The outcome of the request.
        every: All of the user's reservations.
        frontend: The frontend that shows the message. A program gets no commands.
    """
    process, devices = phrases.name_of(reserved.holder), labels(reserved.rows)
    typed = f"{errors.program_command()} release"
    end = f"To end {process}:\n{typed} {name(reserved, every)} --end"
    by_pid = f"To release it by its pid:\n{typed} {reserved.holder.pid}"
    if frontend.is_for_program:
        by_pid = end = "Leave that to the user who started it."
    return {
        Answer.RELEASED: f"Released {devices} of {process}.",
        Answer.CUDA: f"CUDA is running in {process}: {devices} will be free when it ends. {end}",
        Answer.CHILD: f"A process that {process} started is using {devices}. {end}",
        Answer.PROGRAM: f"{process} can't release {devices} on request, only by ending. {end}",
        Answer.SILENT: f"{process} does not respond: it is suspended, or it hangs. {end}",
        Answer.ANOTHER: f"{process} did not confirm that it is the one that you chose. Nothing was "
        f"released. {by_pid}",
        Answer.GONE: f"{process} no longer holds {devices}.",
        Answer.ENDED: f"Ended {process}, which held {devices}.",
        Answer.STAYS: f"{process} can't be ended from here; it still holds {devices}.",
    }[answer]


def signal_warning(reserved: Reserved, why: Answer, kill_after_s: float) -> str:
    """Return the warning that a process will be terminated with signals.

    Signals are needed if the process can't be asked to exit or does not respond.

    Args:
        reserved: The process's reservation.
        why: The outcome of the request to exit.
        kill_after_s: The time between SIGTERM and SIGKILL, in seconds.
    """
    cause = "does not respond" if why is Answer.SILENT else "can't be asked to end"
    return (
        f"{phrases.name_of(reserved.holder)} {cause}: it gets SIGTERM now and SIGKILL "
        f"{kill_after_s:g} s later, and its before_end() functions are not called."
    )
