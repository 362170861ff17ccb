"""Several machines in one picture: which are meant, what each answers, and how it is shown."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.hosts import Hosts, needs_ssh

if TYPE_CHECKING:
    from subprocess import CompletedProcess

    from tests.support.here import Here


# -- over ssh ------------------------------------------------------------------------------------

over_ssh = [pytest.mark.full, needs_ssh, pytest.mark.xdist_group("hosts")]
OLDER = """#!/bin/sh
echo 'Welcome to {lab5}!'
echo '{"version": 0, "devices": []}'
"""


def command(lab: Hosts, *words: str) -> CompletedProcess[str]:
    return lab.asking.command(sys.executable, "-m", "reserve_gpu", *words)


class TestOverSsh:
    """Real servers, each with a machine of the stand-in driver."""

    pytestmark = over_ssh

    def test_one_picture(self, lab: Hosts) -> None:
        """Five hosts are one picture; each that does not answer is a line with a way out."""
        done = command(lab, "status", "--hosts", "lab[1-5]", "nowhere")
        assert done.returncode == 0, done.stderr
        text = done.stdout
        assert text.startswith("4 of 4 GPUs are free: lab1 GPU0 and GPU1, lab2 GPU0 and GPU1.")
        assert "lab3: no answer within 5 s. Try: ssh lab3" in text
        assert "lab4: ssh can't find reserve-gpu there. Install it, or link it" in text
        assert "lab5: its reserve_gpu is older than this one (format 0). Update it on lab5." in text
        assert "nowhere: ssh can't connect: Could not resolve hostname nowhere" in text

    def test_json(self, lab: Hosts) -> None:
        """In JSON each host has its status, or the problem in place of it."""
        done = command(lab, "status", "--json", "--hosts", "lab1", "lab5")
        first, second = json.loads(done.stdout)["hosts"]
        assert [first["name"], second["name"]] == ["lab1", "lab5"]
        assert len(first["status"]["devices"]) == 2
        assert first["problem"] is None
        assert second["status"] is None
        assert "older" in second["problem"]

    def test_page(self, lab: Hosts) -> None:
        """The page for browsers has a section for each host."""
        page = command(lab, "status", "--format", "html", "--hosts", "lab1", "lab2").stdout
        assert page.count("<table") == 2
        assert "<title>GPUs of lab1, lab2</title>" in page

    def test_metrics(self, lab: Hosts) -> None:
        """Metrics are told apart by the names that ssh has for the hosts."""
        parser = pytest.importorskip("prometheus_client.parser")
        text = command(lab, "status", "--format", "prometheus", "--hosts", "lab1", "lab2").stdout
        families = {f.name: f for f in parser.text_string_to_metric_families(text)}
        free = families["reserve_gpu_free"].samples
        assert sorted(sample.labels["hostname"] for sample in free) == ["lab1"] * 2 + ["lab2"] * 2
        assert len(families["reserve_gpu_waiting"].samples) == 2

    def test_nobody_answers(self, lab: Hosts) -> None:
        """If no host answers, the exit code says so."""
        assert command(lab, "status", "--hosts", "lab4").returncode == 69

    def test_a_host_without_a_driver(self, lab: Hosts) -> None:
        """What reserve_gpu says on a host is its line in the picture."""
        lab.machines["lab2"].write("fail nvmlInit_v2 * 9")
        try:
            text = command(lab, "status", "--hosts", "lab1", "lab2").stdout
        finally:
            lab.machines["lab2"].use("two")
        assert "lab2: " in text
        assert "driver" in text.partition("lab2: ")[2]

    def test_the_magic(self, lab: Hosts, here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
        """In a notebook the magic shows the same, as a table for each host."""
        monkeypatch.setenv("PATH", lab.environ()["PATH"])
        shell = here.shell()
        cell = shell.run("%reserve_gpu --status --hosts lab1 lab2")
        assert "4 of 4 GPUs are free" in cell.shown
        assert cell.values[0]["text/html"].count("<table") == 2
        assert "Use --hosts together with --status" in shell.run("%reserve_gpu --hosts lab1").all

    def test_ones_own_is_released_from_here(self, lab: Hosts) -> None:
        """What one holds on a host has a line that releases it from here."""
        with lab.machines["lab1"].kernel(JPY_SESSION_NAME="/home/a/far.ipynb") as kernel:
            kernel.run("%reserve_gpu")
            words = (sys.executable, "-m", "reserve_gpu", "status", "--hosts", "lab1")
            typed = f"ssh lab1 reserve-gpu release {kernel.pid}"
            assert typed in lab.asking.typed(*words).stdout
            done = lab.asking.command("ssh", "lab1", "reserve-gpu", "release", "far.ipynb")
            assert done.stdout == f"Released GPU0 of far.ipynb (pid {kernel.pid}).\n"
            visible = kernel.run("import os; print([os.environ['CUDA_VISIBLE_DEVICES']])").stdout
            assert visible == "['']\n"
        done = command(lab, "release", "lab1:far.ipynb")
        assert done.returncode == 2
        assert done.stderr.endswith("Run: ssh -t lab1 reserve-gpu release far.ipynb\n")
