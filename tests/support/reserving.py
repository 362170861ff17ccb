"""Reservations in the test process, and the parts of a refusal that tests read."""

from __future__ import annotations

import os
import re
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import pytest

import reserve_gpu
from reserve_gpu import api
from reserve_gpu.allocation.request import parse
from reserve_gpu.render import frontends

if TYPE_CHECKING:
    from collections.abc import Iterable

# A time within six days: `18:00`, or `Fri 00:26` if it is not today.
MOMENT = r"(?:[A-Z][a-z]{2} )?\d\d:\d\d"


def got(*devices: Any, **wishes: Any) -> str:
    """Reserve; return CUDA_VISIBLE_DEVICES."""
    return reserve_gpu.reserve(*devices, **wishes).environ["CUDA_VISIBLE_DEVICES"]


def refused(*devices: Any, **wishes: Any) -> str:
    """Fail to reserve because no device is free; return the error's text."""
    with pytest.raises(reserve_gpu.NoFreeDeviceError) as caught:
        reserve_gpu.reserve(*devices, **wishes)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "" or reserve_gpu.current()
    return str(caught.value)


def would_be_refused(devices: Any = None, **wishes: Any) -> reserve_gpu.NoFreeDeviceError:
    """Return the error of a request while no device is free, before any waiter is skipped."""
    with pytest.raises(reserve_gpu.NoFreeDeviceError) as caught:
        api.preview(parse(devices, **wishes), frontends.PYTHON)
    return caught.value


def of_gpu(text: str, number: str = "0") -> str:
    """Return the text about a device in a picture, such as `busy: bob, python (pid 9876)`."""
    lines = text.splitlines()
    (at,) = (at for at, line in enumerate(lines) if re.match(rf" *{number}  ", line))
    _, state, *_, who = re.split(" {2,}", lines[at].strip())
    return ", ".join([f"{state}: {who}", *beneath(lines[at + 1 :])])


def beneath(lines: Iterable[str]) -> list[str]:
    """Return the lines below a device that belong to it."""
    return [line.strip() for line in takewhile(lambda line: line.startswith("     "), lines)]


def variables() -> dict[str, str]:
    """Return the CUDA variables that are set."""
    return {name: value for name, value in os.environ.items() if name.startswith("CUDA_")}
