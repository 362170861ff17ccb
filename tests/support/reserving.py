"""What a reservation in the test process comes to, in a word: for tests that are tables."""

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

# A moment within six days as people read it: `18:00`, or `Fri 00:26` if that is not today.
MOMENT = r"(?:[A-Z][a-z]{2} )?\d\d:\d\d"


def got(*devices: Any, **wishes: Any) -> str:
    """Reserve; the CUDA_VISIBLE_DEVICES that came of it."""
    return reserve_gpu.reserve(*devices, **wishes).environ["CUDA_VISIBLE_DEVICES"]


def refused(*devices: Any, **wishes: Any) -> str:
    """Fail to reserve, as nothing is free; the text of the error."""
    with pytest.raises(reserve_gpu.NoFreeDeviceError) as caught:
        reserve_gpu.reserve(*devices, **wishes)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "" or reserve_gpu.current()
    return str(caught.value)


def would_be_refused(devices: Any = None, **wishes: Any) -> reserve_gpu.NoFreeDeviceError:
    """Return the error of a request that nothing is free for, before waiters have had time."""
    with pytest.raises(reserve_gpu.NoFreeDeviceError) as caught:
        api.preview(parse(devices, **wishes), frontends.PYTHON)
    return caught.value


def of_gpu(text: str, number: str = "0") -> str:
    """Return what a picture says of that device: `busy: bob, python (pid 9876)`."""
    lines = text.splitlines()
    (at,) = (at for at, line in enumerate(lines) if re.match(rf" *{number}  ", line))
    _, state, *_, who = re.split(" {2,}", lines[at].strip())
    return ", ".join([f"{state}: {who}", *beneath(lines[at + 1 :])])


def beneath(lines: Iterable[str]) -> list[str]:
    """Return what stands in the lines below a device."""
    return [line.strip() for line in takewhile(lambda line: line.startswith("     "), lines)]


def variables() -> dict[str, str]:
    """Return the CUDA variables that are set."""
    return {name: value for name, value in os.environ.items() if name.startswith("CUDA_")}
