"""The administrator's file: what it says to who asks, and what is wrong in it.

    message = "Maintenance on Friday at 17:00"
    history = true           # log who used what
    [limits]                 # of each user; also [groups.NAME] and [users.NAME]
    gpus = 2
    time = "24h"
    idle = "2h"
    after_cuda = "warn"
    [agents]                 # the same limits, of who says to be one: RESERVE_GPU_AGENT
    [devices]
    drain = ["GPU-8f2a"]

Its table `[hosts]` is read by the command hosts. The user's own file may have that, and `history`.
A file with a mistake binds nobody: no rule in it applies, and everybody reads the line at fault.
Imported only where there is such a file.
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
OF_USER = (HOSTS, HISTORY)  # in the user's own file

Table = dict[str, Rule]  # by key


class Document(NamedTuple):
    """What a file says to whoever asks. groups, users: tables by the names that stand there.

    rules: what holds for all, without the limits.
    """

    rules: Rules
    limits: Table
    groups: dict[str, Table]
    users: dict[str, Table]
    agents: Table


class MistakeError(Exception):
    """What is wrong in a file, in a line for everybody to read."""


def read(file: str) -> Rules:
    """Return the rules that hold for the user of this process. file: its path."""
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
    """Return what a document says to a user: each limit from the narrowest table that has it.

    Of several groups the most generous stands. What is said to agents can only be narrower.
    called: what the user may be called in the file. groups: of those that it names.
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
    ruled = document.rules._replace(gpus=gpus, time=time, idle=idle, after_cuda=after_cuda)
    return ruled._replace(user=user)


def parse(data: bytes, file: str) -> Document:
    """Return what a file of that content says. Raises MistakeError. file: what messages call it."""
    whole = _Part(file, "", parsed(data, file))
    whole.require_known("message", HISTORY, LIMITS, GROUPS, USERS, AGENTS, DEVICES, HOSTS)
    message = whole.fields.get("message")
    if message is not None and not isinstance(message, str):
        raise whole.mistake(f"message must be a text, not {_value(message)}")
    limits = whole.table(LIMITS).limits()
    groups, users = whole.table(GROUPS).limits_of_each(), whole.table(USERS).limits_of_each()
    drain, drained = whole.table(DEVICES).drain()
    history = whole.truth(HISTORY)
    rules = Rules(file, "", message or None, drain=drain, drained=drained, history=history)
    return Document(rules, limits, groups, users, whole.table(AGENTS).limits())


class _Part(NamedTuple):
    """A table of a file, or the whole file. Its methods raise MistakeError.

    place: the name of the table, empty for the file. fields: what stands in it.
    """

    file: str
    place: str
    fields: Mapping[str, Any]

    def mistake(self, what: str) -> MistakeError:
        """Return the error for a mistake."""
        table = f", {_table(self.place)}" if self.place else ""
        return MistakeError(f"{_path(self.file)}{table}: {what}")

    def require_known(self, *known: str) -> None:
        """Raise MistakeError for a key that means nothing."""
        for key in self.fields:
            if key not in known:
                what = f"{sanitize(key)!r} means nothing here; there are {', '.join(known)}"
                raise self.mistake(what)

    def table(self, name: str) -> _Part:
        """Return the table of that name, an empty one where there is none."""
        place = f"{self.place}.{name}" if self.place else name
        value = self.fields.get(name, {})
        if isinstance(value, dict):
            return _Part(self.file, place, value)
        what = f"{_table(place)} must be a table, not {_value(value)}"
        raise MistakeError(f"{_path(self.file)}: {what}")

    def truth(self, name: str) -> bool | None:
        """Return a value that is true or false, None where it is not set."""
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
        """Return the limits of each user, or group, by the name that stands there."""
        return {name: self.table(name).limits() for name in self.fields}

    def drain(self) -> tuple[Rule | None, tuple[str, ...]]:
        """Return which devices are not handed out any more."""
        self.require_known("drain")
        value = self.fields.get("drain", [])
        if not isinstance(value, list):
            what = f'drain = {_value(value)}: give a list, as ["GPU-8f2a", "1:0"]'
            raise self.mistake(what)
        drained: list[str] = []
        for name in value:
            is_name = isinstance(name, str) or type(name) is int
            try:
                drained += names.parse(name if is_name else "?")
            except RequestError as error:
                what = f"drain: {_value(name)} names no GPU; give a UUID, its start, 2 or 1:0"
                raise self.mistake(what) from error
        return Rule("drain", _table(self.place), self.file, 0), tuple(drained)


def _count(value: object) -> float:
    if type(value) is not int or not 0 <= value <= MOST_GPUS:
        raise ValueError("give a number of GPUs, 0 or more")
    return value


def _duration(value: object) -> float:
    has_unit = isinstance(value, str) and not value.strip()[-1:].isdecimal()
    duration_s = parse_duration(value) if has_unit else 0.0  # 24 s are not what "24" means
    if not 0 < duration_s < LONGEST_S:
        raise ValueError('give a time as "30m", "4h" or "2d"')
    return duration_s


def _ending(value: object) -> float:
    if value not in ("warn", "end"):
        raise ValueError('give "warn" or "end"')
    return float(value == "warn")


# What a table of limits may say, in the order of Rules; each makes a number of it.
KEYS: dict[str, Callable[[object], float]] = {
    "gpus": _count,
    "time": _duration,
    "idle": _duration,
    "after_cuda": _ending,
}


def owners() -> set[int]:
    """Return the users who may have written the administrator's file.

    Whoever has named it with the variable may have written it, too.
    """
    return {0, os.geteuid()} if os.environ.get(settings.CONFIG) else {0}


def content(file: str, owners: Collection[int]) -> bytes:
    """Read the file. Raises OSError also if others than its owners could have written it."""
    if not os.path.isabs(file):
        raise OSError(f"{settings.CONFIG} must be an absolute path")
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if os.path.islink(file):
            raise OSError("it is a link") from error
        raise
    with os.fdopen(descriptor, "rb") as opened:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError("it is not a regular file")
        if status.st_uid not in owners:
            owner = sanitize(procfs.user_name(status.st_uid))
            expected = " or ".join(map(procfs.user_name, sorted(owners)))
            raise OSError(f"it belongs to {owner}, and must belong to {expected}")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise OSError("others than its owner may write to it; run: chmod go-w on it")
        if status.st_size > MOST_BYTES:
            raise OSError("it is larger than 64 KiB")
        return opened.read()


def of_user() -> dict[str, Any]:
    """Return the tables of the user's own file, none where there is none. Raises RequestError.

    People keep their own file elsewhere, behind a link; its owner counts all the same.
    """
    file = settings.user_file()
    if not os.path.lexists(file):
        return {}
    found = tables(os.path.realpath(file), file, {0, os.geteuid()})
    if unknown := [*{*found} - {*OF_USER}]:
        raise RequestError(
            f"{_path(file)}: there is no {sanitize(unknown[0])!r} in this file, only "
            "[hosts] and history."
        )
    return found


def tables(path: str, file: str, owners: Collection[int]) -> dict[str, Any]:
    """Return the tables of a file. Raises RequestError. file: what messages call it."""
    try:
        return parsed(content(path, owners), file)
    except OSError as error:
        raise RequestError(f"{_path(file)} can't be read: {error.strerror or error}.") from error
    except MistakeError as error:
        raise RequestError(f"{error}.") from error


def own_history() -> bool | None:
    """Return what the user's own file says of the history. Raises RequestError."""
    try:
        return _Part(settings.user_file(), "", of_user()).truth(HISTORY)
    except MistakeError as error:
        raise RequestError(f"{error}.") from error


def parsed(data: bytes, file: str) -> dict[str, Any]:
    """Return the tables of a file. Raises MistakeError for one with a mistake in its form."""
    try:
        # Some editors begin a file with a byte order mark.
        tables: dict[str, Any] = tomllib.loads(data.removeprefix(BOM_UTF8).decode())
    except (ValueError, RecursionError) as error:  # tomllib names the line
        raise MistakeError(f"{_path(file)}: {sanitize(str(error), REASON_LIMIT)}") from error
    return tables


def _groups(listed: Iterable[str]) -> set[str]:
    """Return those of the groups that the user of this process is in.

    Those of the system's database and those of the process: a login is older than a change, and a
    container has groups without names.
    """
    if not listed:
        return set()
    numbers = {os.getegid(), *os.getgroups(), *accounts.find_groups(os.geteuid())}
    return {name for name in listed if _group_number(name) in numbers}


def _group_number(name: str) -> int | None:
    """Return the number of a group that is given by its name or its number."""
    if not name.isdecimal():
        return accounts.find_gid(name)
    with suppress(ValueError):  # it has more digits than Python reads
        return int(name)
    return None


def _table(place: str) -> str:
    return f"[{sanitize(place)}]"


def _path(file: str) -> str:
    return sanitize(file, REASON_LIMIT)


def _value(value: object) -> str:
    """Return a value in short, nearly as it stands in the file."""
    return sanitize(json.dumps(value, ensure_ascii=False, default=str), 40)
