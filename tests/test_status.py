"""%reserve_gpu --status: every device, who uses it, who has it, and who waits."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.machine import Child, Machine


def status(child: Child) -> dict[str, Any]:
    found: dict[str, Any] = child.run("reserve_gpu.status().to_dict()").value
    return found


def states(child: Child) -> dict[str, str]:
    return {device["label"]: device["state"] for device in status(child)["devices"]}


SCENARIOS = [
    ("two", {"GPU0": "free", "GPU1": "free"}),
    ("busy", {"GPU0": "busy", "GPU1": "busy"}),
    ("desktop", {"GPU0": "free", "GPU1": "free"}),
    ("lost", {"GPU0": "free", "GPU1": "broken", "GPU2": "free"}),
    (
        "mig",
        {"GPU0": "free", "GPU1:0": "free", "GPU1:2": "free", "GPU1:5": "free", "GPU2": "broken"},
    ),
]


@pytest.mark.parametrize(("scenario", "expected"), SCENARIOS, ids=[s for s, _ in SCENARIOS])
def test_a_state_for_each_device(machine: Machine, scenario: str, expected: dict[str, str]) -> None:
    """Each device, MIG instances too, has a row with its state, also one that can't be read."""
    machine.use(scenario)
    with machine.child() as child:
        assert states(child) == expected


def test_readings_that_fail_are_a_row(machine: Machine) -> None:
    """Where a reading fails the row says broken and why; the other devices are as they are."""
    machine.add("fail nvmlDeviceGetMemoryInfo_v2 0 999")
    with machine.child() as child:
        first, second = status(child)["devices"]
    assert first["state"] == "broken"
    assert "Unknown Error" in first["reason"]
    assert second["state"] == "free"


def test_who_holds_and_who_uses(machine: Machine) -> None:
    """A holder is named with pid, user and note, a process without a reservation is marked."""
    with machine.child() as holder, machine.child() as child:
        holder.reserve("0, note='until Friday'")
        machine.write(f"gpu\n compute {holder.pid} 300\ngpu\n compute {child.pid} 700")
        first, second = status(child)["devices"]
        mine = status(holder)["devices"][0]
    assert first["state"] == "reserved"
    assert first["holder"]["pid"] == holder.pid
    assert first["holder"]["note"] == "until Friday"
    assert first["holder"]["confirmed"]
    assert [process["pid"] for process in first["processes"]] == [holder.pid]
    assert first["processes"][0]["command"].startswith("python")
    assert not first["is_reserved_but_idle"]
    assert (first["is_this_process"], mine["is_this_process"]) == (False, True)
    assert second["state"] == "busy"
    assert second["is_used_without_reservation"]
    assert second["processes"][0]["memory_mib"] == 700


def test_reserved_but_idle_is_marked(machine: Machine) -> None:
    """A reserved device on which nothing runs is marked as such, as is one that is shared."""
    with machine.child() as holder, machine.child() as sharer, machine.child() as child:
        holder.reserve("0")
        sharer.reserve("1, share=True")
        assert [device["is_reserved_but_idle"] for device in status(child)["devices"]] == [True] * 2
        assert status(child)["devices"][1]["holder"]["pid"] == sharer.pid


def test_looking_takes_nothing(machine: Machine) -> None:
    """While statuses are read without end, every reservation of a free device succeeds."""
    with machine.child() as looker, machine.child() as child:
        looker.run("import time")
        looker.send(
            "end = time.monotonic() + 2\nlooks = 0\n"
            "while time.monotonic() < end:\n reserve_gpu.status(); looks += 1\nlooks"
        )
        for _ in range(100):
            assert child.reserve("count=2").value == "0,1"
            child.run("reserve_gpu.release()")
        assert looker.answer().value > 0


def test_while_the_mutex_is_held(machine: Machine) -> None:
    """Holders are named, and the rest is said to be unknown, while another holds the mutex."""
    with machine.child() as holder, machine.child() as child:
        holder.reserve("1")
        holder.run(
            "from reserve_gpu.locks import LockDirectory\n"
            "directory = LockDirectory().__enter__(); mutex = directory.mutex(); mutex.__enter__()"
        )
        found = status(child)
    assert [device["state"] for device in found["devices"]] == ["free", "reserved"]
    assert str(holder.pid) in found["problem"]


def test_without_a_lock_directory(machine: Machine) -> None:
    """Without a lock directory the devices are there, and the reason is said."""
    with machine.child(RESERVE_GPU_LOCK_DIR="/dev/null") as child:
        found = status(child)
    assert [device["state"] for device in found["devices"]] == ["free", "free"]
    assert "/dev/null" in found["problem"]


def test_without_a_driver(machine: Machine) -> None:
    """Without a driver the magic says so in one line and stops nothing; status() raises."""
    done = machine.ipython("%reserve_gpu --status", "print('went on')", LD_LIBRARY_PATH="")
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "went on"
    assert len(done.stdout.splitlines()) == 2
    with machine.child(LD_LIBRARY_PATH="") as child:
        assert child.run("reserve_gpu.status()").error == "NoDriverError"


class Cells(HTMLParser):
    """The text of each cell of a table, and the names of all tags."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.tags: set[str] = set()
        self.feed(html)

    def handle_starttag(self, tag: str, _: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data


HOSTILE = "<script>alert(1)</script>\x1b[31m\u202e"


def test_three_ways_say_the_same(machine: Machine) -> None:
    """Text, HTML and JSON agree cell by cell, and what is foreign stays text."""
    machine.write("gpu\n name <b>A&B</b>\ngpu\n compute 1 5000")
    with machine.child() as holder, machine.kernel() as kernel:
        holder.reserve(f"0, note={HOSTILE!r}")
        shown = kernel.run("%reserve_gpu --status").values[0]
        told = json.loads(kernel.run("%reserve_gpu --status --json").stdout)
    table = Cells(shown["text/html"])
    assert table.tags <= {"table", "thead", "tbody", "tr", "th", "td", "b", "meter", "div"}
    for row, line, device in zip(
        table.rows, shown["text/plain"].splitlines(), [None, *told["devices"]], strict=True
    ):
        for cell in filter(None, row):
            assert re.sub(r" for .*?:", "", cell)[:20] in re.sub(r" for .*?:", "", line)
        if device:
            assert row[0] == str(device["index"])
            assert row[5] == device["state"]
    assert "<script>" in table.rows[1][-1]
    assert "<script>" not in shown["text/html"]
    assert "\x1b" not in shown["text/plain"] + shown["text/html"]
    assert "\u202e" not in shown["text/plain"] + shown["text/html"]


def test_json_goes_with_status(machine: Machine) -> None:
    """--json alone is refused in one line."""
    done = machine.ipython("%reserve_gpu --json")
    assert done.returncode == 1
    assert done.stderr == "UsageError: --json goes with --status.\n"
