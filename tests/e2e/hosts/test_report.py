"""`reserve-gpu report` over SSH."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.hosts import Hosts, needs_ssh

if TYPE_CHECKING:
    from collections.abc import Iterator
    from subprocess import CompletedProcess

    from tests.support.machine import Machine

WRITE_HISTORY = """
import time
from reserve_gpu.log import log_writer, places
from reserve_gpu.log.log_lines import Kind, LogLine
at = time.time() - 7200
log_writer.append(places.to_write(None), [
    LogLine(Kind.RESERVED, f"a{n}", at, at, at + 3600, 3600.0, 0.0, 3600.0, gpu="GPU-1",
            label="GPU0", name=f"lab{HOURS}.ipynb") for n in range(HOURS)])
"""


def write_history(machine: Machine, hours: int) -> None:
    """Log so many idle GPU-hours on a host."""
    config = machine.home / ".config"
    config.mkdir(exist_ok=True)
    (config / "reserve_gpu.toml").write_text("history = true\n")
    name = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', machine.folder.name]
    prefix = name if not os.geteuid() else []
    code = WRITE_HISTORY.replace("HOURS", str(hours))
    done = machine.command(*prefix, sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Start two hosts with histories, one with an older version, and one that hangs."""
    folder = tmp_path_factory.mktemp("hosts")
    old = folder / "old"
    old.mkdir()
    (old / "reserve-gpu").write_text("#!/bin/sh\necho 'There is no command report.' >&2; exit 2\n")
    (old / "reserve-gpu").chmod(0o755)
    with Hosts(folder, "lab1", "lab2", "lab3", "lab4", paths={"lab3": f"{old}:/usr/bin"}) as hosts:
        for number, name in enumerate(("lab1", "lab2"), 1):
            write_history(hosts.machines[name], number)
        hosts.freeze("lab4")
        yield hosts


def report(hosts: Hosts, *options: str) -> CompletedProcess[str]:
    """Run `reserve-gpu report` on the machine that knows the hosts."""
    return hosts.asking.command(sys.executable, "-m", "reserve_gpu", "report", *options)


@needs_ssh
@pytest.mark.xdist_group("hosts")
def test_report_totals_the_hosts(hosts: Hosts) -> None:
    """The report has a row per GPU, named after its host, and the problem of each other host."""
    done = report(hosts, "--json", "--by", "gpu", "--hosts", "lab[1-4]")
    assert done.returncode == 0, done.stderr
    fields = json.loads(done.stdout)
    rows = {row["name"]: row["reserved_hours"] for row in fields["rows"]}
    assert rows == {"lab1:GPU0": 1, "lab2:GPU0": 2}
    assert fields["longest_idle"][0]["gpus"] in (["lab1:GPU0"], ["lab2:GPU0"])
    problems = {each["host"]: each["problem"] for each in fields["problems"]}
    assert {*problems} == {"lab3", "lab4"}
    assert "no command report" in problems["lab3"]
    assert "ssh lab4" in problems["lab4"]


@needs_ssh
@pytest.mark.xdist_group("hosts")
def test_report_without_any_answer_fails(hosts: Hosts) -> None:
    assert report(hosts, "--hosts", "lab3").returncode == 69
