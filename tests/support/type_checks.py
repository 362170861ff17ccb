"""Run mypy on a user's program."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import TYPE_CHECKING

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
