"""The commands that messages name: they work in the environment of who reads them."""

from __future__ import annotations

import shlex
import sys

from reserve_gpu.model import errors


def test_with_pip() -> None:
    """Where there is pip, this Python's own is named."""
    assert errors.install_command("six") == f"{shlex.quote(sys.executable)} -m pip install six"
