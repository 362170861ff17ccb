"""The `release` command for other processes, and the magic's `--release` option for this kernel."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from reserve_gpu import api
from reserve_gpu.commands.output import Output, print_stderr
from reserve_gpu.commands.reservations import choice
from reserve_gpu.gpus import cuda_environment
from reserve_gpu.model.errors import RequestError, program_command
from reserve_gpu.model.option import Option, add
from reserve_gpu.render import messages, reservation_list
from reserve_gpu.render.frontends import SHELL, for_this_process
from reserve_gpu.reservation import remote_release
from reserve_gpu.reservation.remote_release import Choice, all_reservations, reservations_of_user
from reserve_gpu.reservation.session import session
from reserve_gpu.reservation.status import reserved_rows
from reserve_gpu.system.shutdown import STOP_S

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from reserve_gpu.model.holders import Answer

ROOT = 0
MORE = """\
Without WHICH, this releases your only reservation. Scripts, commands and
notebooks that have started CUDA hold their GPUs until they end: use --end to
end them. The exit code is 75 if a GPU is still held or in use.
On another machine: ssh lab1 reserve-gpu release train.ipynb
"""
OPTIONS = (
    choice.WHICH,
    Option("--all", "release all your reservations; as root, those of all users"),
    Option("--end", "end the process: call its before_end() functions, then send SIGTERM, and "
           "SIGKILL 10 s later"),
    choice.JSON,
)  # fmt: skip


def add_arguments(parser: ArgumentParser) -> None:
    """Add the `release` command's arguments."""
    parser.epilog = MORE
    add(OPTIONS, parser)


def run(arguments: Namespace) -> Output:
    """Ask other processes to release their GPUs, or end those processes.

    Raises:
        RequestError: A name matches no reservation or several, or names are combined with `--all`.
    """
    which = arguments.which
    if arguments.all and which:
        raise RequestError("Give names or --all, not both.")
    reservations = all_reservations() if os.geteuid() == ROOT else reservations_of_user()
    choices = (
        [Choice(each, each.rows) for each in reservations]
        if arguments.all
        else choice.choices(which, reservations, f"{program_command()} release")
    )
    answers = [(each.reserved, _release(each, is_end=arguments.end)) for each in choices]
    frontend = for_this_process(SHELL)
    lines = [
        reservation_list.released(each, answer, reservations, frontend) for each, answer in answers
    ]
    done = [each for each, answer in answers if answer in remote_release.DONE]
    still_in_use = reservation_list.still_in_use(done, reserved_rows()) if done else []
    is_done = len(done) == len(answers) and not still_in_use
    if arguments.json:
        results = [
            {**choice.to_dict(each, time.time()), "answer": answer.name.lower(), "message": line}
            for (each, answer), line in zip(answers, lines, strict=True)
        ]
        return choice.to_json(
            {"answers": results, "is_done": is_done, "still_in_use": still_in_use},
            is_done=is_done,
        )
    text = "\n".join([*lines, *still_in_use]) or reservation_list.NONE
    return Output(text, 0 if is_done else choice.NOT_RELEASED)


def _release(chosen: Choice, *, is_end: bool) -> Answer:
    """Make a process release its devices, or end it. Before sending a signal, print a warning."""

    def warn(reason: Answer) -> None:
        print_stderr(reservation_list.signal_warning(chosen.reserved, reason, STOP_S))

    return remote_release.release(chosen, is_end=is_end, warn=warn)


def run_in_notebook(_arguments: Namespace) -> None:
    """Release all of this kernel's GPUs, and print their names and the CUDA variables."""
    held = api.current()
    devices = api.release()
    values = cuda_environment.read({*cuda_environment.CUDA, *(held.environ if held else ())})
    text = messages.released(devices, values, started=cuda_environment.cuda_started())
    more = [each.released() for each in session().features.values()] if devices else []
    print("\n".join(filter(None, [text, *more])))
