"""What the status is given out as: coloured text, a page for browsers, metrics for Prometheus."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from typing import TYPE_CHECKING

import pytest

import reserve_gpu
from reserve_gpu.commands.export import prometheus
from reserve_gpu.model.devices import Device, State, Usage
from reserve_gpu.model.holders import DeviceStatus
from reserve_gpu.model.requests import ReservationTerms, Size
from reserve_gpu.render.layout import Layout
from reserve_gpu.render.phrases import STRONG
from reserve_gpu.render.pictures import Picture
from reserve_gpu.render.progress import Frame, Terminal
from reserve_gpu.render.status_view import Status
from tests.support.commandline import CommandLine
from tests.support.holders import a_holder

if TYPE_CHECKING:
    from tests.support.here import Here

from tests.support.export import Tags, metrics, values

COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture
def typed(here: Here, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    """Run `reserve-gpu` on the machine of this process."""
    return CommandLine(capsys)


class Tty(io.StringIO):
    """A terminal, as far as Python asks."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_colours_in_a_pipe(here: Here, typed: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe gets colours where they are asked for, and the same words with them and without."""
    monkeypatch.delenv("COLUMNS", raising=False)
    plain = typed("status").stdout
    assert "\x1b" not in plain
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("FORCE_COLOR", "1")
    coloured = typed("status").stdout
    assert "\x1b[" in coloured
    assert COLOURS.sub("", coloured).splitlines()[1:] == plain.splitlines()[1:]


def test_colours_for_a_screen_behind_a_pipe(
    here: Here, typed: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In colours the lines are as wide as `watch` says that its screen is; in a log they are whole.

    https://man7.org/linux/man-pages/man1/watch.1.html
    """
    monkeypatch.setenv("COLUMNS", "50")
    with here.rival(note="a long story " * 10):
        plain = typed("status").stdout.splitlines()
        monkeypatch.delenv("NO_COLOR")
        monkeypatch.setenv("FORCE_COLOR", "1")
        coloured = COLOURS.sub("", typed("status").stdout).splitlines()
    assert {len(line) > 50 for line in coloured if "long story" in line} == {False}
    assert {len(line) > 50 for line in plain if "long story" in line} == {True}


@pytest.mark.parametrize(("name", "are_some"), [("NO_COLOR", False), ("NOTHING", True)])
def test_no_colours_in_a_terminal(
    here: Here, monkeypatch: pytest.MonkeyPatch, name: str, *, are_some: bool
) -> None:
    """With NO_COLOR neither the status nor what is live has colours in a terminal."""
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv(name, "1")
    monkeypatch.setenv("TERM", "xterm")
    live = Tty()
    Terminal(live).show(Frame(Picture(Layout([(("words", STRONG),)]))))
    assert ("\x1b[1m" in live.getvalue()) is are_some
    monkeypatch.setattr(sys, "stdout", Tty())
    assert ("\x1b[" in reserve_gpu.status().picture().to_text()) is are_some


# -- for Prometheus --------------------------------------------------------------------------------

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def test_metrics(here: Here, typed: CommandLine) -> None:
    """Each device has its state and its readings in base units; who has it is a label."""
    here.write(
        "gpu\n memory 40960\n used 1024\n utilisation 97\n temperature 71\n power 318\n"
        " power-limit 400\n name NVIDIA A100\ngpu\n compute 5000001 2048\ngpu"
    )
    with here.rival():
        series = metrics(typed("status", "--format", "prometheus").stdout)
    status = reserve_gpu.status()
    me = status.rows[0].device
    assert isinstance(me, Device)
    assert {dict(key)["hostname"] for _, key in series} == {status.host}
    about = values(series, "info", "index", "uuid", "gpu_uuid", "devicename")
    assert about["0", me.uuid, me.uuid, "NVIDIA A100"] == 1
    assert values(series, "free", "index") == {("0",): 0, ("1",): 0, ("2",): 1}
    assert values(series, "broken", "index") == {("0",): 0, ("1",): 0, ("2",): 0}
    assert values(series, "used_without_reservation", "index")["1",] == 1
    (user,) = {user for _, user in values(series, "idle_seconds", "index", "username")}
    reserved = values(series, "reserved", "index", "username")
    assert reserved == {("0", user): 1, ("1", ""): 0, ("2", ""): 0}
    assert values(series, "waiting", "username") == {("",): 0}
    assert values(series, "memory_used_bytes", "index")["0",] == 1 << 30
    assert values(series, "memory_total_bytes", "index")["0",] == 40 << 30
    assert values(series, "utilization_ratio", "index")["0",] == 0.97
    assert values(series, "temperature_celsius", "index")["0",] == 71
    assert values(series, "power_usage_watts", "index")["0",] == 318
    assert values(series, "power_limit_watts", "index")["0",] == 400


def test_metrics_of_instances(here: Here) -> None:
    """An instance has metrics of its own; what the GPU measures is there once, as the GPU's."""
    here.write("gpu\n mig on\n power 90\n instance 0\n instance 1\nfail nvmlDeviceGetUUID 0:1 15")
    series = metrics(prometheus.text(reserve_gpu.status()))
    ((_, gpu),) = values(series, "info", "index", "gpu_uuid").keys() - {("0:1", "")}
    assert values(series, "power_usage_watts", "index", "uuid") == {("0", gpu): 90}
    assert values(series, "free", "index") == {("0:0",): 1, ("0:1",): 0}


def test_metrics_of_parts(here: Here) -> None:
    """Promises and uses are sums of each user's, what is left is the device's; in bytes."""
    here.write(f"gpu\n memory 40960\n compute {os.getpid()} 300\ngpu\n memory 40960")
    with here.rival(part_mib=1024), here.rival(part_mib=3072):
        series = metrics(prometheus.text(reserve_gpu.status()))
    ((_, user),) = values(series, "user_memory_promised_bytes", "index", "username")
    assert values(series, "user_memory_promised_bytes", "index") == {("0",): 4 << 30}
    assert values(series, "user_memory_used_bytes", "index", "username") == {("0", user): 600 << 20}
    assert values(series, "memory_promisable_bytes", "index") == {
        ("0",): 36 << 30,
        ("1",): 40 << 30,
    }


def test_metrics_of_parts_that_are_not_known(here: Here) -> None:
    """Of a user of whom one process's use or size is not known there is no sum."""
    holders = (
        a_holder(1, "alice", terms=ReservationTerms(Size(9.0))),
        a_holder(2, "alice", used_mib=7.0),
        a_holder(3, "bob"),
    )
    row = DeviceStatus(Device(0, "GPU-a"), State.RESERVED, Usage(), holders=(*holders, a_holder(4)))
    row = row._replace(
        holders=(*row.holders, a_holder(5, "\n}x", terms=ReservationTerms(Size(2.0)), used_mib=1.0))
    )
    series = metrics(prometheus.text(Status((row,))))
    for name, mib in (("user_memory_promised_bytes", 2), ("user_memory_used_bytes", 1)):
        assert values(series, name, "username") == {("\N{REPLACEMENT CHARACTER}}x",): mib << 20}
    assert values(series, "memory_promisable_bytes", "index") == {}


def test_metrics_of_what_is_not_known(here: Here) -> None:
    """What can't be seen has no sample, least of all one that says that a GPU is free."""
    here.write("gpu\n temperature none\n utilisation none\ngpu")
    here.add("fail nvmlDeviceGetMemoryInfo 0 4\nfail nvmlDeviceGetMemoryInfo_v2 0 4")
    here.add("fail nvmlDeviceGetComputeMode 1 15")
    here.locks.mkdir(mode=0o755, exist_ok=True)
    (here.locks / "mutex.lock").mkdir()
    status = reserve_gpu.status()
    assert status.problem
    series = metrics(prometheus.text(status))
    unknown = "temperature_celsius", "utilization_ratio", "memory_used_bytes"
    assert [values(series, name, "index").get(("0",)) for name in unknown] == [None] * 3
    assert not values(series, "reserved", "index")
    assert not values(series, "waiting", "hostname")
    assert values(series, "free", "index") == {("1",): 0}
    assert values(series, "broken", "index") == {("0",): 0, ("1",): 1}


@pytest.mark.usefixtures("terminal")
def test_page(here: Here, typed: CommandLine) -> None:
    """The page has a title, its encoding and both themes, stands alone, and is for any reader."""
    here.write("gpu")
    with here.child() as holder:
        holder.reserve("note='until Friday'")
        text = typed("status", "--format", "html").stdout
    assert text.startswith("<!DOCTYPE html>\n")
    tags = Tags(text)
    metas = [attributes for tag, attributes in tags.elements if tag == "meta"]
    assert {"charset": "utf-8"} in metas
    assert f"GPUs of {reserve_gpu.status().host}" in tags.text
    assert "until Friday" in tags.text
    assert "You hold" not in tags.text
    assert "prefers-color-scheme: dark" in tags.text
    assert "table" in dict(tags.elements)
    assert not [
        name for _, attributes in tags.elements for name in attributes if name in ("src", "href")
    ]


# -- all of them -----------------------------------------------------------------------------------


def test_json_in_short(here: Here, typed: CommandLine) -> None:
    """`--json` is `--format json`, and the last one counts."""
    short, long = (
        json.loads(typed("status", *w).stdout) for w in (["--json"], ["--format", "json"])
    )
    assert {**short, "time": 0} == {**long, "time": 0}
    assert typed("status", "--json", "--format", "text").stdout[0] != "{"


@pytest.mark.parametrize("form", ["json", "html", "prometheus"])
def test_without_a_driver(here: Here, typed: CommandLine, form: str) -> None:
    """Where there is no driver nothing is given out, one line says why, and the exit code is 69."""
    here.write("gpu\nfail nvmlInitWithFlags * 12")
    done = typed("status", "--format", form)
    assert (done.code, done.stdout, done.stderr.count("\n")) == (69, "", 1)
    assert "driver" in done.stderr
