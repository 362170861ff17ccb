"""Messages about the administrator's rules for a user, and about limits that were reached."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reserve_gpu.gpus import names
from reserve_gpu.model.devices import State
from reserve_gpu.model.errors import REASON_LIMIT
from reserve_gpu.model.untrusted import sanitize
from reserve_gpu.render import durations, phrases
from reserve_gpu.render.phrases import MARK, STRONG, Line, listed, named

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reserve_gpu.model.holders import DeviceStatus, Holder
    from reserve_gpu.model.requests import Rules


MESSAGE_LIMIT = 300  # characters


# -- in a status -----------------------------------------------------------------------------------


def head(rules: Rules | None) -> list[Line]:
    """Return the administrator's message, which is shown above the status."""
    return [((sanitize(rules.message, MESSAGE_LIMIT), MARK),)] if rules and rules.message else []


def foot(rules: Rules | None, rows: Sequence[DeviceStatus]) -> list[Line]:
    """Return the lines below the status: the user's rules, and errors in the rules file."""
    if rules is None:
        return []
    file = sanitize(rules.file, REASON_LIMIT)
    lines: list[Line] = []
    if limits := ", ".join(filter(None, _limits(rules))):
        lines.append(((f"Rules for {sanitize(rules.user)}", STRONG), f" ({file}): {limits}."))
    drained = [
        f"{file}, [devices]: drain: {sanitize(name)!r} matches no GPU here, or more than one."
        for name in unmatched(rules, rows)
    ]
    problems = [*rules.problems, *drained]
    return [*lines, *((("Warning: ", MARK), problem) for problem in problems)]


def unmatched(rules: Rules, rows: Sequence[DeviceStatus]) -> list[str]:
    """Return the names in the `drain` rule that match no GPU or more than one."""
    devices = [row.device for row in rows]
    return [
        name
        for name in rules.drained
        if len({d.index for d in devices if names.is_one_of(d, [name])}) != 1
    ]


def _limits(rules: Rules) -> list[str]:
    """Return the limits as text, such as `2 GPUs`, `1 d` and `idle 2 h`.

    The text for a limit that is not set is empty.
    """
    gpus = rules.gpus
    ends = rules.after_cuda is not None and not rules.after_cuda.value
    return [
        f"{gpus.value:.0f} GPU{'' if gpus.value == 1 else 's'}" if gpus else "",
        durations.duration(rules.time.value) if rules.time else "",
        f"idle {durations.duration(rules.idle.value)}" if rules.idle else "",
        "then the process is ended" if ends and (rules.time or rules.idle) else "",
    ]


# -- in a refusal ----------------------------------------------------------------------------------


def limited(rows: Sequence[DeviceStatus]) -> str:
    """Return the message about a limit that the user's reservations have reached.

    The message is empty if no limit has been reached.
    """
    for row in rows:
        if row.state is State.LIMITED and row.rule:
            held = list(map(_held, row.counted)) or ["no other GPU"]
            return f"Limit reached: {named(row.rule)}. You have {listed(held)}."
    return ""


def _held(holder: Holder) -> str:
    """Describe one of the user's reservations, such as `GPU0 in train.ipynb (pid 4321)`."""
    device = sanitize(holder.record.label or "a GPU")
    if holder.memory_limit_mib is not None:
        device = f"{phrases.gib(holder.memory_limit_mib)} of {device}"
    process = f" in {sanitize(holder.name, phrases.NOTEBOOK_LIMIT)}" if holder.name else ""
    return f"{device}{process}{f' (pid {holder.pid})' if holder.pid else ''}"
