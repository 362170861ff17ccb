"""%reserve_gpu --status: every device, who uses it, who has it, and who waits."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import pwd
import re
import struct
import subprocess
import sys
import termios
import time
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import pytest

from tests.machine import LIMIT_S, ROOT, TAKE_THE_MUTEX
from tests.test_machines import CONTAINER, behind, on_a_host
from tests.test_wait import read, wait_for

if TYPE_CHECKING:
    from pathlib import Path

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
    (who,) = first["holders"]
    assert first["state"] == "reserved"
    assert (who["pid"], who["note"], who["confirmed"]) == (holder.pid, "until Friday", True)
    assert who["user"] == pwd.getpwuid(os.getuid()).pw_name
    assert [process["pid"] for process in first["processes"]] == [holder.pid]
    assert first["processes"][0]["command"].startswith("python")
    assert not first["is_reserved_but_idle"]
    assert (first["is_this_process"], mine["is_this_process"]) == (False, True)
    assert second["state"] == "busy"
    assert second["is_used_without_reservation"]
    assert second["processes"][0]["memory_mib"] == 700


def test_whose_processes_are_on_a_reserved_device(machine: Machine) -> None:
    """A holder's children count as its own; where only strangers are, it is reserved but idle."""
    machine.write("gpu\n" * 3)
    with machine.child() as holder, machine.child() as stranger, machine.child() as child:
        holder.reserve("'0,1,2'")
        holder.run("import subprocess; helper = subprocess.Popen(['sleep', '1000'])")
        helper = holder.run("helper.pid").value
        both = f" compute {helper} 300\n compute {stranger.pid} 200\n"
        machine.write(f"gpu\n compute {helper} 300\ngpu\n compute {stranger.pid} 9\ngpu\n{both}")
        found = status(child)["devices"]
        holder.run("helper.kill()")
    assert [one["state"] for one in found] == ["reserved"] * 3
    assert [one["is_reserved_but_idle"] for one in found] == [False, True, False]
    assert [one["is_used_without_reservation"] for one in found] == [False, True, True]
    assert [process["has_reserved"] for process in found[2]["processes"]] == [True, False]


def test_all_who_share_are_named(machine: Machine) -> None:
    """Who holds a device for itself, and all who share it, are listed; this process comes first."""
    with machine.child() as holder, machine.child() as one, machine.child() as other:
        holder.reserve("0")
        one.reserve("0, share=True")
        other.reserve("0, share=True")
        pids = [who["pid"] for who in status(one)["devices"][0]["holders"]]
        assert states(other) == {"GPU0": "reserved", "GPU1": "free"}
    assert pids[0] == one.pid
    assert set(pids) == {holder.pid, one.pid, other.pid}


def test_in_a_container_only_memory_tells_of_idleness(machine: Machine) -> None:
    """Where processes can't be seen, memory in use says neither that it is idle nor whose it is."""
    machine.write("gpu\ngpu\n used 300\ngpu\n compute 4321 300")
    with machine.child() as holder, behind(machine, *CONTAINER) as child:
        holder.reserve("'0,1'")
        machine.write("gpu\ngpu\n used 300\ngpu\n compute 4321 300")
        found = status(child)["devices"]
    assert [one["state"] for one in found] == ["reserved", "reserved", "busy"]
    assert [one["is_reserved_but_idle"] for one in found] == [True, None, False]
    assert found[2]["processes"][0]["has_reserved"] is None
    assert found[0]["holders"][0]["pid"] == holder.pid
    assert found[0]["holders"][0]["elsewhere"]


def last_cell(child: Child) -> float | None:
    found: float | None = status(child)["devices"][0]["holders"][0]["last_cell"]
    return found


def age(lock: Path, seconds: float) -> None:
    """Let a reservation have been made so long ago, and nothing been done since."""
    record = json.loads(lock.read_text())
    record["since"] -= seconds
    record["written"] -= seconds
    lock.write_text(json.dumps(record))
    os.utime(lock, (record["written"], record["written"]))


def test_the_end_of_each_cell_is_noted(machine: Machine) -> None:
    """The end of a cell is noted on what the kernel holds, by that process; unload ends it."""
    forked = "import os\npid = os.fork()\nif not pid: get_ipython().run_cell('1'); os._exit(0)"
    with machine.kernel() as kernel, machine.child() as child:
        kernel.run("%reserve_gpu")
        (lock,) = machine.locks.glob("GPU-*.lock")
        age(lock, 7200)
        assert last_cell(child) is None
        before = time.time()
        kernel.run("1 / 0")
        noted = last_cell(child)
        assert noted is not None
        assert before - 1 <= noted <= time.time() + 1
        age(lock, 7200)
        stamp = f"import os; os.waitpid(pid, 0); print(os.stat({str(lock)!r}).st_mtime)"
        assert float(kernel.run(f"{forked}\n{stamp}").stdout.splitlines()[-1]) < before - 3600
        assert last_cell(child) is not None
        text = kernel.run("%reserve_gpu --status").values[0]["text/plain"]
        assert "reserved but idle: nothing of yours runs on it" in text
        kernel.run("%unload_ext reserve_gpu")
        age(lock, 7200)
        assert kernel.run("2").error is None
        assert last_cell(child) is None


def test_absurd_times_are_not_shown(machine: Machine) -> None:
    """A reservation, or a cell, of the future or of no time at all has no time in the picture."""
    with machine.child() as holder, machine.child() as child:
        holder.reserve("0")
        (lock,) = machine.locks.glob("GPU-*.lock")
        record = json.loads(lock.read_text())
        for since, written, mtime in [
            (9e10, 1, 4e9),
            (-5, 1e300, 4e9),
            ("x", "y", 1),
            (1e99, 9, 0),
        ]:
            lock.write_text(json.dumps({**record, "since": since, "written": written}))
            os.utime(lock, (mtime, mtime))
            text = child.run("repr(reserve_gpu.status())").value
            assert f"(pid {holder.pid})\n" in text
            assert "runs on it\n" in text


def test_a_kernel_that_was_left_alone(machine: Machine) -> None:
    """How long ago a kernel that holds an idle device ended a cell is said, and whom to ask."""
    machine.write("gpu")
    with machine.child(JPY_SESSION_NAME="/home/bob/eval.ipynb") as holder, machine.child() as child:
        holder.reserve("0")
        (lock,) = machine.locks.glob("GPU-*.lock")
        age(lock, 9 * 3600)
        hours_ago = time.time() - 3 * 3600 - 60
        os.utime(lock, (hours_ago, hours_ago))
        text = child.run("repr(reserve_gpu.status())").value
    user = pwd.getpwuid(os.getuid()).pw_name
    assert "nothing of theirs runs on it, and their last cell ended 3 h 1 min ago" in text
    assert f"GPU0 is reserved but idle: ask {user} (eval.ipynb). Or wait in line" in text
    assert text.startswith("GPU0 is not free.")


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


@on_a_host
def test_while_the_mutex_is_held(machine: Machine) -> None:
    """Who holds what is known as ever while another has the mutex, and what it only looks at."""
    machine.write("gpu\n" * 3)
    with machine.child() as holder, machine.child() as claims, machine.child() as child:
        holder.reserve("1")
        uuid = status(child)["devices"][0]["uuid"]
        claims.run(TAKE_THE_MUTEX)
        claims.run(f"lock = directory.acquire('{uuid}.lock')")
        assert claims.run("lock.held()").value
        found = status(child)
        assert [one["state"] for one in found["devices"]] == ["free", "reserved", "free"]
        assert found["problem"] is None


def test_in_a_container_while_the_mutex_is_held(machine: Machine) -> None:
    """Where others' locks can't be seen without it, what is not known is unknown, and said."""
    with behind(machine, *CONTAINER) as child:
        child.run(TAKE_THE_MUTEX)
        found = status(child)
    assert [device["state"] for device in found["devices"]] == ["unknown", "unknown"]
    assert "under way" in found["problem"]


def test_without_a_lock_directory(machine: Machine) -> None:
    """Without a lock directory nothing is called free, and the reason is said."""
    machine.write("gpu\ngpu\n compute 4321 5000")
    with machine.child(RESERVE_GPU_LOCK_DIR="/dev/null") as child:
        found = status(child)
        text = child.run("repr(reserve_gpu.status())").value
    assert [device["state"] for device in found["devices"]] == ["unknown", "busy"]
    assert "/dev/null" in found["problem"]
    assert "Reservations may be missing here: The lock directory /dev/null" in text


def test_a_lock_that_cannot_be_opened(machine: Machine) -> None:
    """A device whose lock is no lock file is unknown, with the reason; the others are as ever."""
    with machine.child() as holder, machine.child() as child:
        holder.reserve("1")
        uuid = status(child)["devices"][0]["uuid"]
        (machine.locks / f"{uuid}.lock").mkdir()
        first, second = status(child)["devices"]
    assert (first["state"], second["state"]) == ("unknown", "reserved")
    assert "is a directory, not a lock file" in first["reason"]


def test_without_a_driver(machine: Machine) -> None:
    """Without a driver the magic says so in one line and stops nothing; status() raises."""
    done = machine.ipython("%reserve_gpu --status", "print('went on')", LD_LIBRARY_PATH="")
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "went on"
    assert len(done.stdout.splitlines()) == 2
    with machine.child(LD_LIBRARY_PATH="") as child:
        assert child.run("reserve_gpu.status()").error == "NoDriverError"


def test_a_limit_from_outside_is_said(machine: Machine) -> None:
    """A CUDA_VISIBLE_DEVICES that was set before is said, one that a reservation set is not."""
    with machine.child(CUDA_VISIBLE_DEVICES="1\x1b") as limited, machine.child() as child:
        assert status(limited)["limit"] == "1\x1b"
        text = limited.run("repr(reserve_gpu.status())").value
        child.reserve("0")
        assert status(child)["limit"] is None
    assert "CUDA_VISIBLE_DEVICES='1\N{REPLACEMENT CHARACTER}' was set before: " in text


def test_the_line_says_who_waits_for_what(machine: Machine) -> None:
    """Each waiter is listed with its request in words; what it could use is no longer just free."""
    machine.write("gpu\n memory 20000\ngpu\n memory 20000\ngpu")
    request = "count=2, min_memory='16GiB', name='nvidia', exclude='2', share=False, note='thesis'"
    with machine.child() as holder, machine.child() as one, machine.child() as child:
        holder.reserve("1")
        for waiter, asked in [(one, request)]:
            waiter.run("def told(wait): print('waiting', file=sys.__stderr__)")
            waiter.send(f"reserve_gpu.reserve({asked}, wait=60)")
        wait_for(lambda: status(child)["waiting"])
        found = status(child)
        text = child.run("repr(reserve_gpu.status())").value
    (ticket,) = found["waiting"]
    asks = "2 GPUs of 16 GiB or more with 'nvidia' in the name, not GPU2"
    assert (ticket["pid"], ticket["note"], ticket["asks"]) == (one.pid, "thesis", asks)
    assert ticket["wants"] == sorted(device["uuid"] for device in found["devices"][:2])
    assert [device["next_in_line"] for device in found["devices"]] == [1, 1, None]
    assert "free, but awaited by " in text
    assert re.search(rf"1\. .*\(pid {one.pid}\) has waited for 2 GPUs of 16 GiB.*: thesis", text)


def test_hostile_tickets(machine: Machine) -> None:
    """Whatever somebody wrote into the line is text, cut and cleaned, or nothing."""
    machine.locks.mkdir()
    with machine.child() as child:
        for place, asks in enumerate(["<b>\x1b[31m" * 99, 7, None, ["x"], "\u202e"]):
            path = machine.locks / f"line-{place}.ticket"
            record = {"pid": child.pid, "number": place + 1, "wants": ["x"], "asks": asks}
            path.write_text(json.dumps({**record, "user": asks, "note": asks, "notebook": asks}))
            child.run(f"import fcntl; f{place} = open({str(path)!r}); fcntl.flock(f{place}, 2)")
        found = status(child)["waiting"]
        text = child.run("repr(reserve_gpu.status())").value
        html = child.run("reserve_gpu.status()._repr_html_()").value
    assert len(found) == 5
    assert all(len(line) < 500 for line in text.splitlines())
    assert not re.search("[\x00-\x09\x0b-\x1f\u202e]", text + html)
    assert "<b>" not in re.sub(r"<b style[^>]*>|<b>waiting in line</b>", "", html)


class Table(HTMLParser):
    """The words of an HTML picture: above the table, in each row, below it; and its tags."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.lines: list[str] = [""]
        self.tags: set[str] = set()
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        assert dict(attributes).keys() <= ATTRIBUTES
        self.tags.add(tag)
        if tag in ("tr", "div"):
            self.lines.append("")
        if tag in ("td", "th"):
            self.lines[-1] += " "

    def handle_data(self, data: str) -> None:
        self.lines[-1] += data

    def words(self) -> list[list[str]]:
        return [line.split() for line in self.lines if line.strip()]


ATTRIBUTES = {"style", "colspan", "min", "max", "low", "high", "optimum", "value"}
TAGS = {"table", "thead", "tbody", "tr", "th", "td", "b", "bdi", "div", "meter", "span"}
HOSTILE = "<script>alert(1)</script>&amp;\x1b[31m\u202e\N{HEBREW LETTER ALEF}" + "x" * 500


def test_three_ways_say_the_same(machine: Machine) -> None:
    """Text and HTML say the same, word by word, and as JSON does; what is foreign stays text."""
    gpus = (ROOT / "tests/driver/scenarios/mig.txt").read_text()
    machine.write(f"{gpus}gpu\n name <b>A&B</b>\ngpu\n compute 1 5000\n memory none")
    with machine.child() as holder, machine.child() as waiter, machine.kernel() as kernel:
        holder.reserve(f"3, note={HOSTILE!r}")
        waiter.send(f"reserve_gpu.reserve(3, wait=60, note={HOSTILE!r})")
        wait_for(lambda: status(holder)["waiting"])
        shown = kernel.run("%reserve_gpu --status").values[0]
        told = json.loads(kernel.run("%reserve_gpu --status --json").stdout)
    table = Table(shown["text/html"])
    text = re.sub("[\u2588\u2591]", "", shown["text/plain"])
    timeless = [re.sub(r"\(\d+ s\)", "", line) for line in text.splitlines()]
    html = [" ".join(words) for words in table.words()]
    assert [" ".join(line.split()) for line in timeless] == [
        " ".join(re.sub(r"\(\d+ s\)", "", line).split()) for line in html
    ]
    assert table.tags == TAGS
    for device in told["devices"]:
        assert any(
            words[:2] == [device["label"].removeprefix("GPU"), device["state"]]
            for words in table.words()
        )
    assert "<script>" not in shown["text/html"]
    assert "<script>" in text
    assert not re.search("[\x00-\x09\x0b-\x1f\u202e]", shown["text/plain"] + shown["text/html"])


def screen(machine: Machine, columns: int, *lines: str, **extra: str) -> str:
    """What IPython shows in a terminal of so many columns."""
    terminal, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))
    command = [sys.executable, "-m", "IPython", "--no-banner", "--no-term-title"]
    environ = machine.environ(TERM="xterm-256color", **extra)
    del environ["NO_COLOR"]
    with subprocess.Popen(
        [*command, "--ext=reserve_gpu", "-c", "\n".join(lines)],
        env=environ, cwd=machine.folder, stdin=subprocess.DEVNULL, stdout=end, stderr=end,
    ) as process:  # fmt: skip
        os.close(end)
        text = ""
        while part := read(terminal):
            text += part
        assert process.wait(LIMIT_S) == 0, text
    os.close(terminal)
    return text.replace("\r\n", "\n")


COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@pytest.mark.parametrize("columns", [24, 40, 60, 80, 200])
def test_in_a_terminal(machine: Machine, columns: int) -> None:
    """In a terminal states have colours, and no line is longer than a row."""
    machine.use("mig")
    with machine.child(JPY_SESSION_NAME="train.ipynb") as holder:
        holder.reserve("0, note='a very long story, told in many words, and then some'")
        text = screen(machine, columns, "%reserve_gpu --status")
    bare = COLOURS.sub("", text)
    assert "\x1b" in text
    assert "\x1b" not in bare
    assert max(map(len, bare.splitlines())) <= columns
    assert re.search(r"^0 +reserved", bare, re.MULTILINE)
    assert re.search(r"^  1:2 +free", bare, re.MULTILINE)
    assert str(holder.pid) in bare
    assert (f"(pid {holder.pid}) since" in bare) or columns < 80


def test_where_there_is_no_terminal(machine: Machine) -> None:
    """In a log each fact is one line without colours; print and an expression say the same."""
    machine.use("busy")
    done = machine.ipython("import reserve_gpu", "%reserve_gpu --status", FORCE_COLOR="1")
    again = machine.ipython("import reserve_gpu", "print(reserve_gpu.status())")
    assert done.stdout.splitlines()[1:] == again.stdout.splitlines()[1:]
    assert "\x1b" not in done.stdout
    assert not any(line != line.rstrip() for line in done.stdout.splitlines())


def test_where_letters_are_few(machine: Machine) -> None:
    """Where output is not UTF-8 the picture has the letters that there are."""
    machine.use("busy")
    for lines in (["%reserve_gpu --status"], ["import reserve_gpu", "print(reserve_gpu.status())"]):
        done = machine.ipython(*lines, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
        assert done.returncode == 0, done.stderr
        assert done.stdout.isascii()
        assert re.search(r"0 +busy +GeForce GTX 1050 Ti +#######\. ", done.stdout)


def shape(value: object) -> object:
    """The names in a JSON value, without its values."""
    if isinstance(value, dict):
        return {name: shape(part) for name, part in value.items()}
    return [shape(value[0])] if isinstance(value, list) and value else None


def test_the_shape_is_the_documented_one(machine: Machine) -> None:
    """docs/status.md shows the names of the JSON, all of them, in their order."""
    document = (ROOT / "docs" / "status.md").read_text()
    (example,) = re.findall("```json\n(.*?)```", document, re.DOTALL)
    with machine.child() as holder, machine.child() as waiter, machine.child() as child:
        holder.reserve("0")
        machine.write(f"gpu\n compute {holder.pid} 300")
        waiter.send("reserve_gpu.reserve(0, wait=60)")
        wait_for(lambda: status(child)["waiting"])
        found = status(child)
    assert list(map(str, [shape(found)])) == list(map(str, [shape(json.loads(example))]))


def test_json_goes_with_status(machine: Machine) -> None:
    """--json alone is refused in one line."""
    done = machine.ipython("%reserve_gpu --json")
    assert done.returncode == 1
    assert done.stderr == "UsageError: --json goes with --status or --check.\n"
