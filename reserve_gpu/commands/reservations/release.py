"""`reserve-gpu release`, and `%reserve_gpu --release`: other processes, or this one, release."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from reserve_gpu import api
from reserve_gpu.commands.output import Output
from reserve_gpu.commands.reservations import choice
from reserve_gpu.commands.run import reporter
from reserve_gpu.gpus import cuda_environment
from reserve_gpu.model.errors import RequestError, own_command
from reserve_gpu.model.option import Option, add
from reserve_gpu.render import messages
from reserve_gpu.render import reservation_list as said
from reserve_gpu.render.frontends import SHELL, read_here
from reserve_gpu.reservation import remote_release
from reserve_gpu.reservation.remote_release import Choice, of_anybody, of_user
from reserve_gpu.reservation.session import session
from reserve_gpu.reservation.status import reserved_rows
from reserve_gpu.system.shutdown import STOP_S

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from reserve_gpu.model.holders import Answer

ROOT = 0
MORE = """\
Without a name your only reservation is released. A notebook that has started
CUDA, a script and a command hold a GPU as long as they live: --end ends them.
The exit code is 75 if something is still held, or in use.
On another machine: ssh lab1 reserve-gpu release train.ipynb
"""
OPTIONS = (
    choice.WHICH,
    Option("--all", "all that you hold; for root, all of everybody"),
    Option("--end", "end the process: what was given to before_end() first, then SIGTERM, 10 s "
           "later SIGKILL"),
    choice.JSON,
)  # fmt: skip


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `release`."""
    parser.epilog = MORE
    add(OPTIONS, parser)


def run(arguments: Namespace) -> Output:
    """Make other processes release their GPUs.

    Raises RequestError if the words name no reservation, or several.
    """
    which = arguments.which
    if arguments.all and which:
        raise RequestError("Give names, or --all.")
    every = of_anybody() if os.geteuid() == ROOT else of_user()
    choices = (
        [Choice(each, each.rows) for each in every]
        if arguments.all
        else choice.choices(which, every, f"{own_command()} release")
    )
    answers = [(each.reserved, _released(each, is_end=arguments.end)) for each in choices]
    frontend = read_here(SHELL)
    lines = [said.released(each, answer, every, frontend) for each, answer in answers]
    done = [each for each, answer in answers if answer in remote_release.DONE]
    rest = said.still_there(done, reserved_rows()) if done else []
    is_done = len(done) == len(answers) and not rest
    if arguments.json:
        found = [
            {**choice.to_dict(each, time.time()), "answer": answer.name.lower(), "message": line}
            for (each, answer), line in zip(answers, lines, strict=True)
        ]
        return choice.to_json(
            {"answers": found, "is_done": is_done, "still_in_use": rest}, is_done=is_done
        )
    return Output("\n".join([*lines, *rest]) or said.NONE, 0 if is_done else choice.NOT_RELEASED)


def _released(chosen: Choice, *, is_end: bool) -> Answer:
    """Have a process release its devices, with a line on stderr before a first signal."""

    def warn(why: Answer) -> None:
        reporter.say(said.unasked(chosen.reserved, why, STOP_S))

    return remote_release.release(chosen, is_end=is_end, warn=warn)


def run_in_notebook(_arguments: Namespace) -> None:
    """Release all GPUs of this kernel."""
    held = api.current()
    devices = api.release()
    values = cuda_environment.read({*cuda_environment.CUDA, *(held.environ if held else ())})
    text = messages.released(devices, values, started=cuda_environment.cuda_started())
    more = [each.released() for each in session().features.values()] if devices else []
    print("\n".join(filter(None, [text, *more])))
