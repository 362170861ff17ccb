"""Frontends, and the requests that result if a hint is typed into them."""

from __future__ import annotations

import inspect
import shlex
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import reserve_gpu
from reserve_gpu import request_options
from reserve_gpu.allocation.request import parse
from reserve_gpu.commands.run import command
from reserve_gpu.ipython.parser import magic_parser
from reserve_gpu.model.devices import Device
from reserve_gpu.option_parser import Parser
from reserve_gpu.render import frontends

if TYPE_CHECKING:
    from reserve_gpu.model.requests import Request
    from reserve_gpu.render.frontends import Frontend

SCRIPT = ["python", "train it.py", "--wait", "it's; $HOME | `x` #1"]
FACES = {"magic": frontends.MAGIC, "shell": frontends.shell(SCRIPT), "Python": frontends.PYTHON}
GPU0, GPU1 = Device(0, "GPU-a"), Device(1, "GPU-b")


def parse_hint(hint: str) -> tuple[Request, object]:
    """Return the request that a typed hint makes, and its `wait`."""
    if hint.startswith("reserve_gpu."):
        called: dict[str, Any] = eval(hint, {"reserve_gpu": SimpleNamespace(reserve=_arguments)})
        return _request(called)
    program, *typed = shlex.split(hint)
    if program == "%reserve_gpu":
        return _request(request_options.reserve_keywords(magic_parser().parse_args(typed)))
    assert (program, typed[0]) == ("reserve-gpu", "run")
    options, to_run = command.split(typed[1:])
    assert to_run == SCRIPT
    parser = Parser()
    command.add_arguments(parser)
    return _request(request_options.reserve_keywords(parser.parse_args(options)))


def _arguments(*arguments: object, **named: object) -> dict[str, object]:
    return inspect.signature(reserve_gpu.reserve).bind(*arguments, **named).arguments


def _request(keywords: dict[str, Any]) -> tuple[Request, object]:
    wait = keywords.pop("wait", None)
    return parse(keywords.pop("devices", None), **keywords), wait


def assert_asks_for(frontend: Frontend, keywords: dict[str, Any]) -> None:
    """Check that the hints for a request make the same request, with and without a wait."""
    request = parse(**{"devices": None, **keywords})
    assert parse_hint(frontend.typed(request)) == (request, None)
    again, wait = parse_hint(frontend.typed(request, waits=True))
    assert again == request
    assert wait in {True, "1h"}
