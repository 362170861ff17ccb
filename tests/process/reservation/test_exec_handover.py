"""Commands that another process would run, so that they would not keep the reservation."""

from __future__ import annotations

import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from reserve_gpu.commands.run import handoff
from tests.support.locked import held

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.here import Here


OURS = "reserve-gpu run --"


@pytest.mark.skipif(not shutil.which("tmux"), reason="needs tmux")
def test_a_real_tmux(here: Here, tmp_path: Path) -> None:
    """Without a server tmux is let through; with one it is refused, and the hint reserves."""
    seen = tmp_path / "seen"
    script = tmp_path / "train.sh"
    script.write_text(
        f"#!/bin/sh\necho $CUDA_VISIBLE_DEVICES >{seen}.draft\nmv {seen}.draft {seen}\nread line"
    )
    script.chmod(0o755)
    server = ["tmux", "-S", str(tmp_path / "socket"), "-f", "/dev/null"]
    command = [*server, "new-session", "-d", str(script)]
    try:
        handoff.require_kept_reservation(command, lambda: OURS)
        here.command(*server, "new-session", "-d", "-s", "first", "cat")
        ours = [sys.executable, "-m", "reserve_gpu", "run", "--"]
        done = here.command(*ours, *command)
        assert done.returncode == 2, done.stderr
        assert not seen.exists()
        *_, typed = done.stderr.splitlines()
        assert here.command("sh", "-c", typed).returncode == 0
        wait = f"until test -e {seen}; do sleep 0.01; done"
        subprocess.run(["sh", "-c", wait], check=True, timeout=30)
        assert (seen.read_text(), held(here)) == ("0\n", [0])
    finally:
        here.command(*server, "kill-server")
