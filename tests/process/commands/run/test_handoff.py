"""A real tmux server, which would start the command without the reservation."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from reserve_gpu.commands.run import handoff
from tests.support.locked import held
from tests.support.processes import US

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.here import Here


@pytest.mark.skipif(not shutil.which("tmux"), reason="needs tmux")
def test_the_line_suggested_instead_of_tmux_reserves_inside_it(here: Here, tmp_path: Path) -> None:
    """Without a running server, tmux itself is allowed."""
    seen = tmp_path / "seen"
    script = tmp_path / "train.sh"
    script.write_text(
        f"#!/bin/sh\necho $CUDA_VISIBLE_DEVICES >{seen}.draft\nmv {seen}.draft {seen}\nread line"
    )
    script.chmod(0o755)
    server = ["tmux", "-S", str(tmp_path / "socket"), "-f", "/dev/null"]
    command = [*server, "new-session", "-d", str(script)]
    try:
        handoff.require_kept_reservation(command, lambda: "reserve-gpu run --")
        here.command(*server, "new-session", "-d", "-s", "first", "cat")
        done = here.command(*US, "run", "--", *command)
        assert done.returncode == 2, done.stderr
        assert not seen.exists()
        *_, line = done.stderr.splitlines()
        assert here.command("sh", "-c", line).returncode == 0
        wait = f"until test -e {seen}; do sleep 0.01; done"
        subprocess.run(["sh", "-c", wait], check=True, timeout=30)
        assert (seen.read_text(), held(here)) == ("0\n", [0])
    finally:
        here.command(*server, "kill-server")
