"""A kernel on a machine where a GPU is free: find the machine, and keep the GPU until it starts.

Here the hosts are asked how they stand, and then one after the other to reserve (`find`). There
`reserve-gpu kernel hold` reserves, says so in a line of JSON, and leaves what it has to the kernel
that comes, as a kernel leaves it to its next one over a restart. So it is each machine's own locks
that decide, and nobody can come between.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from reserve_gpu import request_options
from reserve_gpu.allocation import policy, request
from reserve_gpu.commands.hosts import hosts_view as said
from reserve_gpu.commands.hosts import remote_status as hosts
from reserve_gpu.model import errors
from reserve_gpu.model.devices import Device, State
from reserve_gpu.model.untrusted import sanitize
from reserve_gpu.render import layout, messages
from reserve_gpu.render import status_view as statuses
from reserve_gpu.system import executor
from reserve_gpu.system.subprocesses import Program, heard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from reserve_gpu.model.holders import DeviceStatus
    from reserve_gpu.model.requests import Request


ASKED = ("reserve-gpu", "kernel", "hold")
KEEP, KEPT = b"keep\n", b'"kept": true'
PLAIN_PATH = re.compile(r"[A-Za-z0-9/._+-]+")  # which no shell splits or changes
SLOW_LIMIT_S = 15.0  # for a host to say how it stands, where no other one has a GPU
HOLD_LIMIT_S = 15.0  # for a host to reserve at once
HAS_LIMIT_S = 20.0  # for the kernel to have it, once it has started
LOOK_EVERY_S = 0.3


class NoHostError(errors.ReserveGPUError):
    """No host has what was asked for; the text says why not, in a line for each."""

    exit_code = 75  # EX_TEMPFAIL


def find(
    among: Sequence[str],
    wishes: Sequence[str],
    kernel: Sequence[str],
    failed: Mapping[str, str],
    lack: Callable[[str], str],
) -> tuple[str, str]:
    """Have a host reserve for a kernel, and keep it until the kernel starts. Raises NoHostError.

    Returns the host, and the Python there that is to start the kernel.

    among: the hosts. wishes: options of a request. kernel: options of `kernel hold`.
    failed: hosts that are asked no more, and why. lack: tells what keeps a kernel from starting on
    a host that answers; empty if nothing.
    """
    asked, wait = request_options.to_request(request_options.request_of(wishes))
    at_once = [
        *kernel,
        *(word for word in wishes if not word.startswith(request_options.WAIT.flag)),
    ]
    why = {**failed}
    rest = [name for name in among if name not in failed]
    # Who has not said how it stands is asked once more. For one who waits that takes too long.
    for limit_s in (hosts.LIMIT_S,) if wait is not None else (hosts.LIMIT_S, SLOW_LIMIT_S):
        seen = hosts.look(rest, limit_s)
        silent = {name: each for name, each in seen.answers.items() if isinstance(each, str)}
        lacking = {each.host: lack(each.host) for each in seen.machines}
        ready = [each for each in seen.machines if not lacking[each.host]]
        why |= silent
        why |= {each.host: lacking[each.host] or _at_first_sight(each) for each in seen.machines}
        fitting = [each for each in ready if fits(each, asked)]
        for each in sorted(fitting, key=_free, reverse=True):
            if place := _first_to_reserve([each.host], at_once, HOLD_LIMIT_S, why):
                return place
        rest = [*silent]
    if wait is not None and ready:
        limit_s = request.Deadline.after(wait).left_s + HOLD_LIMIT_S
        those = [each.host for each in ready]
        if place := _first_to_reserve(those, [*kernel, *wishes], limit_s, why):
            return place
    raise NoHostError(_none(asked, among, why))


def fits(seen: statuses.Status, asked: Request) -> bool:
    """Tell whether a host seems to have what is asked for; only its own locks can say for sure."""
    if asked.devices:
        return True
    return sum(_fits(row, asked) for row in seen.rows) >= asked.needed


def _fits(row: DeviceStatus, asked: Request) -> bool:
    if not isinstance(row.device, Device) or row.awaited_by or policy.unfit(row.device, asked):
        return False
    if row.state is State.FREE:
        return True
    is_shared = row.state is State.RESERVED and asked.terms.memory_limit_mib is not None
    return is_shared and (row.promisable_mib or 0.0) >= (
        asked.on([row.device]).terms.memory_limit_mib or 0.0
    )


def has_gpu(name: str, pid: int) -> bool:
    """Tell whether a process on a host has come to hold a GPU there."""

    def has_now() -> bool:
        rows = [row for each in hosts.look([name]).machines for row in each.rows]
        return any(each.confirmed and each.pid == pid for row in rows for each in row.holders)

    return executor.wait_for(has_now, HAS_LIMIT_S, LOOK_EVERY_S)


def _free(seen: statuses.Status) -> int:
    return len(layout.free(seen.rows))


def _at_first_sight(seen: statuses.Status) -> str:
    """Return why a host is not asked to reserve, by how it stands; it may be asked to wait."""
    free = statuses.free(seen)
    return f"{free.rstrip('.')}, which is not what is asked for" if _free(seen) else free


def _first_to_reserve(
    those: Sequence[str], arguments: Sequence[str], limit_s: float, why: dict[str, str]
) -> tuple[str, str] | None:
    """Have hosts reserve, and keep what the first of them gets; the others release theirs.

    Returns that host, and its Python. why: gets the reason of each host that has got nothing.
    """
    why |= {name: said.silent(name, limit_s) for name in those}
    with hosts.asked(those, [*ASKED, *arguments]) as asked:
        for name in heard(asked, limit_s, lambda out: bool(hosts.fields_in(out))):
            fields, text = hosts.fields_in(asked[name].said[0]), ""
            if "gpus" in fields:
                python = str(fields.get("python"))
                if not PLAIN_PATH.fullmatch(python):
                    text = f"sshpyk can't start its Python, {python!r}"
                elif _keeps(asked[name]):
                    return name, python
                else:
                    text = "it has not kept the GPU that it had reserved"
            text = text or fields.get("refused") or hosts.problem(name, asked[name])
            why[name] = sanitize(str(text), errors.REASON_LIMIT)
    return None


def _keeps(program: Program) -> bool:
    """Have a host leave what it has reserved to the kernel that comes; tells whether it has."""
    try:
        program.feed(KEEP)
    except OSError:  # the connection has broken
        return False
    return any(KEPT in program.said[0] for _ in heard({"": program}, HOLD_LIMIT_S))


def _none(asked: Request, among: Iterable[str], why: Mapping[str, str]) -> str:
    """Return why no kernel was started: a line for each reason, as JupyterLab breaks none."""
    hosts_of: dict[str, list[str]] = {}
    for name in among:
        hosts_of.setdefault(why[name].rstrip("."), []).append(name)
    reasons = (f"{', '.join(names_)}: {reason}." for reason, names_ in hosts_of.items())
    first = f"No kernel was started, as no host gave it {messages.asked(asked)}."
    return "\n".join([first, *reasons])
