"""Statuses of several machines, each with a real SSH server."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.hosts import Hosts, needs_ssh

if TYPE_CHECKING:
    from subprocess import CompletedProcess

    from tests.support.here import Here


pytestmark = [needs_ssh, pytest.mark.xdist_group("hosts")]


def run_reserve_gpu(lab: Hosts, *words: str) -> CompletedProcess[str]:
    """Run reserve-gpu on the user's machine."""
    return lab.asking.command(sys.executable, "-m", "reserve_gpu", *words)


def test_five_hosts(lab: Hosts) -> None:
    """A status shows five hosts; for a host without an answer, it shows the reason."""
    done = run_reserve_gpu(lab, "status", "--hosts", "lab[1-5]", "nowhere")
    assert done.returncode == 0, done.stderr
    text = done.stdout
    assert text.startswith("4 of 4 GPUs are free: lab1 GPU0 and GPU1, lab2 GPU0 and GPU1.")
    assert "lab3: no answer within 5 s" in text
    assert "lab4: ssh can't find reserve-gpu" in text
    assert "lab5: its reserve_gpu is older" in text
    assert "nowhere: ssh can't connect" in text


def test_metrics(lab: Hosts) -> None:
    """Metrics have the names that ssh uses for the hosts as labels."""
    parser = pytest.importorskip("prometheus_client.parser")
    text = run_reserve_gpu(
        lab, "status", "--format", "prometheus", "--hosts", "lab1", "lab2"
    ).stdout
    families = {f.name: f for f in parser.text_string_to_metric_families(text)}
    free = families["reserve_gpu_free"].samples
    assert sorted(sample.labels["hostname"] for sample in free) == ["lab1"] * 2 + ["lab2"] * 2
    assert len(families["reserve_gpu_waiting"].samples) == 2


def test_no_host_answers(lab: Hosts) -> None:
    """If no host answers, the exit code is 69."""
    assert run_reserve_gpu(lab, "status", "--hosts", "lab4").returncode == 69


def test_magic(lab: Hosts, here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """The magic shows a table for each host."""
    monkeypatch.setenv("PATH", lab.environ()["PATH"])
    shell = here.shell()
    cell = shell.run("%reserve_gpu --status --hosts lab1 lab2")
    assert "4 of 4 GPUs are free" in cell.shown
    assert cell.values[0]["text/html"].count("<table") == 2
    assert shell.run("%reserve_gpu --hosts lab1").error == "UsageError"


def test_release_on_another_host(lab: Hosts) -> None:
    """The status shows the command that releases the user's GPU on another host."""
    with lab.machines["lab1"].kernel(JPY_SESSION_NAME="/home/a/far.ipynb") as kernel:
        kernel.run("%reserve_gpu")
        words = (sys.executable, "-m", "reserve_gpu", "status", "--hosts", "lab1")
        typed = f"ssh lab1 reserve-gpu release {kernel.pid}"
        assert typed in lab.asking.typed(*words).stdout
        done = lab.asking.command("ssh", "lab1", "reserve-gpu", "release", "far.ipynb")
        assert f"(pid {kernel.pid})" in done.stdout
        visible = kernel.run("import os; print([os.environ['CUDA_VISIBLE_DEVICES']])").stdout
        assert visible == "['']\n"
    done = run_reserve_gpu(lab, "release", "lab1:far.ipynb")
    assert done.returncode == 2
    assert "ssh -t lab1 reserve-gpu release far.ipynb" in done.stderr
