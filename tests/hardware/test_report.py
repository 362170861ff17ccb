"""The page and time limits of the hardware tests, and a run on the stand-in driver."""

from __future__ import annotations

import getpass
import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.hardware.report import (
    one_line,
)
from tests.support.machine import ROOT, Machine

if TYPE_CHECKING:
    from pathlib import Path

UUID = "GPU-9e3779b9-79b9-49e3-89b9-000000000001"
# Promises and facts that need real hardware, PyTorch, root, or an option.
UNKNOWN_ON_THE_STAND_IN = re.compile(
    "nvidia-smi|MPS|PyTorch|nvitop|managed|ordinary|root|namespace"
)
UUID_LIKE = re.compile("GPU-[0-9a-f]{8}-")
RUN = (sys.executable, "-m", "tests.hardware")


def test_details_contain_no_private_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A detail is one line without UUIDs, user names, host names and home folders."""
    monkeypatch.setenv("LOGNAME", "alice")
    assert getpass.getuser() == "alice"
    host = os.uname().nodename
    text = f"reserved by alice,\n  /home/bob/train.ipynb on {host} ({UUID}), palice {ROOT}"
    assert one_line(text) == "reserved by ..., .../train.ipynb on ... (GPU-...), palice ..."


@pytest.mark.process
def test_missing_driver(tmp_path: Path) -> None:
    """Without an NVIDIA driver, the command says so in one line."""
    environ = {**os.environ, "STAND_IN_SCENARIO": str(tmp_path / "none")}
    done = subprocess.run(
        RUN, env=environ, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 2
    assert (
        done.stderr == "No NVIDIA driver with a GPU: this is the stand-in driver: use --stand-in\n"
    )


@pytest.mark.process
def test_description(tmp_path: Path) -> None:
    """The description of a machine is a scenario of the stand-in driver, without its UUIDs."""
    argv = [*RUN, "--stand-in", "--describe"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "GPU-" not in done.stdout
    first, second = done.stdout.split("--- scenario\n")[1:]
    machine = Machine(tmp_path)
    machine.write(first)
    code = "import reserve_gpu; print(*map(repr, reserve_gpu.status().to_dict()['devices']))"
    shown = machine.python(code).stdout
    assert "NVIDIA H100 80GB HBM3" in shown
    assert "'memory_total_mib': 81559" in shown
    assert "0000:3B:00.0" in second


@pytest.mark.full
def test_they_run_to_their_end(tmp_path: Path) -> None:
    """On the stand-in driver, no promise is broken, and every row that it can show has a result."""
    output = tmp_path / "report.md"
    environ = {k: v for k, v in os.environ.items() if k != "PYTEST_ADDOPTS"}
    done = subprocess.run(
        [*RUN, "--stand-in", f"--output={output}"],
        env=environ, cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    text = output.read_text()
    assert not UUID_LIKE.search(text)
    assert not re.search(rf"\b{re.escape(os.uname().nodename)}\b", text)
    lines = text.splitlines()
    unknown = [line for line in lines if "UNKNOWN" in line and ", 0 FAIL, " not in line]
    assert [line for line in unknown if not UNKNOWN_ON_THE_STAND_IN.search(line)] == []
    assert sum(line.startswith("PASS ") for line in lines) > 60
