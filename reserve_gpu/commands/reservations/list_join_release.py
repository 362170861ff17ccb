"""reserve-gpu list, join and release: what a user has on this machine, from elsewhere."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any, NoReturn

from reserve_gpu import api
from reserve_gpu.commands.run import command
from reserve_gpu.commands.table import Output, Subcommand
from reserve_gpu.gpus import cuda_environment, names
from reserve_gpu.model.devices import Device
from reserve_gpu.model.errors import RequestError, own_command, sanitize
from reserve_gpu.model.option import Option
from reserve_gpu.render import messages, status_view
from reserve_gpu.render import reservation_list as said
from reserve_gpu.render.frontends import SHELL, read_here
from reserve_gpu.reservation import remote_release
from reserve_gpu.reservation.remote_release import Choice, of_anybody, of_user
from reserve_gpu.reservation.session import session
from reserve_gpu.reservation.status import reserved_rows
from reserve_gpu.system import process_identity, procfs
from reserve_gpu.system.shutdown import STOP_S

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

    from reserve_gpu.model.holders import Answer, Reserved


NOT_RELEASED = 75  # EX_TEMPFAIL
ROOT = 0


def show_list(arguments: Namespace) -> Output:
    """Return a line for each reservation of this user."""
    every, now = of_user(), time.time()
    if arguments.json:
        return _json({"reservations": [_about(each, now) for each in every]})
    return Output("\n".join(said.line(each, now) for each in every) or said.NONE)


def join(arguments: Namespace) -> NoReturn:
    """Join a reservation of this user's, and become a command, by default the user's shell.

    Raises RequestError where it is not clear which is meant; CommandError.
    """
    if len(arguments.which) > 1:
        raise RequestError(said.without_sign())
    words = arguments.command or [os.environ.get("SHELL") or "/bin/sh"]
    program = command.find_own(words, ["join", *arguments.which])
    process_identity.call_it(process_identity.command(words) or "")
    command.say(api.join(chosen(arguments.which)))
    command.set_alarm(is_timed=False, is_quiet=False)
    command.become(program, words)


def chosen(words: Sequence[str], typed: str = "") -> Reserved:
    """Return the one reservation of this user's, in another process, that is meant.

    Args:
        words: The words of the command line; the first one names the reservation.
        typed: The command before its name; by default `reserve-gpu join`.

    Raises:
        RequestError: If it names none, or several.
    """
    own = {os.getpid(), *(left.lock_keeper for left in api.all_left())}
    every = [each for each in of_user() if each.holder.pid not in own and not each.holder.beside]
    every = [each for each in every if any(isinstance(row.device, Device) for row in each.rows)]
    (choice,) = _chosen(words[:1], every, typed or f"{own_command()} join")
    return choice.reserved


def release(arguments: Namespace) -> Output:
    """Have other processes release what they hold.

    Raises RequestError where it is not clear which are meant.
    """
    which = arguments.which
    if arguments.all and which:
        raise RequestError("Give names, or --all.")
    every = of_anybody() if os.geteuid() == ROOT else of_user()
    choices = (
        [Choice(each, each.rows) for each in every]
        if arguments.all
        else _chosen(which, every, f"{own_command()} release")
    )
    answers = [(each.reserved, _released(each, is_end=arguments.end)) for each in choices]
    frontend = read_here(SHELL)
    lines = [said.released(each, answer, every, frontend) for each, answer in answers]
    done = [each for each, answer in answers if answer in remote_release.DONE]
    rest = said.still_there(done, reserved_rows()) if done else []
    is_done = len(done) == len(answers) and not rest
    if arguments.json:
        found = [
            {**_about(each, time.time()), "answer": answer.name.lower(), "message": line}
            for (each, answer), line in zip(answers, lines, strict=True)
        ]
        return _json({"answers": found, "is_done": is_done, "still_in_use": rest}, is_done=is_done)
    return Output("\n".join([*lines, *rest]) or said.NONE, 0 if is_done else NOT_RELEASED)


def _released(choice: Choice, *, is_end: bool) -> Answer:
    """Have a process release its devices, with a line on stderr before a first signal."""

    def warn(why: Answer) -> None:
        command.say(said.unasked(choice.reserved, why, STOP_S))

    return remote_release.release(choice, is_end=is_end, warn=warn)


def _about(each: Reserved, now: float) -> dict[str, Any]:
    return {
        **status_view.holder_dict(each.holder, now),
        "devices": [row.label for row in each.rows],
    }


def _json(values: dict[str, Any], *, is_done: bool = True) -> Output:
    about = {"version": status_view.VERSION, "host": procfs.machine_name(), "time": time.time()}
    code = 0 if is_done else NOT_RELEASED
    return Output(json.dumps({**about, **values}, indent=2), code, "json")


def _chosen(words: Sequence[str], every: Sequence[Reserved], command: str) -> list[Choice]:
    """Return the reservations that are meant; without a word the only one. Raises RequestError."""
    now = time.time()
    chosen: dict[int | None, Choice] = {}
    pids = {each.holder.listed_pid for each in every}
    if not (every or words):
        raise RequestError(said.NONE)
    for word in words or [""]:
        meant = [choice for each in every if (choice := _meant(word, each, pids))]
        # A guest is meant only if its host is not.
        meant = [each for each in meant if not each.reserved.holder.beside] or meant
        if not meant:
            raise RequestError(said.no_such(sanitize(word), every, command, now))
        if len(meant) > 1:
            raise RequestError(said.which([each.reserved for each in meant], command, now))
        chosen.setdefault(meant[0].reserved.holder.listed_pid, meant[0])
    return [*chosen.values()]


def _meant(word: str, reserved: Reserved, pids: set[int | None]) -> Choice | None:
    """Return the choice if a word names a reservation: by a device, its pid, or its names.

    The user may have read the pid before the kernel restarted. pids: Those of all
    reservations. They go before the pid that a kernel had.
    """
    rows, holder = reserved.rows, reserved.holder
    known_pids = remote_release.pids_of(holder) - (pids - {holder.listed_pid})
    if not word or word in map(str, known_pids):
        return Choice(reserved, rows)
    if names.is_name(word):
        rows = tuple(
            row
            for row in rows
            if any(names.matching(name, [row.device]) for name in names.parse(word))
        )
        proven = tuple(row for row in rows if remote_release.is_proven(reserved, row))
        return Choice(reserved, proven or rows, is_unproven=not proven) if rows else None
    notebook, command_ = holder.notebook or "", holder.record.who.command or ""
    if word in {notebook, notebook.removesuffix(".ipynb")}:
        return Choice(reserved, rows, notebook)
    is_command = not word.isdecimal() and word in {command_, *command_.split()}
    return Choice(reserved, rows) if is_command else None


def release_own(_arguments: Namespace) -> None:
    """Release what this kernel holds."""
    held = api.current()
    devices = api.release()
    values = cuda_environment.read({*cuda_environment.CUDA, *(held.environ if held else ())})
    text = messages.released(devices, values, started=cuda_environment.cuda_started())
    more = [each.released() for each in session().features] if devices else []
    print("\n".join(filter(None, [text, *more])))


def join_from_notebook(arguments: Namespace) -> None:
    """Join a reservation of this user's with this kernel."""
    which = [arguments.join] if arguments.join else []
    print(api.join(chosen(which, "%reserve_gpu --join")))


WHICH = Option("which WHICH", "a GPU (0), a notebook (train.ipynb) or a pid (4321)", nargs="*")
JOIN_TEXT = """\
Without a name your only reservation is joined, without a command your shell
is started. It has the same GPUs, the same part and the same variables. The
GPUs are taken as long as the notebook or the command lives.
"""
RELEASE_TEXT = """\
Without a name your only reservation is released. A notebook that has started
CUDA, a script and a command hold a GPU as long as they live: --end ends them.
The exit code is 75 if something is still held, or in use.
On another machine: ssh lab1 reserve-gpu release train.ipynb
"""
JOIN = Subcommand(
    join, (WHICH,), "reserve-gpu join [WHICH] [-- COMMAND ...]", JOIN_TEXT, command.split_at_sign
)
JSON = Option("--json", "for programs")
LIST = Subcommand(show_list, (JSON,))
RELEASE = Subcommand(release, (
    WHICH,
    Option("--all", "all that you hold; for root, all of everybody"),
    Option("--end", "end the process: what was given to before_end() first, then SIGTERM, 10 s "
           "later SIGKILL"),
    JSON,
), more=RELEASE_TEXT)  # fmt: skip
