"""Cells of %reserve_gpu, and mistakes in its arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.support.machine import Cell
    from tests.support.shell import Shell

# Two GPUs whose UUIDs begin alike, one of them with a letter in its bus ID, and two plain ones.
FOUR_GPUS = """
gpu
  name GeForce GTX 1050 Ti
  uuid GPU-aaaa1111-0000-0000-0000-000000000000
  bus 0000:0a:00.0
  vbios 86.07.22.00.A8
  memory 4038
gpu
  name GeForce GTX 1080
  uuid GPU-aaaa2222-0000-0000-0000-000000000000
  bus 0001:0b:00.0
  memory 8192
gpu
  memory 16384
gpu
  memory 32768
"""

# Invalid arguments on a machine with these four GPUs.
MISTAKES = [
    *("4", "99999999999999999999", "-1", "1,-1", "1,1", "0 0a:00.0", "2 GPU-aaaa1 0", "GPU-aaaa"),
    *("GPU-ffff", "GPU-", "0f:00.0", "0b:00.0", "0:0", "1gpu2", "1.5", "3-1", "0:3", "0;1"),
    *("\N{ARABIC-INDIC DIGIT ONE}", "\N{SUPERSCRIPT TWO}", "''", ",", "'1", "1\\", "A100"),
    *("gpu 0", "2 GPUs", "count=2", "status", "extend 2h", "all", "*", "0 --optional 1"),
    *("0 --wiat=1h", "-w 1h", "-z 1h", "--nonsense", "--exclude 1", "--help=1", "--release=1"),
    *("--release 1", "--note until May 3", "--note=my thesis", "--note my 'first $x' --wait"),
    *("--note Bob's thesis", "--memory 10 GB", "--min-memory=10 GB 0", "--memory 50 %"),
    *("--for 4 hours", "--for tomorrow", "--for tomorrow 9am", "--until 9am tomorrow"),
    *("--wait 1h 30 min", "--wait=forever", "--name A100 80GB", "--name Voodoo"),
    *("--gpu 0", "--id=3", "-g", "--gpus 2", "--gpus 0,1", "--gpus all", "--gpus 0", "--mem 10"),
    *("--mem 10GB", "--timeout 5m", "--extend 2h", "-t soon", "--count", "-n", "-n 0", "-n two"),
    *("-n 1.5", "-n 5", "1 -n 2", "--min-memory 16", "--min-memory lots", "--min-memory -1"),
    *("--min-memory 1TB", "--status --check", "--status 1", "--check 1", "--join 0 1", "--all"),
    "--hosts lab1",
]


def without_container_warning(text: str) -> str:
    """Return the text without the warning that is printed in containers."""
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("Warning: this container"))


def run_cell(shell: Shell, code: str) -> Cell:
    """Run a cell, and remove the warning about containers from its stderr."""
    cell = shell.run(code)
    cell.stderr = without_container_warning(cell.stderr)
    return cell
