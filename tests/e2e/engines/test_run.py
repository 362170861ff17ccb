"""`reserve-gpu run` below torchrun and JupyterHub."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.locked import held
from tests.support.machine import ROOT
from tests.support.main import run_command

if TYPE_CHECKING:
    from tests.support.here import Here


@pytest.mark.needs("frameworks")
def test_torchrun(here: Here) -> None:
    """Each rank of torchrun sees the GPUs of the command."""
    (here.folder / "rank.py").write_text(  # one unbuffered write per rank
        "import os, torch\n"
        "line = os.environ['LOCAL_RANK'] + ' ' + os.environ['CUDA_VISIBLE_DEVICES'] + '\\n'\n"
        "os.write(1, line.encode())\n"
    )
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "rank.py")
    done = run_command(here, "-n", "2", "--", *torchrun)
    assert sorted(done.stdout.splitlines()) == ["0 0,1", "1 0,1"], done.stderr
    assert held(here) == []


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
