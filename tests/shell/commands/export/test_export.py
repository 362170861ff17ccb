"""The status as coloured text, as JSON, as metrics for Prometheus, and as a page."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

import reserve_gpu
from reserve_gpu.commands.export import prometheus
from tests.support.export import metrics, values

if TYPE_CHECKING:
    from tests.support.commandline import CommandLine
    from tests.support.here import Here

# -- metrics ---------------------------------------------------------------------------------------


def test_readings_are_in_base_units(here: Here, typed: CommandLine) -> None:
    here.write(
        "gpu\n memory 40960\n used 1024\n utilisation 97\n temperature 71\n power 318\n"
        " power-limit 400\n name NVIDIA A100\ngpu\n compute 5000001 2048\ngpu"
    )
    with here.rival():
        series = metrics(typed("status", "--format", "prometheus").stdout)
    assert {dict(key)["hostname"] for _, key in series} == {reserve_gpu.status().host}
    about = values(series, "info", "index", "uuid", "gpu_uuid", "devicename")
    assert about["0", here.uuid("0"), here.uuid("0"), "NVIDIA A100"] == 1
    assert values(series, "free", "index") == {("0",): 0, ("1",): 0, ("2",): 1}
    assert values(series, "broken", "index") == {("0",): 0, ("1",): 0, ("2",): 0}
    assert values(series, "used_without_reservation", "index")["1",] == 1
    (user,) = {user for _, user in values(series, "idle_seconds", "index", "username")}
    reserved = values(series, "reserved", "index", "username")
    assert reserved == {("0", user): 1, ("1", ""): 0, ("2", ""): 0}
    assert values(series, "waiting", "username") == {("",): 0}
    readings = {
        "memory_used_bytes": 1 << 30,
        "memory_total_bytes": 40 << 30,
        "utilization_ratio": 0.97,
        "temperature_celsius": 71,
        "power_usage_watts": 318,
        "power_limit_watts": 400,
    }
    assert {name: values(series, name, "index")["0",] for name in readings} == readings


def test_the_sensors_of_a_split_gpu_are_reported_once(here: Here) -> None:
    here.write("gpu\n mig on\n power 90\n instance 0\n instance 1\nfail nvmlDeviceGetUUID 0:1 15")
    series = metrics(prometheus.text(reserve_gpu.status()))
    ((_, gpu),) = values(series, "info", "index", "gpu_uuid").keys() - {("0:1", "")}
    assert values(series, "power_usage_watts", "index", "uuid") == {("0", gpu): 90}
    assert values(series, "free", "index") == {("0:0",): 1, ("0:1",): 0}


def test_unknown_values_have_no_samples(here: Here) -> None:
    """A device that can't be read is not free."""
    here.write("gpu\n temperature none\n utilisation none\ngpu")
    here.add("fail nvmlDeviceGetMemoryInfo 0 4\nfail nvmlDeviceGetMemoryInfo_v2 0 4")
    here.add("fail nvmlDeviceGetComputeMode 1 15")
    here.locks.mkdir(mode=0o755, exist_ok=True)
    (here.locks / "mutex.lock").mkdir()
    status = reserve_gpu.status()
    assert status.problem
    series = metrics(prometheus.text(status))
    for name in ("temperature_celsius", "utilization_ratio", "memory_used_bytes"):
        assert ("0",) not in values(series, name, "index")
    assert not values(series, "reserved", "index")
    assert not values(series, "waiting", "hostname")
    assert values(series, "free", "index") == {("1",): 0}
    assert values(series, "broken", "index") == {("0",): 0, ("1",): 1}


# -- other formats ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("terminal")
def test_the_page_is_self_contained_and_for_any_reader(here: Here, typed: CommandLine) -> None:
    here.write("gpu")
    with here.child() as holder:
        holder.reserve("note='until Friday'")
        page = typed("status", "--format", "html").stdout
    assert page.startswith("<!DOCTYPE html>\n")
    for part in ('<meta charset="utf-8">', "prefers-color-scheme: dark", "<table", "until Friday"):
        assert part in page
    assert f"GPUs of {reserve_gpu.status().host}" in page
    assert f"release {holder.pid}" not in page
    assert not re.search(r"\b(src|href)=", page)


def test_json_is_a_short_option_and_the_last_format_wins(here: Here, typed: CommandLine) -> None:
    short, long = (
        json.loads(typed("status", *words).stdout) for words in (["--json"], ["--format", "json"])
    )
    assert {**short, "time": 0} == {**long, "time": 0}
    assert typed("status", "--json", "--format", "text").stdout[0] != "{"


@pytest.mark.parametrize("form", ["json", "html", "prometheus"])
def test_without_a_driver_no_format_has_output(here: Here, typed: CommandLine, form: str) -> None:
    here.write("gpu\nfail nvmlInitWithFlags * 12")
    done = typed("status", "--format", form)
    assert (done.code, done.stdout, done.stderr.count("\n")) == (69, "", 1)
    assert "driver" in done.stderr
