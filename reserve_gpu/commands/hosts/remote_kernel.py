"""Find a machine with a free GPU for a kernel, and keep the GPU reserved until the kernel starts.

`find` reads the status of all hosts, then runs `reserve-gpu kernel hold` on one host after another
until one of them reserves a GPU. `kernel hold` reports the reservation as a line of JSON, then
hands the reservation over to the new kernel, in the same way as when a kernel restarts. The GPU
stays locked throughout, so no other user can take it before the kernel starts.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from reserve_gpu import request_options
from reserve_gpu.allocation import policy
from reserve_gpu.allocation.request import Deadline
from reserve_gpu.commands.hosts import hosts_view
from reserve_gpu.commands.hosts import remote_status as hosts
from reserve_gpu.model import errors
from reserve_gpu.model.devices import Device, State
from reserve_gpu.model.untrusted import sanitize
from reserve_gpu.render import layout, messages
from reserve_gpu.render import status_view as statuses
from reserve_gpu.system import executor
from reserve_gpu.system.subprocesses import Program, wait_for_output

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from reserve_gpu.model.holders import DeviceStatus
    from reserve_gpu.model.requests import Request


HOLD_COMMAND = ("reserve-gpu", "kernel", "hold")
KEEP, KEPT = b"keep\n", b'"kept": true'
PLAIN_PATH = re.compile(r"[A-Za-z0-9/._+-]+")  # a path that needs no quoting in any shell
SLOW_LIMIT_S = 15.0  # seconds to wait for slow hosts when no other host can provide a GPU
HOLD_LIMIT_S = 15.0  # seconds to wait for a reservation attempt that does not join the queue
HAS_LIMIT_S = 20.0  # seconds to wait for a started kernel to take its GPU
CHECK_EVERY_S = 0.3  # seconds between checks


class NoHostError(errors.ReserveGPUError):
    """No host can fulfill the request. The message gives each reason on its own line."""

    exit_code = 75  # EX_TEMPFAIL


def find(
    names: Sequence[str],
    wishes: Sequence[str],
    kernel: Sequence[str],
    failed: Mapping[str, str],
    lack: Callable[[str], str],
) -> tuple[str, str]:
    """Reserve GPUs for a kernel on one of several hosts, and keep them until the kernel starts.

    Args:
        names: The host names.
        wishes: The request's command-line options.
        kernel: The options that identify the kernel to `reserve-gpu kernel hold`.
        failed: The hosts to skip, with the reason for each.
        lack: A function that returns why a kernel can't start on a host, or an empty string if it
            can.

    Returns:
        The host's name, and the path on that host of the Python that starts the kernel.

    Raises:
        NoHostError: No host could reserve the GPUs.
    """
    request, wait = request_options.to_request(request_options.request_of(wishes))
    at_once = [
        *kernel,
        *(word for word in wishes if not word.startswith(request_options.WAIT.flag)),
    ]
    reasons = {**failed}
    remaining = [name for name in names if name not in failed]
    # Hosts that sent no status are tried again with a longer timeout, unless the request can wait
    # in a queue.
    for limit_s in (hosts.LIMIT_S,) if wait is not None else (hosts.LIMIT_S, SLOW_LIMIT_S):
        seen = hosts.read_status(remaining, limit_s)
        silent = {name: each for name, each in seen.answers.items() if isinstance(each, str)}
        lacking = {each.host: lack(each.host) for each in seen.machines}
        ready = [each for each in seen.machines if not lacking[each.host]]
        reasons |= silent
        reasons |= {each.host: lacking[each.host] or _mismatch(each) for each in seen.machines}
        fitting = [each for each in ready if fits(each, request)]
        for each in sorted(fitting, key=_free, reverse=True):
            if place := _first_to_reserve([each.host], at_once, HOLD_LIMIT_S, reasons):
                return place
        remaining = [*silent]
    if wait is not None and ready:
        limit_s = Deadline.after(wait).left_s + HOLD_LIMIT_S
        ready_names = [each.host for each in ready]
        if place := _first_to_reserve(ready_names, [*kernel, *wishes], limit_s, reasons):
            return place
    raise NoHostError(_no_host(request, names, reasons))


def fits(status: statuses.Status, request: Request) -> bool:
    """Return whether a host might be able to fulfill the request.

    The status might be outdated, so the host's locks decide later whether the request succeeds.
    """
    if request.devices:
        return True
    return sum(_fits(row, request) for row in status.rows) >= request.needed


def _fits(row: DeviceStatus, request: Request) -> bool:
    if not isinstance(row.device, Device) or row.awaited_by or policy.unfit(row.device, request):
        return False
    if row.state is State.FREE:
        return True
    is_shared = row.state is State.RESERVED and request.terms.memory_limit_mib is not None
    return is_shared and (row.promisable_mib or 0.0) >= (
        request.on([row.device]).terms.memory_limit_mib or 0.0
    )


def has_gpu(name: str, pid: int) -> bool:
    """Wait for a process on a host to take a GPU, and return whether it did."""

    def has_now() -> bool:
        rows = [row for each in hosts.read_status([name]).machines for row in each.rows]
        return any(each.confirmed and each.pid == pid for row in rows for each in row.holders)

    return executor.wait_for(has_now, HAS_LIMIT_S, CHECK_EVERY_S)


def _free(status: statuses.Status) -> int:
    return len(layout.free(status.rows))


def _mismatch(status: statuses.Status) -> str:
    """Return why a host does not meet the request, based on its status."""
    free = statuses.free(status)
    return f"{free.rstrip('.')}, but that does not meet the request" if _free(status) else free


def _first_to_reserve(
    names: Sequence[str], arguments: Sequence[str], limit_s: float, reasons: dict[str, str]
) -> tuple[str, str] | None:
    """Run `kernel hold` on all given hosts, and keep the first successful reservation.

    Args:
        names: The host names.
        arguments: The arguments for `kernel hold`.
        limit_s: The timeout in seconds.
        reasons: A mapping to which the reason for each failed reservation is added, by host name.

    Returns:
        The host's name and the path of its Python; None if no host could reserve the GPUs.
    """
    reasons |= {name: hosts_view.silent(name, limit_s) for name in names}
    with hosts.running_on(names, [*HOLD_COMMAND, *arguments]) as programs:
        for name in wait_for_output(programs, limit_s, lambda out: bool(hosts.fields_in(out))):
            fields, text = hosts.fields_in(programs[name].output[0]), ""
            if "gpus" in fields:
                python = str(fields.get("python"))
                if not PLAIN_PATH.fullmatch(python):
                    text = f"sshpyk can't use the path of that host's Python, {python!r}"
                elif _keeps(programs[name]):
                    return name, python
                else:
                    text = "it did not keep the GPU that it had reserved"
            text = text or fields.get("refused") or hosts.problem(name, programs[name])
            reasons[name] = sanitize(str(text), errors.REASON_LIMIT)
    return None


def _keeps(program: Program) -> bool:
    """Tell `kernel hold` to keep the GPUs for the kernel, and return whether it confirms."""
    try:
        program.feed(KEEP)
    except OSError:  # the connection was lost
        return False
    return any(KEPT in program.output[0] for _ in wait_for_output({"": program}, HOLD_LIMIT_S))


def _no_host(request: Request, names: Iterable[str], reasons: Mapping[str, str]) -> str:
    """Return the error message for a kernel that no host can start.

    Each reason has its own line, because JupyterLab does not wrap lines.
    """
    hosts_of: dict[str, list[str]] = {}
    for name in names:
        hosts_of.setdefault(reasons[name].rstrip("."), []).append(name)
    lines = (f"{', '.join(some)}: {reason}." for reason, some in hosts_of.items())
    first = f"No kernel was started because no host could provide {messages.request_text(request)}."
    return "\n".join([first, *lines])
