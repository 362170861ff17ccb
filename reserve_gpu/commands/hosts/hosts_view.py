"""Render the status of several machines, with a section for each machine."""

from __future__ import annotations

import time
from shlex import quote
from typing import TYPE_CHECKING, Any, NamedTuple

from reserve_gpu.model.errors import REASON_LIMIT, command_line, shell_line
from reserve_gpu.model.untrusted import sanitize
from reserve_gpu.render import contacts, layout, phrases, rule_text, status_view
from reserve_gpu.render.frontends import COMMAND, SHELL, for_this_process
from reserve_gpu.render.layout import Layout, View
from reserve_gpu.render.phrases import FAINT, MARK, STRONG, TYPED, Line
from reserve_gpu.render.pictures import Picture
from reserve_gpu.system import procfs

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from reserve_gpu.render.status_view import Status

VERSION = 1  # JSON format version; fields are added but never removed
SSH_FAILED = 255  # exit code when ssh itself fails; see "EXIT STATUS" in ssh(1)
NOT_FOUND = (126, 127)  # shell exit codes when a command can't be run or found


class Hosts(NamedTuple):
    """The state of several machines at one moment.

    Attributes:
        answers: A mapping from each host's name to its status, or to a one-line reason if the host
            sent none.
        time: The time when the status was read, in seconds since the epoch.
        typed: The values given to `--hosts`.
        is_all: Whether every device gets its own line. Otherwise, similar free devices share one.
    """

    answers: Mapping[str, Status | str]
    time: float = 0.0
    typed: tuple[str, ...] = ()
    is_all: bool = False

    def for_any_reader(self) -> Hosts:
        """Return a copy that does not call any user's processes "yours"."""
        answers = self.answers.items()
        return self._replace(
            answers={
                name: each if isinstance(each, str) else each.for_any_reader()
                for name, each in answers
            }
        )

    def picture(self) -> Picture:
        """Render a summary of the free GPUs, and a section for each host."""
        sections = [
            Layout([((name, STRONG), ": ", (each, MARK))])
            if isinstance(each, str)
            else _section(name, each._replace(is_all=self.is_all))
            for name, each in self.answers.items()
        ]
        head = [*_head(self)]
        return Picture(Layout(head, sections=sections), phrases.plain(head[0]))

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object that docs/formats.md describes."""
        return {
            "version": VERSION,
            "time": self.time,
            "hosts": [
                {
                    "name": name,
                    "problem": each if isinstance(each, str) else None,
                    "status": None if isinstance(each, str) else each.to_dict(),
                }
                for name, each in self.answers.items()
            ],
        }

    @property
    def host(self) -> str:
        """Return all host names, separated by commas."""
        return ", ".join(self.answers)

    @property
    def machines(self) -> tuple[Status, ...]:
        """Return the status of each machine that responded, with the host name given to ssh.

        The names given to ssh are unique, but the machines' own names might not be.
        """
        answers = self.answers.items()
        return tuple(
            each._replace(host=name) for name, each in answers if not isinstance(each, str)
        )


def _head(hosts: Hosts) -> Iterator[Line]:
    """Yield a summary of the free GPUs, followed by the time and commands that reserve a GPU."""
    available = {each.host: layout.free(each.rows) for each in hosts.machines}
    places = [f"{name} {phrases.ranges(free)}" for name, free in available.items() if free]
    count = sum(map(len, available.values()))
    total = sum(len(each.rows) for each in hosts.machines)
    when = (time.strftime("  %Y-%m-%d %H:%M", time.localtime(hosts.time)), FAINT)
    if not total:
        text = "No machine has a GPU." if available else "No machine answered."
        yield (text, STRONG), when
        return
    gpus = f"{total} GPU{'' if total == 1 else 's'}"
    kernel = command_line(" ".join(["kernel install --hosts", *map(quote, hosts.typed)]))
    if count:
        yield (f"{count} of {gpus} {phrases.be(count)} free: {', '.join(places)}.", STRONG), when
        first = next(name for name, free in available.items() if free)
        ssh = "" if procfs.is_local_host(first) else f"ssh -t {first} "
        yield "Get one: ", (command_line(f"run -- {COMMAND}", ssh), TYPED)
    else:
        yield (f"None of {gpus} is free.", STRONG), when
    verb, wait = ("gets", "") if count else ("waits for", " --wait 45s")
    yield f"Install a kernel that {verb} one: ", (f"{kernel}{wait}", TYPED)


def _section(name: str, status: Status) -> Layout:
    """Return a host's section, which is its status without the commands for local users."""
    own_name = sanitize(status.host)
    is_same = own_name.partition(".")[0] == name.rpartition("@")[2].partition(".")[0]
    head: Line = (
        (name, STRONG),
        ("" if is_same else f" ({own_name})", FAINT),
        ": ",
        (status_view.free(status), STRONG),
        *layout.common_model(status.rows),
    )
    message = rule_text.head(status.rules)
    foot = [*status_view.missing(status)]
    hints = contacts.own_reservations(
        status.rows, status.time, status.user, for_this_process(SHELL), f"ssh {name} "
    )
    view = View(status.time, is_all=status.is_all, user=status.user)
    entries = layout.entries(status.rows, view)
    return Layout([head, *message], entries, status_view.queue(status), [*hints, *foot])


# -- messages about hosts that sent no status ------------------------------------------------------


def silent(name: str, limit_s: float) -> str:
    """Return the message for a host that did not respond in time."""
    return f"no answer within {limit_s:.0f} s. Try: {shell_line(f'ssh {name}')}"


def failed(name: str, code: int | None, out: str, err: str, command: str) -> str:
    """Return the message for a host on which the command failed.

    Args:
        name: The host's name, as given to ssh.
        code: The exit code of ssh. If ssh connected, this is the command's own exit code.
        out: The command's stdout.
        err: The combined stderr of ssh and the command.
        command: The `reserve-gpu` subcommand.
    """
    reason, ssh = _last(err), shell_line(f"ssh {name}")
    if code == SSH_FAILED and "permission denied" in err.lower():
        return f"ssh access was denied: {reason}. Run: {shell_line(f'ssh-copy-id {name}')}"
    if code == SSH_FAILED:
        return f"ssh can't connect: {reason or 'it gives no reason'}. Try: {ssh}"
    if code in NOT_FOUND:
        return (
            "ssh can't find reserve-gpu there. Install it, or link it into one of the directories "
            f"that this command shows: {ssh} 'echo $PATH'"
        )
    return _last(f"{out}\n{err}") or f"reserve-gpu failed there. Try: {ssh} reserve-gpu {command}"


def another_format(name: str, version: int | None, text: str, command: str) -> str:
    """Return the message for a host whose reply has an unsupported format.

    Args:
        name: The host's name, as given to ssh.
        version: The version of the reply's format; None if the reply does not state a version.
        text: The command's output.
        command: The `reserve-gpu` subcommand.
    """
    if version is None:
        answer = _last(text) or "nothing"
        ssh = shell_line(f"ssh {name}")
        return f"expected a {command}, got: {answer}. Try: {ssh} reserve-gpu {command}"
    age, where = ("older", f"on {name}") if version < status_view.VERSION else ("newer", "here")
    return f"its reserve_gpu is {age} than this one (format {version}). Update it {where}."


def _last(text: str) -> str:
    """Return the sanitized last line of another machine's output."""
    lines = [line for line in map(str.strip, text.splitlines()) if line]
    return sanitize(lines[-1], REASON_LIMIT).removeprefix("ssh: ").rstrip(".") if lines else ""
