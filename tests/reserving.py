"""What a reservation in the test process comes to, in a word: for tests that are tables."""

from __future__ import annotations

import os
from typing import Any

import pytest

import reserve_gpu


def got(*devices: Any, **wishes: Any) -> str:
    """Reserve; the CUDA_VISIBLE_DEVICES that came of it."""
    return reserve_gpu.reserve(*devices, **wishes).environ["CUDA_VISIBLE_DEVICES"]


def refused(*devices: Any, **wishes: Any) -> str:
    """Fail to reserve, as nothing is free; the text of the error."""
    with pytest.raises(reserve_gpu.NoFreeDeviceError) as caught:
        reserve_gpu.reserve(*devices, **wishes)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "" or reserve_gpu.current()
    return str(caught.value)


def of_gpu(text: str, number: str = "0") -> str:
    """What an error's text says of that device."""
    label = f"  GPU{number}: "
    (line,) = (line for line in text.splitlines() if line.startswith(label))
    return line.removeprefix(label)


def variables() -> dict[str, str]:
    """The CUDA variables that are set."""
    return {name: value for name, value in os.environ.items() if name.startswith("CUDA_")}
