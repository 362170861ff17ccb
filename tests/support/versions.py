"""Two versions of the package on one machine: an earlier version and today's.

The earlier version comes from this repository's history. Each process imports one version through
its PYTHONPATH.
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

# The commit of the earlier version.
EARLIER = "b60decb482201309427b7129f12d367f8ebde75b"
# Fields of the status that only one version has, or that change all the time.
NEW_OR_CHANGING = {
    *("agent", "free_at", "idle_for_s", "is_dying"),
    *("job", "job_name", "is_job_end"),
}


def unpack_earlier(folder: Path) -> str | None:
    """Unpack the earlier version into a folder, and return the problem if that fails."""
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
        if hasattr(tarfile, "data_filter"):  # missing in Python 3.10; Python 3.14 warns without it
            archive.extraction_filter = tarfile.data_filter
        archive.extractall(folder)  # noqa: S202 - git made it from our own commit
    return None


@dataclass(frozen=True)
class Version:
    """A version of the package that a user of this machine has installed."""

    machine: Here
    folder: Path

    @property
    def path(self) -> dict[str, str]:
        """Return the environment variable with which Python finds the package."""
        return {"PYTHONPATH": str(self.folder)}

    @property
    def file(self) -> str:
        return str(self.folder / "reserve_gpu" / "__init__.py")

    def environ(self, **extra: str) -> dict[str, str]:
        return self.machine.environ(**self.path, **extra)

    @contextmanager
    def child(self) -> Iterator[Child]:
        """Start a Python process, and kill it at the end."""
        child = Child(self.environ(), self.machine.folder)
        try:
            assert child.run("reserve_gpu.__file__").value == self.file
            yield child
        finally:
            child.kill()

    def run(self, *words: str, **extra: str) -> subprocess.CompletedProcess[str]:
        """Run a `reserve-gpu` command and return its result."""
        return self.machine.command(*US, *words, **self.path, **extra)

    def json(self, *words: str) -> dict[str, Any]:
        """Run a `reserve-gpu` command with `--json`, and return its output."""
        done = self.run(*words, "--json")
        assert done.returncode == 0, done
        assert not done.stderr
        printed: dict[str, Any] = json.loads(done.stdout)
        return printed

    def status(self) -> dict[str, Any]:
        """Return the fields of the machine's status that both versions have."""
        told = self.json("status")
        assert told.pop("hours", None) is None  # of histories, in the earlier version only
        assert told.pop("time")
        holders = [holder for device in told["devices"] for holder in device["holders"]]
        for each in (*told["devices"], *holders, *told["waiting"]):
            for name in NEW_OR_CHANGING:
                each.pop(name, None)
        return told
