"""Errors about commands that would not keep the reservation of `reserve-gpu run --`."""

from __future__ import annotations

import shlex
import shutil

import pytest

from reserve_gpu.commands.run import handoff
from reserve_gpu.model.errors import RequestError

OURS = "reserve-gpu run --"


def refusal(line: str) -> str:
    """Return the error for a command line after `reserve-gpu run --`."""
    with pytest.raises(RequestError) as caught:
        handoff.require_kept_reservation(shlex.split(line), lambda: OURS)
    return str(caught.value).replace(f"{shutil.which('reserve-gpu')} ", "reserve-gpu ")


def suggestion(line: str) -> str:
    """Return the command line that the error suggests."""
    return refusal(line).splitlines()[-1]
