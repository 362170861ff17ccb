"""Two versions of the package on one machine: the one before this edition, and today's.

The earlier one comes from this repository's history. Each process imports one of them by its
PYTHONPATH, as users do who have installed different versions.
"""

from __future__ import annotations

import io
import json
import subprocess
import tarfile
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.support.machine import ROOT, Child
from tests.support.processes import US

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.here import Here
    from tests.support.machine import Kernel

# The last commit of the edition before this one.
EARLIER = "b60decb482201309427b7129f12d367f8ebde75b"
ITS_FILE = "import reserve_gpu; print(reserve_gpu.__file__)"


def unpack_earlier(folder: Path) -> str | None:
    """Put the package of the earlier version into a folder; returns why that can't be done."""
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), "archive", EARLIER, "reserve_gpu"],
            capture_output=True, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except FileNotFoundError:
        return "git is not installed"
    if done.returncode:
        return done.stderr.decode(errors="replace").strip()
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        if hasattr(tarfile, "data_filter"):  # else Python 3.14 warns, or 3.10 does not know it
            archive.extraction_filter = tarfile.data_filter
        archive.extractall(folder)  # noqa: S202 - made by git from our own commit
    return None


@dataclass(frozen=True)
class Version:
    """A version as somebody drives it who has it installed on this machine."""

    machine: Here
    folder: Path

    @property
    def path(self) -> dict[str, str]:
        """Return the variable by which Python finds it."""
        return {"PYTHONPATH": str(self.folder)}

    @property
    def file(self) -> str:
        return str(self.folder / "reserve_gpu" / "__init__.py")

    def environ(self, **extra: str) -> dict[str, str]:
        return self.machine.environ(**self.path, **extra)

    @contextmanager
    def child(self, *prefix: str, file: str | None = None) -> Iterator[Child]:
        """Make a Python process; killed at the end.

        prefix: what starts it. file: what it imports, if that is not this version.
        """
        child = Child(self.environ(), self.machine.folder, *prefix)
        try:
            assert child.run("reserve_gpu.__file__").value == (file or self.file)
            yield child
        finally:
            child.kill()

    @contextmanager
    def kernel(self, **extra: str) -> Iterator[Kernel]:
        """Make a kernel of this version with the extension loaded; shut down at the end."""
        with self.machine.kernel(**self.path, **extra) as kernel:
            assert kernel.run(ITS_FILE).stdout == f"{self.file}\n"
            yield kernel

    def run(self, *words: str, **extra: str) -> subprocess.CompletedProcess[str]:
        """Run `reserve-gpu WORDS` to its end."""
        return self.machine.command(*US, *words, **self.path, **extra)

    def json(self, *words: str) -> dict[str, Any]:
        """Return what `reserve-gpu WORDS --json` prints."""
        done = self.run(*words, "--json")
        assert done.returncode == 0, done
        assert not done.stderr
        told: dict[str, Any] = json.loads(done.stdout)
        return told
