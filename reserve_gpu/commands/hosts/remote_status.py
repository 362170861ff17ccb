"""Read the status of other machines over ssh.

Groups of machines are defined in the administrator's or the user's configuration file:

    [hosts]
    lab = ["lab1", "lab2", "gpu[01-04]"]

ssh uses the user's ssh configuration. A machine's reply is untrusted, so its size and the time to
wait for it are limited, and `status_from_json` validates it.
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
from reserve_gpu.commands.hosts import hosts_view, status_from_json
from reserve_gpu.model import untrusted
from reserve_gpu.model.errors import RequestError
from reserve_gpu.model.untrusted import sanitize
from reserve_gpu.system import procfs, settings, spawn
from reserve_gpu.system.subprocesses import Program, run_programs, wait_for_output

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

T = TypeVar("T")
SSHPYK = "'sshpyk>=1.25'"  # quoted for a shell
PROVISIONER = "reserve-gpu-hosts"  # name of the entry point in pyproject.toml
IDLE = "2h"  # a remote kernel's default idle limit, which applies when another user is waiting
LIMIT_S = 5.0  # seconds to wait for a machine's reply
CHUNK = 1 << 16  # maximum number of output bytes used for an error message
MAX_STARTS = 20  # maximum number of lines to try as the start of the JSON
MAX_PATTERN = 200  # maximum length of a host pattern, in characters
MAX_HOSTS = 256
STATUS_COMMAND = ("reserve-gpu", "status", "--format", "json")
# A host name that is safe to pass to ssh. A leading hyphen would make it an option.
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@:%-]*")
PLAIN = re.compile(r"[A-Za-z0-9_./,:@+-][A-Za-z0-9_./,:@+=-]*")  # a word that no shell alters
LIST_ITEM = re.compile(r"(?:[^,\[]|\[[^]]*\]?)+")  # commas in brackets do not end an item
NUMBERS = "[0-9]{1,9}(?:-[0-9]{1,9})?"
RANGE = re.compile(rf"([^\[\]]*)\[({NUMBERS}(?:,{NUMBERS})*)\](.*)")
# ssh must not prompt for a password, and must not keep running after this process has exited.
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "--")


class OtherMachines(NamedTuple):
    """The other machines that `--hosts` selects.

    The methods that contact the machines raise RequestError if the selection is invalid.

    Attributes:
        typed: The values given to `--hosts`. They are not validated until they are used.
    """

    typed: Sequence[str]

    @property
    def words(self) -> Sequence[str]:
        """Return the values given to `--hosts`, or the names of all groups if there are none."""
        return self.typed or tuple(groups())

    def look(self, *, is_all: bool = False) -> hosts_view.Hosts:
        """Read the status of all machines.

        Args:
            is_all: Whether every device gets its own line.
        """
        status = read_status(resolve(self.typed))
        return status._replace(typed=tuple(self.typed), is_all=is_all)

    def run(self, words: Sequence[str], parse: Callable[[object], T]) -> dict[str, T | str]:
        """Run a `reserve-gpu` command on each machine; see `run_on_all`."""
        return run_on_all(resolve(self.typed), words, parse)

    def kernel(self, spec: dict[str, Any], wishes: Namespace, name: str) -> dict[str, Any]:
        """Return a kernelspec that starts the kernel on one of the machines.

        Clients that support kernel provisioners use this package's provisioner. Other clients, such
        as VS Code, run the kernelspec's command, which starts a program that supports provisioners.

        Args:
            spec: A local kernel's kernelspec.
            wishes: The request options.
            name: The new kernelspec's name.
        """
        resolve(self.typed)  # raise any RequestError before the kernelspec is written
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
        """Return the packages that a kernel on another machine needs but this Python lacks."""
        return [] if find_spec("sshpyk") else [SSHPYK]


# -- host names and groups -----------------------------------------------------------------------


def resolve(words: Sequence[str]) -> list[str]:
    """Return the hosts selected by a list of groups and host names.

    Args:
        words: Groups, patterns, or host names in the form that ssh accepts. An empty list means all
            groups.

    Raises:
        RequestError: There are no hosts, there are too many, or a name is invalid.
    """
    known = groups()
    items = [each for word in words for each in LIST_ITEM.findall(word)] or [*known]
    if not items:
        raise RequestError(
            "No hosts are configured. Name some (--hosts lab1,lab2), or add a group to "
            f'{settings.user_file()}:\n[hosts]\nlab = ["lab1", "lab2"]'
        )
    names = [name for each in items for name in (known[each] if each in known else expand(each))]
    if len(names) > MAX_HOSTS:
        raise RequestError(f"{len(names)} hosts were given, but at most {MAX_HOSTS} are allowed.")
    return list(dict.fromkeys(names))


def groups() -> dict[str, list[str]]:
    """Return the hosts in each group, as defined in the administrator's and the user's files.

    If both files define the same group, the user's definition wins.

    Raises:
        RequestError: A file can't be read, or its `[hosts]` table is invalid.
    """
    result: dict[str, list[str]] = {}
    file = settings.config_file()
    if file and os.path.lexists(file):
        result |= _groups(admin_rules.tables(file, file, admin_rules.owners()), file)
    return result | _groups(admin_rules.read_user_file(), settings.user_file())


def expand(pattern: str) -> list[str]:
    """Expand a host pattern: gpu[01-03,07] becomes gpu01, gpu02, gpu03, and gpu07.

    Raises:
        RequestError: The pattern is invalid, or names too many hosts.
    """
    names = [*islice(_expand(pattern), MAX_HOSTS + 1)] if len(pattern) <= MAX_PATTERN else []
    if len(names) > MAX_HOSTS:
        raise RequestError(f"{sanitize(pattern)!r} names more than {MAX_HOSTS} hosts.")
    if not names or not all(map(NAME.fullmatch, names)):
        raise RequestError(f"{sanitize(pattern)!r} is not a valid host name.")
    return names


def _expand(pattern: str) -> Iterator[str]:
    match = RANGE.fullmatch(pattern)
    if match is None:
        yield pattern
        return
    before, numbers, after = match.groups()
    for each in numbers.split(","):
        first, _, last = each.partition("-")
        # Reject an empty range such as 5-3. Otherwise, a pattern with a large range and then an
        # empty one would yield no names, so the loop over the large range would never reach
        # MAX_HOSTS.
        if int(last or first) < int(first):
            raise RequestError(
                f"{sanitize(pattern)!r} is not a valid host name: {each} is not a valid range."
            )
        for number in range(int(first), int(last or first) + 1):
            yield from _expand(f"{before}{number:0{len(first)}}{after}")


def _groups(tables: Mapping[str, Any], file: str) -> dict[str, list[str]]:
    table = tables.get(admin_rules.HOSTS, {})
    if not isinstance(table, dict):
        raise RequestError(f"{sanitize(file, 300)}: [hosts] must be a table.")
    for name, patterns in table.items():
        is_list = isinstance(patterns, list) and all(isinstance(each, str) for each in patterns)
        if not (is_list and patterns):
            raise RequestError(
                f"{sanitize(file, 300)}, [hosts]: {sanitize(name)} must be a list, "
                'such as ["lab1", "lab2"].'
            )
    return {
        name: [host for pattern in patterns for host in expand(pattern)]
        for name, patterns in table.items()
    }


# -- replies from the machines -------------------------------------------------------------------


def read_status(names: Sequence[str], limit_s: float = LIMIT_S) -> hosts_view.Hosts:
    """Read the status of several hosts in parallel.

    For a host that sent no status, the result contains the reason instead.

    Args:
        names: The host names.
        limit_s: The timeout in seconds.
    """
    answers = run_on_all(names, STATUS_COMMAND, status_from_json.status, limit_s)
    return hosts_view.Hosts(answers, time.time(), tuple(names))


def run_on_all(
    names: Sequence[str],
    words: Sequence[str],
    parse: Callable[[object], T],
    limit_s: float = LIMIT_S,
) -> dict[str, T | str]:
    """Run a `reserve-gpu` command on several hosts in parallel.

    Args:
        names: The host names.
        words: The command and its arguments.
        parse: A function that parses the command's JSON, or raises FormatError.
        limit_s: The timeout in seconds.

    Returns:
        A mapping from each host's name to its parsed reply, or to a one-line reason if there is no
        valid reply.
    """
    with running_on(names, words) as programs:
        replies = {
            name: _parse(words[1], name, programs[name], parse)
            for name in wait_for_output(programs, limit_s)
        }
    return {name: replies.get(name, hosts_view.silent(name, limit_s)) for name in names}


@contextmanager
def running_on(names: Iterable[str], words: Sequence[str]) -> Iterator[dict[str, Program]]:
    """Run a command on each host during a `with` block.

    When the block exits, the commands that are still running are stopped.

    Raises:
        RequestError: ssh can't be started.
    """
    try:
        commands = {name: argv(name, words) for name in names}
        with run_programs(commands, spawn.environment(), is_ssh=True) as programs:
            yield programs
    except FileNotFoundError as error:
        raise RequestError("ssh was not found on PATH. Install the OpenSSH client.") from error
    except OSError as error:
        raise RequestError(f"ssh can't be started: {error.strerror}.") from error


def argv(name: str, words: Sequence[str]) -> list[str]:
    """Return the local command line that runs a `reserve-gpu` command on a host.

    On this machine, the command runs without ssh. Other hosts might have any login shell, so
    arguments that a shell could alter, such as a user's note, are sent in hexadecimal.
    """
    program, *rest = words
    if procfs.is_local_host(name):
        return spawn.python("-m", "reserve_gpu", *rest)
    if not all(map(PLAIN.fullmatch, rest)):
        rest = [settings.SENT + json.dumps(rest).encode().hex()]
    return [*SSH, name, " ".join([program, *rest])]


def _parse(command: str, name: str, program: Program, parse: Callable[[object], T]) -> T | str:
    """Return a host's parsed reply, or the reason for its absence."""
    if program.code():
        return problem(name, program, command)
    out, _ = program.output
    try:
        return parse(fields_in(out))
    except untrusted.FormatError as error:
        return hosts_view.another_format(name, error.version, _text(out), command)


def problem(name: str, program: Program, command: str = "status") -> str:
    """Return a message, with advice, about a command that failed on a host."""
    out, err = map(_text, program.output)
    return hosts_view.failed(name, program.code(), out, err, command)


def fields_in(data: bytes) -> dict[str, Any]:
    """Return the JSON object in a host's output, skipping any text from its login shell."""
    text = data.decode("utf-8", "replace")
    for start in islice(re.finditer(r"^\{", text, re.MULTILINE), MAX_STARTS):
        with suppress(ValueError, RecursionError):
            fields, _ = json.JSONDecoder().raw_decode(text, start.start())
            return dict(fields)
    return {}


def _text(data: bytes) -> str:
    return data[-CHUNK:].decode("utf-8", "replace")
