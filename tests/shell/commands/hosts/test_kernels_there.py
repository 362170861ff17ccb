"""Kernels for other machines: how they are installed here, and what is kept for them there."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.commandline import CommandLine

if TYPE_CHECKING:
    from tests.support.here import Here

# Here, as old ones set an environment variable when jupyter_client first imports them.
pytest.importorskip("ipykernel.kernelspec")


@pytest.fixture
def typed(here: Here, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    """Run `reserve-gpu` on the machine of this process."""
    return CommandLine(capsys)


def ssh(here: Here, does: str) -> None:
    """Let a script stand in for ssh, whatever the host."""
    script = here.folder / "bin" / "ssh"
    script.parent.mkdir(exist_ok=True)
    script.write_text(f"#!/bin/sh\n{does}\n")
    script.chmod(0o755)
    os.environ["PATH"] = f"{script.parent}:{os.environ['PATH']}"


def test_no_machine_that_answers(here: Here, typed: CommandLine) -> None:
    """A kernel for machines of which none can be reached is installed, with why, and exits so."""
    ssh(here, "echo 'ssh: connect to host: Connection refused' >&2; exit 255")
    done = typed("kernel", "install", "--prefix", ".", "--hosts", "lab1", "lab2")
    assert done.code == 69
    assert done.stderr.startswith("Installed the kernel ")
    assert (
        "\nWarning: no machine is responding, so the kernel can't start now.\nlab1: ssh can't"
        in done.stderr
    )
    assert "\nlab2: ssh can't connect: connect to host: Connection refused." in done.stderr


def on_hosts(here: Here, typed: CommandLine, *words: str) -> dict[str, Any]:
    """Install a kernel for other machines; return its kernelspec."""
    ssh(here, f"exec {sys.executable} -m reserve_gpu status --json")
    done = typed("kernel", "install", "--prefix", ".", *words)
    assert (done.code, done.stderr) == (0, "")
    path = done.stdout.splitlines()[0].rpartition(" in ")[2]
    spec: dict[str, Any] = json.loads((Path(path) / "kernel.json").read_text())
    return spec


def test_a_kernel_for_other_machines(here: Here, typed: CommandLine) -> None:
    """Its kernelspec names our provisioner, the hosts and the wishes, and says what it is."""
    spec = on_hosts(here, typed, "--hosts", "lab1,lab2", "-n", "2", "--gpu-name", "A100")
    assert spec["display_name"] == "Python 3 (GPU in lab1,lab2: count 2, name A100)"
    provisioner = spec["metadata"]["kernel_provisioner"]
    assert provisioner["provisioner_name"] == "reserve-gpu-hosts"
    assert provisioner["config"] == {
        "hosts": ["lab1,lab2"],
        "wishes": ["--count=2", "--name=A100", "--idle=2h", "--if-wanted"],
        "remote_kernel_name": "python3-gpu",
    }


@pytest.mark.parametrize("end", [("--for", "8h"), ("--idle", "30m"), ("--until", "18:00")])
def test_an_end_of_one_s_own(here: Here, typed: CommandLine, end: tuple[str, str]) -> None:
    """With an end of one's own the kernel has no other one."""
    spec = on_hosts(here, typed, "--hosts", "lab1", *end)
    wishes = spec["metadata"]["kernel_provisioner"]["config"]["wishes"]
    assert wishes == [f"{end[0]}={end[1]}"]


@pytest.mark.parametrize("words", [["--hosts"], ["--hosts", "-x"], ["--hosts", "a;b"]])
def test_hosts_that_make_no_sense(here: Here, typed: CommandLine, words: list[str]) -> None:
    """What names no host is said at once, and nothing is installed."""
    done = typed("kernel", "install", "--prefix", ".", *words)
    assert done.code == 2
    assert not (here.folder / "share").exists()


def test_without_sshpyk(typed: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where parts of Jupyter are missing, one line says how to get them and sshpyk."""
    for module in ("ipykernel", "sshpyk"):
        monkeypatch.setitem(sys.modules, module, None)
    done = typed("kernel", "install", "--prefix", ".", "--hosts", "lab1")
    assert (done.code, done.stdout) == (2, "")
    assert done.stderr.endswith("-m pip install ipykernel 'sshpyk>=1.25'\n")
    assert done.stderr.count("\n") == 1
