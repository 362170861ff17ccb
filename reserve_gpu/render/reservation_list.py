"""What a user has on this machine: a line for each reservation, and what came of asking for it."""

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
SIMPLE = r"[A-Za-z_][\w.-]*"  # a name that a shell takes as it is


def without_sign() -> str:
    """Say where the command of `join` begins."""
    line = errors.own_line("join [WHICH] -- COMMAND ...")
    return f"Put -- before the command, as in: {line}"


def name(reserved: Reserved, every: Sequence[Reserved]) -> str:
    """Return the word that names a reservation: its notebook, its pid, or a GPU.

    every: All reservations, with the names that elsewhere.identified() gives them.
    """
    holder = reserved.holder
    notebook, pid = holder.notebook or "", str(holder.pid)
    alike = [each for each in every if each.holder.notebook == notebook]
    if re.fullmatch(SIMPLE, notebook, re.ASCII) and len(alike) == 1:
        return notebook
    # In a container a pid can equal the number of a GPU.
    is_gpu = any(names.matching(pid, [row.device]) for each in every for row in each.rows)
    return reserved.rows[0].label if is_gpu else pid


def idle(reserved: Reserved, now: float) -> Line:
    """Return `, idle for 2 h` where none of its devices is in use, empty else."""
    if reserved.holder.is_kept(now) or not all(row.is_unused for row in reserved.rows):
        return ()
    known = [layout.idle_s(row, now) for row in reserved.rows]
    seconds = None if None in known else min(known, key=lambda each: each or 0.0)
    return ", ", (durations.idle(seconds), MARK)


def line(reserved: Reserved, now: float) -> str:
    """Return `GPU0 and GPU1  alice, train.ipynb (pid 4321) for 3 h, idle for 2 h: "thesis"`."""
    about = phrases.holder_line(reserved.holder, now, more=idle(reserved, now))
    return f"{labels(reserved.rows)}  {phrases.plain(about)}"


def which(every: Sequence[Reserved], command: str, now: float) -> str:
    """Ask which of several reservations is meant. command: what stands before its name."""
    lines = [f"{command} {name(each, every)}\n  {line(each, now)}" for each in every]
    return "\n".join([f"There are {len(every)} reservations. Which one?", *lines])


def no_such(word: str, every: Sequence[Reserved], command: str, now: float) -> str:
    """Say that no reservation goes by that name, and which there are. command: what was typed."""
    host, colon, there_named = word.partition(":")
    if colon and not names.is_name(word) and not command.startswith("%"):
        _, _, verb = command.rpartition(" ")
        typed = errors.own_line(f"{verb} {there_named}", f"ssh -t {host} ")
        return f"{word} is none of this machine. Type: {typed}"
    there = [line(each, now) for each in every]
    return "\n".join(
        [f"You hold no GPU by the name {word}. There are:", *there] if there else [NONE]
    )


def still_there(done: Sequence[Reserved], rows: Sequence[DeviceStatus]) -> list[str]:
    """Say of each device that was released who still has it, or is on it."""
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
    """Say what came of asking a process to release what it holds, or to end."""
    who, what = phrases.name_of(reserved.holder), labels(reserved.rows)
    typed = f"{errors.own_command()} release"
    end = f"To end {who}:\n{typed} {name(reserved, every)} --end"
    anyway = f"To release it by its pid:\n{typed} {reserved.holder.pid}"
    if frontend.is_for_program:
        anyway = end = "Leave it to whoever has started it."
    return {
        Answer.RELEASED: f"Released {what} of {who}.",
        Answer.CUDA: f"CUDA runs in {who}: only its end frees {what}. {end}",
        Answer.CHILD: f"A process that {who} has started uses {what}. {end}",
        Answer.PROGRAM: f"{who} can't be asked: only its end frees {what}. {end}",
        Answer.SILENT: f"{who} does not answer: it is stopped, or hangs. {end}",
        Answer.ANOTHER: f"{who} did not confirm your choice. Nothing was released. {anyway}",
        Answer.GONE: f"{who} holds {what} no more.",
        Answer.ENDED: f"Ended {who}; it had {what}.",
        Answer.STAYS: f"{who} can't be ended from here; it has {what}.",
    }[answer]


def unasked(reserved: Reserved, why: Answer, kill_after_s: float) -> str:
    """Say before a process gets a signal that it was not asked to end. why: its answer."""
    how = "does not answer" if why is Answer.SILENT else "can't be asked to end"
    return (
        f"{phrases.name_of(reserved.holder)} {how}: it gets SIGTERM now and SIGKILL "
        f"{kill_after_s:g} s later, and its before_end() functions are not called."
    )
