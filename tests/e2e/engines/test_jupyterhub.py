"""`reserve-gpu run` as the server that JupyterHub starts."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.locked import held
from tests.support.machine import ROOT

if TYPE_CHECKING:
    from tests.support.here import Here


@pytest.mark.needs("engines")
def test_jupyterhub(here: Here, script: str) -> None:
    """JupyterHub's spawner polls and stops the server itself, because `run` becomes the server."""
    server = here.folder / "server.py"
    server.write_text(
        "import os, signal, sys\n"
        "with open('started', 'w') as pipe:\n"
        "    print(os.getpid(), os.environ['CUDA_VISIBLE_DEVICES'], sys.argv[0], file=pipe)\n"
        "signal.pause()\n"
    )
    os.mkfifo(here.folder / "started")
    path = f"{Path(script).parent}:{os.environ['PATH']}"
    words = ("reserve-gpu", "run", "--", sys.executable, "server.py")
    done = here.command(
        sys.executable, str(ROOT / "tests" / "support" / "hub.py"), *words, PATH=path
    )
    pid, running, *printed, stopped = done.stdout.split()
    assert (running, printed, stopped) == ("None", [pid, "0", "server.py"], "False"), done.stderr
    assert held(here) == []
