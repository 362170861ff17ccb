"""The `reserve-gpu why` command: show whether a request would succeed, without reserving a GPU."""

from __future__ import annotations

import json
from argparse import SUPPRESS
from typing import TYPE_CHECKING

from reserve_gpu import api, request_options
from reserve_gpu.commands.output import Output, error_text
from reserve_gpu.commands.run import command
from reserve_gpu.model.errors import VERSION, NoFreeDeviceError
from reserve_gpu.model.option import Option, add
from reserve_gpu.render import frontends
from reserve_gpu.render.phrases import labels

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

MORE = """\
This reserves nothing and does not join the queue. The exit code is the one
that `reserve-gpu run` would return. Other options of `run` are ignored.
"""
JSON = Option("--json", "print a JSON object")
# `why` also accepts the other options of `run`, so that users can replace one word with the other.
_IGNORED = (request_options.WAIT, request_options.NOTE, request_options.OPTIONAL)
OPTIONS = (
    *(each for each in request_options.REQUEST_OF_COMMAND if each not in _IGNORED),
    JSON,
)
split = command.split_at_sign


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `run`, and hide the options that have no effect here."""
    parser.usage, parser.epilog = "reserve-gpu why [options] [DEVICE ...]", MORE
    add(OPTIONS, parser)
    listed = {option.flag for option in OPTIONS}
    for option in command.OPTIONS:
        if option.flag not in listed:
            parser.add_argument(*option.flags, **{**option.settings, "help": SUPPRESS})


def run(arguments: Namespace) -> Output:
    """Return the devices that `run` would reserve, or explain why it would reserve none."""
    request, _ = request_options.to_request(arguments)
    try:
        devices = api.preview(request, frontends.shell(arguments.command))
    except NoFreeDeviceError as error:
        answer, text, code = error.to_dict(), error_text(error), error.exit_code
    else:
        described = [{"label": device.label, "uuid": device.uuid} for device in devices]
        answer = {"version": VERSION, "reason": None, "exit_code": 0, "devices": described}
        text, code = f"You would get {labels(devices)}.", 0
    return Output(json.dumps(answer, indent=2) if arguments.json else text, code)
