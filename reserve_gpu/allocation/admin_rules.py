"""Parse the administrator's file, and find the rules that apply to a user.

    message = "Maintenance on Friday at 17:00"
    history = true           # log all users' GPU use
    [limits]                 # per user; also [groups.NAME] and [users.NAME]
    gpus = 2
    time = "24h"
    idle = "2h"
    after_cuda = "warn"
    [agents]                 # the same keys; used when RESERVE_GPU_AGENT is set
    [devices]
    drain = ["GPU-8f2a"]

The `[hosts]` table, which lists other machines, is used by `--hosts`. A user's own file can contain
only `[hosts]` and `history`. If the administrator's file contains a mistake, none of its rules
apply, and all users see a message about the mistake. This module is imported only if one of these
files exists.
"""

from __future__ import annotations

import json
import os
import stat
import sys
from codecs import BOM_UTF8
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from reserve_gpu.gpus import names
from reserve_gpu.model.errors import REASON_LIMIT, RequestError
from reserve_gpu.model.parsing import LONGEST_S, parse_duration
from reserve_gpu.model.requests import Rule, Rules
from reserve_gpu.model.untrusted import sanitize
from reserve_gpu.system import accounts, procfs, settings

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

MOST_GPUS = 1_000_000
MOST_BYTES = 1 << 16
LIMITS, GROUPS, USERS, DEVICES, HOSTS = "limits", "groups", "users", "devices", "hosts"
AGENTS = "agents"
HISTORY = "history"
OF_USER = (HOSTS, HISTORY)  # keys allowed in a user's own file

Table = dict[str, Rule]  # maps each key in a table to its rule


class Document(NamedTuple):
    """A parsed administrator's file.

    Attributes:
        rules: The settings that apply to all users. They don't include limits.
        limits: The default limits for each user.
        groups: Each group's limits, keyed by the group's name in the file.
        users: Each user's limits, keyed by the user's name in the file.
        agents: The limits for agents.
    """

    rules: Rules
    limits: Table
    groups: dict[str, Table]
    users: dict[str, Table]
    agents: Table


class MistakeError(Exception):
    """A configuration file contains a mistake. The message is a single line written for users."""


def read(file: str) -> Rules:
    """Read the administrator's file, and return the rules that apply to this process's user.

    Args:
        file: The path of the administrator's file.
    """
    user = procfs.user_name(os.geteuid())
    try:
        document = parse(content(file, owners()), file)
    except OSError as error:
        reason = error.strerror or str(error)
        return Rules(file, user, problems=(f"{_path(file)} is ignored: {reason}.",))
    except MistakeError as error:
        return Rules(file, user, problems=(f"{error}. Until this is fixed, no rule applies.",))
    groups = _groups(document.groups)
    agents = document.agents if os.environ.get(settings.AGENT) else {}
    return for_user(document, user, {user, str(os.geteuid())}, groups, agents)


def for_user(
    document: Document,
    user: str,
    called: Collection[str],
    groups: Collection[str],
    agents: Table | None = None,
) -> Rules:
    """Return a user's rules, taking each limit from the most specific table that sets it.

    If several of the user's groups set a limit, the most generous value applies. An agent limit
    applies only if it is stricter than the user's own limit.

    Args:
        document: The parsed administrator's file.
        user: The user's name.
        called: The user's name and UID, because the file can identify users by either.
        groups: The groups in the file that the user belongs to.
        agents: The limits for agents, if this process is running on behalf of an agent.
    """
    tables = (
        [table for name, table in document.users.items() if name in called],
        [table for name, table in document.groups.items() if name in groups],
        [document.limits],
    )

    def limit(key: str) -> Rule | None:
        for level in tables:
            if rules := [table[key] for table in level if key in table]:
                return max(rules, key=lambda rule: rule.value)
        return None

    def narrower(key: str) -> Rule | None:
        rules = filter(None, (limit(key), (agents or {}).get(key)))
        return min(rules, key=lambda rule: rule.value, default=None)

    gpus, time, idle, after_cuda = map(narrower, KEYS)
    rules = document.rules._replace(gpus=gpus, time=time, idle=idle, after_cuda=after_cuda)
    return rules._replace(user=user)


def parse(data: bytes, file: str) -> Document:
    """Parse an administrator's file.

    Args:
        data: The file's content.
        file: The file's path, for error messages.

    Raises:
        MistakeError: The file contains a mistake.
    """
    root = _Part(file, "", parsed(data, file))
    root.require_known("message", HISTORY, LIMITS, GROUPS, USERS, AGENTS, DEVICES, HOSTS)
    message = root.fields.get("message")
    if message is not None and not isinstance(message, str):
        raise root.mistake(f"message must be a string, not {_value(message)}")
    limits = root.table(LIMITS).limits()
    groups, users = root.table(GROUPS).limits_of_each(), root.table(USERS).limits_of_each()
    drain, drained = root.table(DEVICES).drain()
    history = root.truth(HISTORY)
    rules = Rules(file, "", message or None, drain=drain, drained=drained, history=history)
    return Document(rules, limits, groups, users, root.table(AGENTS).limits())


class _Part(NamedTuple):
    """A table in a file, or the whole file. Its methods raise MistakeError for invalid content.

    Attributes:
        file: The file's path, for error messages.
        place: The table's name, or an empty string for the whole file.
        fields: The table's keys and values.
    """

    file: str
    place: str
    fields: Mapping[str, Any]

    def mistake(self, problem: str) -> MistakeError:
        """Return an error that describes a mistake in this table."""
        table = f", {_table(self.place)}" if self.place else ""
        return MistakeError(f"{_path(self.file)}{table}: {problem}")

    def require_known(self, *known: str) -> None:
        """Raise MistakeError if the table contains an unknown key."""
        for key in self.fields:
            if key not in known:
                problem = f"unknown key {sanitize(key)!r} (known keys: {', '.join(known)})"
                raise self.mistake(problem)

    def table(self, name: str) -> _Part:
        """Return the subtable with this name, or an empty table if it does not exist."""
        place = f"{self.place}.{name}" if self.place else name
        value = self.fields.get(name, {})
        if isinstance(value, dict):
            return _Part(self.file, place, value)
        problem = f"{_table(place)} must be a table, not {_value(value)}"
        raise MistakeError(f"{_path(self.file)}: {problem}")

    def truth(self, name: str) -> bool | None:
        """Return a key's Boolean value, or None if the key is not set."""
        value = self.fields.get(name)
        if value is None or isinstance(value, bool):
            return value
        raise self.mistake(f"{name} must be true or false, not {_value(value)}")

    def limits(self) -> Table:
        """Return the limits that the table sets."""
        self.require_known(*KEYS)
        rules: Table = {}
        for key, value in self.fields.items():
            text = f"{key} = {_value(value)}"
            try:
                number = KEYS[key](value)
            except ValueError as error:
                raise self.mistake(f"{text}: {str(error).rstrip('.')}") from error
            rules[key] = Rule(text, _table(self.place), self.file, number)
        return rules

    def limits_of_each(self) -> dict[str, Table]:
        """Return each user's or group's limits, keyed by the name in the file."""
        return {name: self.table(name).limits() for name in self.fields}

    def drain(self) -> tuple[Rule | None, tuple[str, ...]]:
        """Return the drain rule and the names of the drained devices."""
        self.require_known("drain")
        value = self.fields.get("drain", [])
        if not isinstance(value, list):
            problem = f'drain = {_value(value)}: give a list, such as ["GPU-8f2a", "1:0"]'
            raise self.mistake(problem)
        drained: list[str] = []
        for name in value:
            is_name = isinstance(name, str) or type(name) is int
            try:
                drained += names.parse(name if is_name else "?")
            except RequestError as error:
                problem = (
                    f"drain: {_value(name)} is not a GPU; give a UUID or its beginning, or a "
                    "number such as 2 or 1:0"
                )
                raise self.mistake(problem) from error
        return Rule("drain", _table(self.place), self.file, 0), tuple(drained)


def _count(value: object) -> float:
    if type(value) is not int or not 0 <= value <= MOST_GPUS:
        raise ValueError("give a number of GPUs, 0 or more")
    return value


def _duration(value: object) -> float:
    has_unit = isinstance(value, str) and not value.strip()[-1:].isdecimal()
    duration_s = parse_duration(value) if has_unit else 0.0  # a number without a unit is ambiguous
    if not 0 < duration_s < LONGEST_S:
        raise ValueError('give a duration such as "30m", "4h" or "2d"')
    return duration_s


def _ending(value: object) -> float:
    if value not in ("warn", "end"):
        raise ValueError('give "warn" or "end"')
    return float(value == "warn")


# The keys of a limits table, in the same order as the fields of Rules. Each key's function converts
# the key's value to a number.
KEYS: dict[str, Callable[[object], float]] = {
    "gpus": _count,
    "time": _duration,
    "idle": _duration,
    "after_cuda": _ending,
}


def owners() -> set[int]:
    """Return the UIDs that may own the administrator's file.

    If an environment variable sets the file's path, this process's user may own the file as well.
    """
    return {0, os.geteuid()} if os.environ.get(settings.CONFIG) else {0}


def content(file: str, owners: Collection[int]) -> bytes:
    """Return a file's content after checking that only a trusted owner can write to it.

    Args:
        file: The file's path.
        owners: The UIDs that may own the file.

    Raises:
        OSError: The file can't be read, or an untrusted user might have written it.
    """
    if not os.path.isabs(file):
        raise OSError(f"{settings.CONFIG} must be an absolute path")
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if os.path.islink(file):
            raise OSError("it is a symbolic link") from error
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError("it is not a regular file")
        if status.st_uid not in owners:
            owner = sanitize(procfs.user_name(status.st_uid))
            expected = " or ".join(map(procfs.user_name, sorted(owners)))
            raise OSError(f"it belongs to {owner}, but must belong to {expected}")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise OSError("other users can write to it; remove that permission with chmod go-w")
        if status.st_size > MOST_BYTES:
            raise OSError("it is larger than 64 KiB")
        with os.fdopen(descriptor, "rb", closefd=False) as opened:
            return opened.read()
    finally:
        os.close(descriptor)


def read_user_file() -> dict[str, Any]:
    """Return the settings in the user's own file, or an empty dict if the file does not exist.

    The file can be a symbolic link, for example to a dotfiles repository. The link's target must
    belong to the user or to root.

    Raises:
        RequestError: The file can't be read, or contains a mistake.
    """
    file = settings.user_file()
    if not os.path.lexists(file):
        return {}
    own_tables = tables(os.path.realpath(file), file, {0, os.geteuid()})
    if unknown := [*{*own_tables} - {*OF_USER}]:
        raise RequestError(
            f"{_path(file)}: unknown key {sanitize(unknown[0])!r}. This file may contain only "
            "[hosts] and history."
        )
    return own_tables


def tables(path: str, file: str, owners: Collection[int]) -> dict[str, Any]:
    """Read and parse a configuration file.

    Args:
        path: The path to open, with symbolic links already resolved.
        file: The path to show in error messages.
        owners: The UIDs that may own the file.

    Raises:
        RequestError: The file can't be read, or contains a mistake.
    """
    try:
        return parsed(content(path, owners), file)
    except OSError as error:
        raise RequestError(f"{_path(file)} can't be read: {error.strerror or error}.") from error
    except MistakeError as error:
        raise RequestError(f"{error}.") from error


def user_history_setting() -> bool | None:
    """Return the `history` setting in the user's own file, or None if the file does not set it.

    Raises:
        RequestError: The file can't be read, or contains a mistake.
    """
    try:
        return _Part(settings.user_file(), "", read_user_file()).truth(HISTORY)
    except MistakeError as error:
        raise RequestError(f"{error}.") from error


def parsed(data: bytes, file: str) -> dict[str, Any]:
    """Parse a TOML file.

    Args:
        data: The file's content.
        file: The file's path, for error messages.

    Raises:
        MistakeError: The content is not valid TOML.
    """
    try:
        # Some editors start a file with a byte order mark.
        tables: dict[str, Any] = tomllib.loads(data.removeprefix(BOM_UTF8).decode())
    except (ValueError, RecursionError) as error:  # tomllib's message includes the line number
        raise MistakeError(f"{_path(file)}: {sanitize(str(error), REASON_LIMIT)}") from error
    return tables


def _groups(listed: Iterable[str]) -> set[str]:
    """Return the subset of these groups that this process's user belongs to.

    Both the system's group database and this process's own groups are checked. The database might
    have changed since the user logged in, and a container's groups might not have names.
    """
    if not listed:
        return set()
    numbers = {os.getegid(), *os.getgroups(), *accounts.find_groups(os.geteuid())}
    return {name for name in listed if _group_number(name) in numbers}


def _group_number(name: str) -> int | None:
    """Return a group's GID, given the group's name or number."""
    if not name.isdecimal():
        return accounts.find_gid(name)
    with suppress(ValueError):  # int() rejects numbers with too many digits
        return int(name)
    return None


def _table(place: str) -> str:
    return f"[{sanitize(place)}]"


def _path(file: str) -> str:
    return sanitize(file, REASON_LIMIT)


def _value(value: object) -> str:
    """Return a value as short text for an error message."""
    return sanitize(json.dumps(value, ensure_ascii=False, default=str), 40)
