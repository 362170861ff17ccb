"""Helpers of tests: frontends."""

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


def read(hint: str) -> tuple[Request, object]:
    """Return the request that a hint makes, typed where it was shown, and its wait."""
    if hint.startswith("reserve_gpu."):
        called: dict[str, Any] = eval(hint, {"reserve_gpu": SimpleNamespace(reserve=record)})
        return understood(called)
    program, *typed = shlex.split(hint)
    if program == "%reserve_gpu":
        return understood(request_options.reserve_keywords(magic_parser().parse_args(typed)))
    assert program == "reserve-gpu"
    ours, to_run = command.split(typed[1:])
    assert to_run == SCRIPT
    assert typed[0] == "run"
    parser = Parser()
    command.add_arguments(parser)
    return understood(request_options.reserve_keywords(parser.parse_args(ours)))


def record(*arguments: object, **named: object) -> dict[str, object]:
    """Return what `reserve()` would get."""
    return inspect.signature(reserve_gpu.reserve).bind(*arguments, **named).arguments


def understood(wishes: dict[str, Any]) -> tuple[Request, object]:
    wait = wishes.pop("wait", None)
    return parse(wishes.pop("devices", None), **wishes), wait


def assert_asks_for(frontend: Frontend, wishes: dict[str, Any]) -> None:
    """Type the hint for a request; it has to make the same one."""
    request = parse(**{"devices": None, **wishes})
    assert read(frontend.typed(request)) == (request, None)
    again, wait = read(frontend.typed(request, waits=True))
    assert again == request
    assert wait in {True, "1h"}


GPU0, GPU1 = Device(0, "GPU-a"), Device(1, "GPU-b")
