"""%reserve_gpu --status: every device, who uses it, who has it, and who waits."""

from __future__ import annotations

import fcntl
import io
import json
import os
import re
import sys
import time
from contextlib import ExitStack, contextmanager
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import pytest

import reserve_gpu
from reserve_gpu.locks.directory import LockDirectory
from reserve_gpu.locks.queue import QueueEntry
from reserve_gpu.model.holders import Record
from tests.support.locked import have
from tests.support.machine import ROOT
from tests.support.platforms import on_a_host
from tests.support.processes import own_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.here import Here

from tests.support.status import age, devices, lock_of, states

ME = own_name()


@contextmanager
def waiter(here: Here, wants: list[str], **about: Any) -> Iterator[None]:
    """Let somebody wait in the queue, with this record."""
    record = Record.from_dict(about)
    with LockDirectory(str(here.locks)) as directory, QueueEntry(directory, wants, record) as place:
        with directory.mutex():
            place.join()
        yield


# -- states ----------------------------------------------------------------------------------------

SCENARIOS = [
    ("two", {"GPU0": "free", "GPU1": "free"}),
    ("busy", {"GPU0": "busy", "GPU1": "busy"}),
    ("desktop", {"GPU0": "free", "GPU1": "free"}),
    ("lost", {"GPU0": "free", "GPU1": "broken", "GPU2": "free"}),
    (
        "mig",
        {
            "GPU0": "free", "GPU1:0": "free", "GPU1:2": "free", "GPU1:5": "free",
            "GPU2": "no instance",
        },
    ),
    (
        "trouble",
        {
            "GPU0": "broken", "GPU1": "no permission", "GPU2": "broken", "GPU3": "prohibited",
            "GPU4": "busy", "GPU5": "busy", "GPU6": "no instance", "GPU7": "free",
        },
    ),
]  # fmt: skip


@pytest.mark.parametrize(("scenario", "expected"), SCENARIOS, ids=[s for s, _ in SCENARIOS])
def test_a_state_for_each_device(here: Here, scenario: str, expected: dict[str, str]) -> None:
    """Each device, MIG instances too, has a row with its state, also one that can't be read."""
    here.use(scenario)
    assert states() == expected


def test_readings_that_fail_are_a_row(here: Here) -> None:
    """Where a reading fails the row says broken and why; the other devices are as they are."""
    here.add("fail nvmlDeviceGetComputeMode 0 999")
    first, second = devices()
    assert first["state"] == "broken"
    assert "Unknown Error" in first["reason"]
    assert first["uuid"] == here.uuid("0")
    assert second["state"] == "free"


def test_what_is_lost_keeps_its_place(here: Here) -> None:
    """A GPU, or an instance, that can't be reached has its index in JSON, and no UUID."""
    here.write("gpu\ngpu\n mig on\n instance 3\n instance 5")
    here.add("fail nvmlDeviceGetHandleByIndex_v2 0 15\nfail nvmlDeviceGetUUID 1:3 15")
    lost, part, whole = devices()
    assert (lost["label"], lost["index"], lost["instance"]) == ("GPU0", 0, None)
    assert (part["label"], part["index"], part["instance"]) == ("GPU1:3", 1, 3)
    for row in (lost, part):
        assert (row["state"], row["uuid"], row["gpu_uuid"], row["name"]) == ("broken", *[None] * 3)
        assert "GPU is lost" in row["reason"]
    assert (whole["gpu_uuid"], whole["uuid"]) == (here.uuid("1"), here.uuid("1:5"))


def test_prohibited(here: Here) -> None:
    """A GPU that nobody may use is prohibited, whether it is in use or not, and says why."""
    here.write("gpu\n mode prohibited\ngpu\n mode prohibited\n compute 5000001 900")
    for row in devices():
        assert (row["state"], row["is_reserved_but_idle"]) == ("prohibited", False)
        assert row["reason"] == "its compute mode is prohibited: no process can use this GPU"
    text = str(reserve_gpu.status())
    assert text.count("its compute mode is prohibited: no process can use this GPU") == 2
    assert "used by pid 5000001\n" in text
    assert "reservation" not in text
    assert text.startswith("None of 2 GPUs is free.")


def test_compute_modes(here: Here) -> None:
    """The compute mode is in JSON, and in the picture where it keeps others out."""
    modes = ["default", "exclusive_thread", "prohibited", "exclusive_process"]
    here.write("".join(f"gpu\n mode {mode}\n" for mode in modes))
    here.add("compute 5000001 900\ngpu\nfail nvmlDeviceGetComputeMode 4 3")
    here.add("fail nvmlDeviceGetHandleByIndex_v2 0 15")
    rows = devices()
    assert [row["compute_mode"] for row in rows] == [None, *modes[1:], None]
    assert [row["state"] for row in rows] == ["broken", "free", "prohibited", "busy", "free"]
    exclusive, below = str(reserve_gpu.status()).partition("\n3 ")[2].splitlines()[:2]
    assert exclusive.endswith("  no reservation: pid 5000001")
    assert below.strip() == "compute mode is exclusive: one process at a time"


def test_an_exclusive_gpu_is_said_to_be_exclusive(here: Here) -> None:
    """Who names a GPU that its compute mode keeps for one process is told of both."""
    here.write("gpu\n mode exclusive_process\n compute 5000001 900\ngpu")
    with pytest.raises(reserve_gpu.NoFreeDeviceError) as refused:
        reserve_gpu.reserve("0")
    gpu, below = str(refused.value).splitlines()[-2:]
    assert re.fullmatch(r"0 +busy .* no reservation: pid 5000001", gpu)
    assert below.strip() == "compute mode is exclusive: one process at a time"


LOST = "fail nvmlDeviceGetHandleByIndex_v2 1 15"


def test_records_of_what_is_not_lost(here: Here) -> None:
    """A record names the holder of what is lost only in a file that is locked, and of no device.

    Whatever it says is shown as foreign text, and decides nothing.
    """
    here.write("gpu\n" * 3)
    here.add(LOST)
    about: dict[str, Any] = {"label": HOSTILE, "index": 1, "user": HOSTILE}
    odd: list[dict[str, Any]] = [
        {"index": "1"},
        {"index": True},
        {"index": 1.0},
        {"label": ["GPU1"]},
        {"index": 10**40},
    ]
    with ExitStack() as stack:
        stack.enter_context(here.rival("0", **about))
        stack.enter_context(here.rival("2", part_mib=1024, **about))
        stack.enter_context(waiter(here, [here.uuid("0")], **about))
        (here.locks / "GPU-old.lock").write_text(json.dumps(about))
        (here.locks / "GPU-link.lock").symlink_to("GPU-old.lock")
        (here.locks / "GPU-folder.lock").mkdir()
        for number, record in enumerate(odd):
            stack.enter_context(
                have(here.locks / f"GPU-{number}.lock", json.dumps(record).encode())
            )
        assert [len(row["holders"]) for row in devices()] == [1, 0, 1]
        stack.enter_context(have(here.locks / "GPU-9.lock", json.dumps(about).encode()))
        status = reserve_gpu.status()
    rows = status.to_dict()["devices"]
    assert [row["state"] for row in rows] == ["reserved", "broken", "reserved"]
    assert [len(row["holders"]) for row in rows] == [1, 1, 1]
    assert not re.search("[\x00-\x09\x0b-\x1f\u202e]", str(status) + status._repr_html_())


# No process has pids of seven digits from 4,194,304 on.
LISTS = """
gpu
  compute 5000011 3000
  mps 5000011 3000
  graphics 5000011 20
  mps 5000012 200
  graphics 5000012 20
  graphics 5000013 20
gpu
  graphics 5000013 3000
gpu
  graphics 5000013 20
  used 3000
"""


@on_a_host
def test_every_process_has_its_kind(here: Here) -> None:
    """JSON lists compute, MPS and graphics processes, each once: compute goes before all others."""
    here.write(LISTS)
    rows = devices()
    kinds = [{process["pid"]: process["kind"] for process in row["processes"]} for row in rows]
    assert kinds == [
        {5000011: "compute", 5000012: "MPS", 5000013: "graphics"},
        *[{5000013: "graphics"}] * 2,
    ]
    assert [len(row["processes"]) for row in rows] == [3, 1, 1]
    assert [row["state"] for row in rows] == ["busy", "free", "busy"]
    assert [row["is_used_without_reservation"] for row in rows] == [True, False, True]
    assert rows[2]["reason"] == "2.9 GiB in use by no visible process"
    text = str(reserve_gpu.status())
    assert "  no reservation: pid 5000011, 2.9 GiB; pid 5000012, 0.2 GiB\n" in text
    assert "  graphics: pid 5000013\n" in text
    assert rows[2]["reason"] in text
    assert "20 MiB" not in text


@on_a_host
def test_graphics_processes_decide_nothing(here: Here) -> None:
    """A graphics process, of a holder or not, makes a device neither used nor less idle."""
    here.write(f"gpu\n graphics {os.getpid()} 3000\ngpu\n graphics 1 3000")
    with here.rival("0"), here.rival("1"):
        rows = devices()
    assert [row["processes"][0]["has_reserved"] for row in rows] == [True, False]
    assert [row["is_reserved_but_idle"] for row in rows] == [True, True]
    assert [row["is_used_without_reservation"] for row in rows] == [False, False]


def last_cell() -> float | None:
    moment: float | None = devices()[0]["holders"][0]["last_cell"]
    return moment


@pytest.mark.ipython
def test_the_end_of_each_cell_is_written_down(here: Here) -> None:
    """A cell writes its end into the record of what the kernel holds, until %unload_ext."""
    shell = here.shell()
    shell.run("%reserve_gpu")
    lock = lock_of(here)
    age(lock, 7200)
    assert last_cell() is None
    assert "for 2 h, idle\n" in str(reserve_gpu.status())
    before = time.time()
    shell.run("1 / 0")
    noted = last_cell()
    assert noted is not None
    assert before - 1 <= noted <= time.time() + 1
    text = shell.run("%reserve_gpu --status").values[0]["text/plain"]
    assert "for 2 h\n" in text
    shell.run("%unload_ext reserve_gpu")
    age(lock, 7200)
    assert shell.run("2").error is None
    assert last_cell() is None


@on_a_host
def test_while_the_mutex_is_held(here: Here) -> None:
    """While another has the mutex for long, those are named whom the kernel's list shows.

    What it does not show is not called free: reservations may be missing, and that is said.
    """
    here.write("gpu\n" * 4)
    here.add("compute 4321000 5000")
    with (
        here.rival("1", note="mine"),
        here.rival("2", part_mib=1024),
        waiter(here, [here.uuid("0")], asks="GPU0"),
        LockDirectory(str(here.locks)) as directory,
        directory.mutex(),
    ):
        status = reserve_gpu.status()
    found = status.to_dict()
    rows = found["devices"]
    assert [row["state"] for row in rows] == ["unknown", "reserved", "reserved", "busy"]
    assert rows[0]["reason"] == "its reservations can't be read at the moment"
    assert rows[1]["holders"][0]["note"] == "mine"
    assert [row["is_used_without_reservation"] for row in rows] == [False, False, False, None]
    assert [ticket["asks"] for ticket in found["waiting"]] == ["GPU0"]
    assert f"; process {os.getpid()} of {ME}" in found["problem"]
    missing = r"Reservations may be missing here: Other reservations have been in progress for \d s"
    assert re.search(missing, str(status))  # a person waits for this


def test_without_a_lock_directory(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a lock directory nothing is called free, and the reason is said."""
    here.write("gpu\ngpu\n compute 4321000 5000")
    monkeypatch.setenv("RESERVE_GPU_LOCK_DIR", "/dev/null")
    status = reserve_gpu.status()
    found = status.to_dict()
    assert [device["state"] for device in found["devices"]] == ["unknown", "busy"]
    assert "/dev/null" in found["problem"]
    assert "Reservations may be missing here: The lock directory /dev/null" in str(status)
    assert str(status).startswith("It is unknown whether GPU0 is free.")
    assert not re.search("None of|Get one|queue|Ask", str(status))


def test_a_lock_that_cannot_be_opened(here: Here) -> None:
    """A device whose lock is no lock file is unknown, with the reason; the others are as ever."""
    here.write("gpu\n" * 5)
    with here.rival("1"):
        (here.locks / f"{here.uuid('0')}.lock").mkdir()
        (here.locks / f"{here.uuid('2')}.lock").symlink_to(here.log)
        os.mkfifo(here.locks / f"{here.uuid('3')}.lock")
        rows = devices()
    assert [row["state"] for row in rows] == ["unknown", "reserved", "unknown", "unknown", "free"]
    assert "is a directory, not a lock file" in rows[0]["reason"]
    assert "is a symbolic link. Symbolic links are not followed here." in rows[2]["reason"]
    assert "is not a regular file" in rows[3]["reason"]


def test_without_a_driver(here: Here) -> None:
    """Without a driver the magic says so in one line and stops nothing; status() raises."""
    here.add("fail nvmlInitWithFlags * 12")
    cell = here.shell().run("%reserve_gpu --status\nprint('went on')")
    assert cell.error is None
    assert cell.stdout.splitlines()[1:] == ["went on"]
    with pytest.raises(reserve_gpu.NoDriverError):
        reserve_gpu.status()


def test_a_limit_from_outside_is_said(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA_VISIBLE_DEVICES that was set before is said, one that a reservation set is not."""
    reserve_gpu.reserve("0")
    assert reserve_gpu.status().to_dict()["limit"] is None
    reserve_gpu.release()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1\x1b")
    status = reserve_gpu.status()
    assert status.to_dict()["limit"] == "1\x1b"
    assert "CUDA_VISIBLE_DEVICES='1\N{REPLACEMENT CHARACTER}' was set elsewhere: " in str(status)


def test_hostile_tickets(here: Here) -> None:
    """Whatever somebody wrote into the queue is text, cut and cleaned, or nothing."""
    here.locks.mkdir()
    with ExitStack() as stack:
        for place, asks in enumerate(["<b>\x1b[31m" * 99, 7, None, ["x"], "\u202e"]):
            path = here.locks / f"queue-{os.getuid()}-{place}.lock"
            wants = [f"{number:0300}" for number in range(200)]
            record = {"pid": 1, "number": place + 1, "wants": wants, "asks": asks}
            path.write_text(json.dumps({**record, "user": asks, "note": asks, "notebook": asks}))
            file = stack.enter_context(path.open())
            fcntl.flock(file, fcntl.LOCK_EX)
        status = reserve_gpu.status()
    text, html = str(status), status._repr_html_()
    waiting = status.to_dict()["waiting"]
    assert len(waiting) == 5
    assert len(json.dumps(waiting)) < 5 * 3000
    assert all(len(line) < 500 for line in text.splitlines())
    assert not re.search("[\x00-\x09\x0b-\x1f\u202e]", text + html)
    assert "<b>" not in re.sub(r"<b style[^>]*>|<b>waiting in the queue</b>", "", html)


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


ATTRIBUTES = {"style", "title", "min", "max", "low", "high", "value"}
TAGS = {"table", "thead", "tbody", "tr", "th", "td", "b", "bdi", "div", "meter", "span"}
HOSTILE = "<script>alert(1)</script>&amp;\x1b[31m\u202e\N{HEBREW LETTER ALEF}" + "x" * 500


@pytest.mark.ipython
def test_three_ways_say_the_same(here: Here) -> None:
    """Text, HTML and JSON say the same, and untrusted text is escaped.

    HTML has other columns first, and none for temperature and power.
    """
    here.use("mig")
    here.add("gpu\n name <b>A&B</b>\ngpu\n compute 1 5000\n memory none")
    shell = here.shell()
    about = {"note": HOSTILE, "user": HOSTILE, "notebook": HOSTILE, "asks": HOSTILE}
    with here.rival("3", note=HOSTILE, notebook=HOSTILE), waiter(here, [here.uuid("3")], **about):
        shown = shell.run("%reserve_gpu --status").values[0]
        told = reserve_gpu.status().to_dict()
    table = Table(shown["text/html"])
    text = re.sub(
        "[\u2588\u2591]|\\d+ \u00b0C +\\d+ W|\\btemp +power\\b|\\bwho\\b", "", shown["text/plain"]
    )
    assert sorted(text.split()) == sorted(word for line in table.words() for word in line)
    assert table.tags == TAGS
    for device in told["devices"]:
        number, state = device["label"].removeprefix("GPU"), set(device["state"].split())
        assert any(words[:1] == [number] and state <= {*words} for words in table.words())
    assert "<script>" not in shown["text/html"]
    assert "<script>" in text
    assert not re.search("[\x00-\x09\x0b-\x1f\u202e]", shown["text/plain"] + shown["text/html"])


# -- in a terminal, in a log -----------------------------------------------------------------------

COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class Terminal(io.StringIO):
    """A terminal, as far as Python asks."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


# By the width of a terminal: the columns that have room there, and how the names look.
WIDTHS = [
    (24, "GPU state name", "A10…"),
    (40, "GPU state name", "A100-SXM4-40GB"),
    (60, "GPU state name memory util", "A100-SXM4-40GB"),
    (80, "GPU state name memory util", "A100-SXM4-40GB"),
    (200, "GPU state name memory util temp power who", "A100-SXM4-40GB"),
]


@pytest.mark.parametrize(("columns", "titles", "name"), WIDTHS)
def test_in_a_terminal(
    here: Here, monkeypatch: pytest.MonkeyPatch, columns: int, titles: str, name: str
) -> None:
    """In a terminal states have colours, and no line is longer than a row, nor cut off."""
    here.use("mig")
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.delenv("NO_COLOR")
    note = "a very long story, told in many words, and then some"
    with here.rival("0", note=note):
        text = reserve_gpu.status().picture().to_text()
    bare = COLOURS.sub("", text)
    assert "\x1b" in text
    assert "\x1b" not in bare
    assert max(map(len, bare.splitlines())) <= columns
    assert titles in [" ".join(line.split()) for line in bare.splitlines()]
    assert re.search(rf"^0 +reserved +{name}( |$)", bare, re.MULTILINE)
    assert re.search(r"^  1:2 +free", bare, re.MULTILINE)
    assert str(os.getpid()) in re.sub(r"\n *", "", bare)
    assert (f"(pid {os.getpid()}) for " in bare) or columns < 80


def test_where_there_is_no_terminal(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a log each fact is one line without colours; print and an expression say the same."""
    here.use("busy")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    shell = here.shell()
    text = shell.run("%reserve_gpu --status").values[0]["text/plain"]
    printed = shell.run("import reserve_gpu; print(reserve_gpu.status())").stdout
    value = shell.run("reserve_gpu.status()").values[0]["text/plain"]
    assert text.splitlines()[1:-1] == printed.splitlines()[1:-1] == value.splitlines()[1:-1]
    assert text.endswith("\nOr wait in the queue: %reserve_gpu --wait 5m")
    assert value.endswith("\nOr wait in the queue: reserve_gpu.reserve(wait='1h')")
    assert "\x1b" not in text + printed
    assert not any(line != line.rstrip() for line in text.splitlines())


@pytest.mark.parametrize("is_terminal", [False, True])
def test_where_letters_are_few(
    here: Here, monkeypatch: pytest.MonkeyPatch, *, is_terminal: bool
) -> None:
    """Where output is not UTF-8 the picture has question marks for letters that it lacks."""
    here.use("busy")
    here.add("name " + "\N{GREEK SMALL LETTER ALPHA}" * 40)
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(output, "isatty", lambda: is_terminal, raising=False)
    monkeypatch.setattr(sys, "stdout", output)
    monkeypatch.setenv("COLUMNS", "140")
    status = reserve_gpu.status()
    texts = (str(status), COLOURS.sub("", status.picture().to_text()))
    monkeypatch.undo()
    for text in texts:
        assert text.isascii()
        assert re.search(r"0 +busy +GeForce GTX 1050 Ti +\?+ ", text)
    assert re.search(r"1 +busy +\?\?\?", texts[0])


# -- for programs ----------------------------------------------------------------------------------


def shape(value: object) -> object:
    """Return the names in a JSON value, without its values."""
    if isinstance(value, dict):
        return {name: shape(part) for name, part in value.items()}
    return [shape(value[0])] if isinstance(value, list) and value else None


def test_the_shape_is_the_documented_one(here: Here) -> None:
    """docs/formats.md shows the names of the JSON, all of them, in their order."""
    document = (ROOT / "docs" / "formats.md").read_text()
    (example,) = re.findall("```json\n(.*?)```", document, re.DOTALL)
    here.write("gpu\n compute 4321000 300\n graphics 99 900")
    with here.rival(), waiter(here, [here.uuid("0")]):
        found = reserve_gpu.status().to_dict()
    assert repr(shape(found)) == repr(shape(json.loads(example)))
