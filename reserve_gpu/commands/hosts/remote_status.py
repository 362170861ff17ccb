"""Other machines: which there are, and what each says of its GPUs.

    [hosts]
    lab = ["lab1", "lab2", "gpu[01-04]"]

in the administrator's file or in the user's own. Each is asked by ssh, as the user's configuration
of ssh has it, and each machine's own locks decide there. What a machine answers is foreign: it is
bounded in time and size, and `status_from_json` checks it.
"""

from __future__ import annotations

import json
import os
import re
import time
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from reserve_gpu import request_options
from reserve_gpu.allocation import admin_rules
from reserve_gpu.commands.hosts import hosts_view as said
from reserve_gpu.commands.hosts import status_from_json
from reserve_gpu.model import untrusted
from reserve_gpu.model.errors import RequestError
from reserve_gpu.model.option import Option
from reserve_gpu.model.untrusted import sanitize
from reserve_gpu.system import procfs, settings, spawn
from reserve_gpu.system.subprocesses import Program, heard, started

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

T = TypeVar("T")
SSHPYK = "'sshpyk>=1.25'"  # as a shell takes it
PROVISIONER = "reserve-gpu-hosts"  # as pyproject.toml has it
IDLE = "2h"  # after which a kernel there releases its GPU, if somebody waits for it
LIMIT_S = 5.0  # for a machine to answer
CHUNK = 1 << 16
MOST_STARTS = 20  # of lines that may begin the JSON
LONGEST = 200  # characters of a pattern
MOST_HOSTS = 256
LOOK = ("reserve-gpu", "status", "--format", "json")
# What ssh may be given as a name; one that begins with a hyphen would be an option.
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@:%-]*")
PLAIN = re.compile(r"[A-Za-z0-9_./,:@+-][A-Za-z0-9_./,:@+=-]*")  # in every shell
LISTED = re.compile(r"(?:[^,\[]|\[[^]]*\]?)+")  # what commas outside of brackets divide
NUMBERS = "[0-9]{1,9}(?:-[0-9]{1,9})?"
RANGE = re.compile(rf"([^\[\]]*)\[({NUMBERS}(?:,{NUMBERS})*)\](.*)")
# Without a password, and without waiting for ever where nobody waits for it any more.
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "--")

HOSTS = Option(
    "--hosts HOST",
    "of other machines, by ssh: groups of [hosts] in /etc/reserve_gpu.toml or "
    "~/.config/reserve_gpu.toml, or names (lab1 gpu[01-04]); without a name all groups",
    nargs="*",
)


class OtherMachines(NamedTuple):
    """Other machines: what `--hosts` means. All that asks them raises RequestError.

    typed: what was typed for them; it is checked when it is used.
    """

    typed: Sequence[str]

    @property
    def words(self) -> Sequence[str]:
        """Return what was typed for them, by default every group."""
        return self.typed or tuple(groups())

    def look(self, *, is_all: bool = False) -> said.Hosts:
        """Ask them how they stand."""
        return look(named(self.typed))._replace(typed=tuple(self.typed), is_all=is_all)

    def ask(self, words: Sequence[str], read: Callable[[object], T]) -> dict[str, T | str]:
        """Run a command of ours on each; returns what it has said, or why nothing."""
        return answers(named(self.typed), words, read)

    def kernel(self, spec: dict[str, Any], wishes: Namespace, name: str) -> dict[str, Any]:
        """Return a kernelspec that starts the kernel there.

        Clients that know provisioners use ours. Others, such as VS Code, run the command, which is
        a client that knows them.
        """
        named(self.typed)  # what names no host is said at once
        if not any(getattr(wishes, option.attribute) for option in request_options.WHEN):
            wishes.idle, wishes.if_wanted = IDLE, True
        config: dict[str, Any] = {"hosts": [*self.words], "wishes": request_options.words(wishes)}
        config["remote_kernel_name"] = settings.KERNEL_NAME
        provisioner = {"provisioner_name": PROVISIONER, "config": config}
        program = spawn.python("-m", "sshpyk.kernelapp", f"--SSHKernelApp.kernel_name={name}")
        return {
            **spec,
            "argv": [*program, "--KernelManager.connection_file='{connection_file}'"],
            "interrupt_mode": "message",
            "metadata": {**spec["metadata"], "kernel_provisioner": provisioner},
        }

    def lacks(self) -> list[str]:
        """Return the packages that are missing here for such a kernel."""
        return [] if find_spec("sshpyk") else [SSHPYK]


def other_machines(arguments: Namespace) -> OtherMachines | None:
    """Return the other machines that a line is about; None if it is about this one."""
    return None if arguments.hosts is None else OtherMachines(arguments.hosts)


# -- which machines ------------------------------------------------------------------------------


def named(words: Sequence[str]) -> list[str]:
    """Return the hosts that are meant: by groups, or by names as ssh takes them; none means all.

    Raises RequestError.
    """
    known = groups()
    asked = [each for word in words for each in LISTED.findall(word)] or [*known]
    if not asked:
        raise RequestError(
            "Which hosts? Name them: --hosts lab1,lab2. Or write them into "
            f'{settings.user_file()}:\n[hosts]\nlab = ["lab1", "lab2"]'
        )
    found = [name for each in asked for name in (known[each] if each in known else expanded(each))]
    if len(found) > MOST_HOSTS:
        raise RequestError(f"These are {len(found)} hosts; {MOST_HOSTS} can be asked at once.")
    return list(dict.fromkeys(found))


def groups() -> dict[str, list[str]]:
    """Return the hosts of each group: of the administrator's file, then of the user's own.

    Raises RequestError for a file that can't be read, or a table that makes no sense.
    """
    found: dict[str, list[str]] = {}
    file = settings.config_file()
    if file and os.path.lexists(file):
        found |= _groups(admin_rules.tables(file, file, admin_rules.owners()), file)
    return found | _groups(admin_rules.of_user(), settings.user_file())


def expanded(pattern: str) -> list[str]:
    """Return the names that a pattern means: gpu[01-03,07] is gpu01, gpu02, gpu03 and gpu07.

    Raises RequestError.
    """
    found = [*islice(_expanded(pattern), MOST_HOSTS + 1)] if len(pattern) <= LONGEST else []
    if len(found) > MOST_HOSTS:
        raise RequestError(f"{sanitize(pattern)!r} names more than {MOST_HOSTS} hosts.")
    if not found or not all(map(NAME.fullmatch, found)):
        raise RequestError(f"{sanitize(pattern)!r} names no host.")
    return found


def _expanded(pattern: str) -> Iterator[str]:
    match = RANGE.fullmatch(pattern)
    if match is None:
        yield pattern
        return
    before, numbers, after = match.groups()
    for each in numbers.split(","):
        first, _, last = each.partition("-")
        if int(last or first) < int(first):  # with none of it, a product would have no end
            raise RequestError(f"{sanitize(pattern)!r} names no host: {each} is no range.")
        for number in range(int(first), int(last or first) + 1):
            yield from _expanded(f"{before}{number:0{len(first)}}{after}")


def _groups(tables: Mapping[str, Any], file: str) -> dict[str, list[str]]:
    table = tables.get(admin_rules.HOSTS, {})
    if not isinstance(table, dict):
        raise RequestError(f"{sanitize(file, 300)}: [hosts] must be a table.")
    for name, patterns in table.items():
        is_list = isinstance(patterns, list) and all(isinstance(each, str) for each in patterns)
        if not (is_list and patterns):
            raise RequestError(
                f"{sanitize(file, 300)}, [hosts]: {sanitize(name)} must be a list, "
                'as ["lab1", "lab2"].'
            )
    return {name: [x for each in those for x in expanded(each)] for name, those in table.items()}


# -- what they say -------------------------------------------------------------------------------


def look(names: Sequence[str], limit_s: float = LIMIT_S) -> said.Hosts:
    """Ask all of them at once how they stand. A host that does not answer is an answer too."""
    found = answers(names, LOOK, status_from_json.status, limit_s)
    return said.Hosts(found, time.time(), tuple(names))


def answers(
    names: Sequence[str],
    words: Sequence[str],
    read: Callable[[object], T],
    limit_s: float = LIMIT_S,
) -> dict[str, T | str]:
    """Run a command of ours on all of them at once; returns what each has said, or why nothing.

    read: returns what the JSON means that the command prints, or raises FormatError.
    """
    with asked(names, words) as programs:
        replies = {
            name: _answer(words[1], name, programs[name], read) for name in heard(programs, limit_s)
        }
    return {name: replies.get(name, said.silent(name, limit_s)) for name in names}


@contextmanager
def asked(names: Iterable[str], words: Sequence[str]) -> Iterator[dict[str, Program]]:
    """Start a command on each host, and end what is left of them. Raises RequestError."""
    try:
        commands = {name: argv(name, words) for name in names}
        with started(commands, spawn.environment(), is_ssh=True) as programs:
            yield programs
    except FileNotFoundError as error:
        raise RequestError("There is no ssh here. Install OpenSSH's client.") from error
    except OSError as error:
        raise RequestError(f"ssh can't be started: {error.strerror}.") from error


def argv(name: str, words: Sequence[str]) -> list[str]:
    """Return what runs a command of ours on a host; this machine is not asked by ssh.

    The login shell there may be any: it reads plain words alone, and none that people have typed.
    """
    program, *rest = words
    if procfs.is_here(name):
        return spawn.python("-m", "reserve_gpu", *rest)
    if not all(map(PLAIN.fullmatch, rest)):
        rest = [settings.SENT + json.dumps(rest).encode().hex()]
    return [*SSH, name, " ".join([program, *rest])]


def _answer(command: str, name: str, program: Program, read: Callable[[object], T]) -> T | str:
    """Return what a host has said, checked."""
    if program.code():
        return problem(name, program, command)
    out, _ = program.said
    try:
        return read(fields_in(out))
    except untrusted.FormatError as error:
        return said.another_format(name, error.version, _text(out), command)


def problem(name: str, program: Program, command: str = "status") -> str:
    """Return what went wrong on a host, and what to do."""
    out, err = map(_text, program.said)
    return said.failed(name, program.code(), out, err, command)


def fields_in(data: bytes) -> dict[str, Any]:
    """Return the JSON in what a host has said; what a login shell says may stand around it."""
    text = data.decode("utf-8", "replace")
    for start in islice(re.finditer(r"^\{", text, re.MULTILINE), MOST_STARTS):
        with suppress(ValueError, RecursionError):
            fields, _ = json.JSONDecoder().raw_decode(text, start.start())
            return dict(fields)
    return {}


def _text(data: bytes) -> str:
    return data[-CHUNK:].decode("utf-8", "replace")
