"""Install kernelspecs whose kernels run on other machines."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.support.commandline import CommandLine
    from tests.support.here import Here

# An old ipykernel sets an environment variable when it is first imported, so import it now.
pytest.importorskip("ipykernel.kernelspec")


def replace_ssh(here: Here, script: str) -> None:
    """Put a shell script that is called ssh first in PATH."""
    path = here.folder / "bin" / "ssh"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    os.environ["PATH"] = f"{path.parent}:{os.environ['PATH']}"


def install_for_hosts(here: Here, typed: CommandLine, *options: str) -> dict[str, Any]:
    """Install a kernelspec for other machines, and return its content."""
    replace_ssh(here, f"exec {sys.executable} -m reserve_gpu status --json")
    done = typed("kernel", "install", "--prefix", ".", *options)
    assert (done.code, done.stderr) == (0, "")
    path = done.stdout.splitlines()[0].rpartition(" in ")[2]
    spec: dict[str, Any] = json.loads((Path(path) / "kernel.json").read_text())
    return spec


def test_a_kernel_is_installed_although_no_machine_responds(here: Here, typed: CommandLine) -> None:
    replace_ssh(here, "echo 'ssh: connect to host: Connection refused' >&2; exit 255")
    done = typed("kernel", "install", "--prefix", ".", "--hosts", "lab1", "lab2")
    assert done.code == 69
    assert done.stderr.startswith("Installed ")
    for host in ("lab1", "lab2"):
        assert f"\n{host}: ssh " in done.stderr


def test_the_kernelspec_has_hosts_and_request(here: Here, typed: CommandLine) -> None:
    spec = install_for_hosts(here, typed, "--hosts", "lab1,lab2", "-n", "2", "--gpu-name", "A100")
    assert spec["display_name"] == "Python 3 (GPU in lab1,lab2: count 2, name A100)"
    provisioner = spec["metadata"]["kernel_provisioner"]
    assert provisioner["provisioner_name"] == "reserve-gpu-hosts"
    assert provisioner["config"] == {
        "hosts": ["lab1,lab2"],
        "wishes": ["--count=2", "--name=A100", "--idle=2h", "--if-wanted"],
        "remote_kernel_name": "python3-gpu",
    }


@pytest.mark.parametrize("end", ["--for=8h", "--idle=30m", "--until=18:00"])
def test_a_given_end_replaces_the_default_one(here: Here, typed: CommandLine, end: str) -> None:
    spec = install_for_hosts(here, typed, "--hosts", "lab1", end)
    assert spec["metadata"]["kernel_provisioner"]["config"]["wishes"] == [end]
