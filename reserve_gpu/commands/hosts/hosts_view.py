"""Several machines in one picture: what is free where, a section for each, who did not answer."""

from __future__ import annotations

import time
from shlex import quote
from typing import TYPE_CHECKING, Any, NamedTuple

from reserve_gpu.model.errors import REASON_LIMIT, own_line, shell_line
from reserve_gpu.model.untrusted import sanitize
from reserve_gpu.render import contacts, layout, phrases, status_view
from reserve_gpu.render import rule_text as ruled
from reserve_gpu.render.frontends import COMMAND, SHELL, read_here
from reserve_gpu.render.layout import Layout, View
from reserve_gpu.render.phrases import FAINT, MARK, STRONG, TYPED, Line
from reserve_gpu.render.pictures import Picture
from reserve_gpu.system import procfs

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from reserve_gpu.render.status_view import Status

VERSION = 1  # of the JSON; names are only ever added to it
SSH_FAILED = 255  # ssh(1), "EXIT STATUS"
NOT_FOUND = (126, 127)  # of a shell


class Hosts(NamedTuple):
    """The state of several machines at one moment.

    answers: how each host stands; where it has not said, why not, in a line.
    time: in seconds since the epoch. typed: the words behind --hosts.
    is_all: each device has a line, also those that are alike.
    """

    answers: Mapping[str, Status | str]
    time: float = 0.0
    typed: tuple[str, ...] = ()
    is_all: bool = False

    def picture(self) -> Picture:
        """Return what it looks like: what is free, and a section for each host."""
        sections = [
            Layout([((name, STRONG), ": ", (each, MARK))])
            if isinstance(each, str)
            else _section(name, each._replace(is_all=self.is_all))
            for name, each in self.answers.items()
        ]
        head = [*_head(self)]
        return Picture(Layout(head, sections=sections), phrases.plain(head[0]))

    def to_dict(self) -> dict[str, Any]:
        """Return what programs read, in the shape that docs/formats.md describes."""
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
        """Return their common name."""
        return ", ".join(self.answers)

    @property
    def machines(self) -> tuple[Status, ...]:
        """Return the status of each machine that answers, by the name that ssh has for it.

        These names differ; what the machines call themselves may not.
        """
        seen = self.answers.items()
        return tuple(each._replace(host=name) for name, each in seen if not isinstance(each, str))


def _head(hosts: Hosts) -> Iterator[Line]:
    """Yield what is free, when that was, and what to type."""
    available = {each.host: layout.free(each.rows) for each in hosts.machines}
    places = [f"{name} {phrases.ranges(those)}" for name, those in available.items() if those]
    count = sum(map(len, available.values()))
    total = sum(len(each.rows) for each in hosts.machines)
    when = (time.strftime("  %Y-%m-%d %H:%M", time.localtime(hosts.time)), FAINT)
    if not total:
        text = "No GPU found." if available else "No machine answered."
        yield (text, STRONG), when
        return
    what = f"{total} GPU{'' if total == 1 else 's'}"
    kernel = own_line(" ".join(["kernel install --hosts", *map(quote, hosts.typed)]))
    if count:
        yield (f"{count} of {what} {phrases.be(count)} free: {', '.join(places)}.", STRONG), when
        first = next(name for name, those in available.items() if those)
        there = "" if procfs.is_here(first) else f"ssh -t {first} "
        yield "Get one: ", (own_line(f"run -- {COMMAND}", there), TYPED)
    else:
        yield (f"None of {what} is free.", STRONG), when
    which, more = ("for notebooks that gets", "") if count else ("that waits for", " --wait 45s")
    yield f"A kernel {which} one: ", (f"{kernel}{more}", TYPED)


def _section(name: str, seen: Status) -> Layout:
    """Return the picture of one host: as its own status, without what is to be typed there."""
    own = sanitize(seen.host)
    is_same = own.partition(".")[0] == name.rpartition("@")[2].partition(".")[0]
    head: Line = (
        (name, STRONG),
        ("" if is_same else f" ({own})", FAINT),
        ": ",
        (status_view.free(seen), STRONG),
        *layout.common_model(seen.rows),
    )
    message = ruled.head(seen.rules)
    foot = [*status_view.missing(seen)]
    mine = contacts.yourself(seen.rows, seen.time, seen.user, read_here(SHELL), f"ssh {name} ")
    entries = layout.entries(seen.rows, View(seen.time, is_all=seen.is_all))
    return Layout([head, *message], entries, status_view.queue(seen), [*mine, *foot])


# -- why a host has not answered, and what to do ---------------------------------------------------


def silent(name: str, limit_s: float) -> str:
    """Say that a host has not answered in time."""
    return f"no answer within {limit_s:.0f} s. Try: {shell_line(f'ssh {name}')}"


def failed(name: str, code: int | None, out: str, err: str, command: str) -> str:
    """Say that ssh failed, that there is no reserve_gpu, or what that one has said.

    out, err: what was said there on stdout and on stderr.
    """
    reason, ssh = _last(err), shell_line(f"ssh {name}")
    if code == SSH_FAILED and "permission denied" in err.lower():
        return f"ssh is not let in: {reason}. Type: {shell_line(f'ssh-copy-id {name}')}"
    if code == SSH_FAILED:
        return f"ssh can't reach it: {reason or 'it does not say why'}. Try: {ssh}"
    if code in NOT_FOUND:
        return (
            "ssh finds no reserve-gpu there. Install it, or link it into the PATH that ssh has "
            f"there, which this shows: {ssh} 'echo $PATH'"
        )
    return _last(f"{out}\n{err}") or f"its reserve-gpu fails. Try: {ssh} reserve-gpu {command}"


def another_format(name: str, version: int | None, text: str, command: str) -> str:
    """Say that a host's answer is not of the version that is read here."""
    if version is None:
        answer = _last(text) or "it is empty"
        ssh = shell_line(f"ssh {name}")
        return f"its answer is no {command}: {answer}. Try: {ssh} reserve-gpu {command}"
    older, where = ("older", f"on {name}") if version < status_view.VERSION else ("newer", "here")
    return f"its reserve_gpu is {older} than this one (format {version}). Update it {where}."


def _last(text: str) -> str:
    """Return the last line of what somebody else has said, fit to print."""
    lines = [line for line in map(str.strip, text.splitlines()) if line]
    return sanitize(lines[-1], REASON_LIMIT).removeprefix("ssh: ").rstrip(".") if lines else ""
