"""The types of the public names, as mypy checks them in a user's program."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.machine import ROOT

if TYPE_CHECKING:
    from pathlib import Path


def assert_mypy_sees(code: str, folder: Path) -> None:
    """Check that mypy --strict reports the lines with a comment, which is the error's code."""
    (folder / "user.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "user.py"],
        cwd=folder,
        env={"MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    seen = re.findall(r"^user\.py:(\d+): error: .*\[([a-z-]+)\]$", done.stdout, re.MULTILINE)
    lines = enumerate(code.splitlines(), 1)
    wrong = [(str(number), line.split("# ")[1]) for number, line in lines if "# " in line]
    assert list(dict.fromkeys(seen)) == wrong, done.stdout + done.stderr


pytestmark = [pytest.mark.full, pytest.mark.needs("lint")]

# The lines with a comment are wrong; the comment is the code of mypy's error.
USER = """\
import reserve_gpu


def show(waiting: reserve_gpu.Waiting) -> None:
    print(waiting.place, waiting.waited_s, waiting.rows[0].device)
    print(waiting.plaice)  # attr-defined


@reserve_gpu.before_end
def save() -> None: ...


@reserve_gpu.before_end(limit=30)
def save_too() -> int:
    return 0


with reserve_gpu.reserve(count=1, progress=show) as held:
    print(held.devices[0].name, held.lease.until)
    print(held.device)  # attr-defined
reserve_gpu.before_end(save, limits=30)  # call-overload
number: int = save_too()
text: str = save_too()  # assignment
reserve_gpu.resreve()  # attr-defined
reserve_gpu.Waitingg  # attr-defined
reserve_gpu.reserve(counts=1)  # call-arg
reserve_gpu.status().rowss  # attr-defined
"""


def test_misused_names_are_errors(tmp_path: Path) -> None:
    """With mypy --strict, a misspelled name or a wrong argument is an error."""
    assert_mypy_sees(USER, tmp_path)
