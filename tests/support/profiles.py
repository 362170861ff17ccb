"""A home directory with an IPython profile, and `reserve-gpu setup` in it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.machine import ROOT

CONFIG_FILE = ".ipython/profile_default/ipython_config.py"  # below the home directory
OWN_LINE = b"get_config().InteractiveShellApp.extensions.append('reserve_gpu')\n"
# The lines that version 2.0.0 added to a file that it created.
OLD_BLOCK = b"""\
# >>> reserve_gpu (added by install.sh, which takes it away with --uninstall; new: file) >>>
import importlib.util
if importlib.util.find_spec("reserve_gpu"):
    get_config().InteractiveShellApp.extensions.append("reserve_gpu")
# <<< reserve_gpu <<<
"""
BLOCK_OF_ANOTHER = OLD_BLOCK.replace(b"import", b"# for /x/bin/python3.9\nimport", 1)


class Home(NamedTuple):
    """A home directory, and an environment in which only HOME is set.

    Attributes:
        path: The directory.
    """

    path: Path

    @property
    def config(self) -> Path:
        """The configuration file of the default profile."""
        return self.path / CONFIG_FILE

    def write(self, data: bytes, name: str = "ipython_config.py") -> Path:
        """Write a file of the profile, and return its path."""
        path = self.config.parent / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return path

    def files(self) -> dict[str, bytes]:
        """Return the content of every file."""
        paths = [path for path in sorted(self.path.rglob("*")) if path.is_file()]
        return {str(path.relative_to(self.path)): path.read_bytes() for path in paths}

    def configuration(self) -> dict[str, bytes]:
        """Return the content of every configuration file, including drafts and backups."""
        return {name: data for name, data in self.files().items() if "ipython_config" in name}

    def environ(self, **more: str | Path) -> dict[str, str]:
        """Return an environment without other settings of Python, IPython and pip."""
        unwanted = ("IPYTHON", "PIP_", "PYTHON", "VIRTUAL_ENV", "XDG_", "COV_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
        kept |= {"HOME": str(self.path), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(ROOT)}
        return kept | {
            "PATH": "/usr/bin:/bin",
            **{name: str(value) for name, value in more.items()},
        }

    def _run_setup(
        self, words: tuple[str, ...], prefix: tuple[str, ...], python: Path, **environ: str | Path
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*prefix, str(python), "-m", "reserve_gpu", "setup", *words],
            env=self.environ(**environ),
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )

    def setup(self, *words: str, **environ: str | Path) -> subprocess.CompletedProcess[str]:
        """Run `reserve-gpu setup`, and check that it succeeds without a message on stderr."""
        done = self._run_setup(words, (), Path(sys.executable), **environ)
        assert (done.returncode, done.stderr) == (0, "")
        return done

    def fail_setup(
        self,
        *words: str,
        prefix: tuple[str, ...] = (),
        python: Path = Path(sys.executable),
        code: int = 73,
        **environ: str | Path,
    ) -> str:
        """Run `reserve-gpu setup`, check that it fails, and return the one line on stderr."""
        done = self._run_setup(words, prefix, python, **environ)
        assert (done.returncode, done.stdout) == (code, "")
        (line,) = done.stderr.splitlines()
        return line


def without_override() -> tuple[str, ...]:
    """Return a command prefix that makes file modes apply to root as well."""
    if os.geteuid() != 0:
        return ()
    prefix = ("setpriv", "--bounding-set", "-dac_override,-dac_read_search")
    try:
        subprocess.run([*prefix, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs setpriv, because file modes don't apply to root")
    return prefix
