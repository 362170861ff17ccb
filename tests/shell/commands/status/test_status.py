"""The status of each device, its processes, its holders, and the queue."""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from contextlib import ExitStack, contextmanager
from html import unescape
from typing import TYPE_CHECKING, Any

import pytest

import reserve_gpu
from reserve_gpu.locks.directory import LockDirectory
from reserve_gpu.locks.queue import QueueEntry
from reserve_gpu.model.holders import Record
from tests.support.locked import have, make_older
from tests.support.machine import ROOT
from tests.support.platforms import on_a_host
from tests.support.processes import own_name
from tests.support.status import device_states, devices, record_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.here import Here

CONTROL_CHARACTERS = "[\x00-\x09\x0b-\x1f\u202e]"
HOSTILE = "<script>alert(1)</script>&amp;\x1b[31m\u202e\N{HEBREW LETTER ALEF}" + "x" * 500


@contextmanager
def waiter(here: Here, wants: list[str], **about: Any) -> Iterator[None]:
    """Put an entry with this record into the queue."""
    record = Record.from_dict(about)
    with LockDirectory(str(here.locks)) as directory, QueueEntry(directory, wants, record) as entry:
        with directory.mutex():
            entry.join()
        yield


# -- states ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scenario", "states"),
    [
        ("desktop", ["free"] * 2),
        ("lost", ["free", "broken", "free"]),
        ("mig", ["free"] * 4 + ["no instance"]),
        (
            "trouble",
            ["broken", "no permission", "broken", "prohibited", "busy", "busy", "no instance",
             "free"],
        ),
    ],
    ids=["desktop", "lost", "mig", "trouble"],
)  # fmt: skip
def test_each_device_has_a_state(here: Here, scenario: str, states: list[str]) -> None:
    here.use(scenario)
    assert list(device_states().values()) == states
    if scenario == "mig":
        assert list(device_states()) == ["GPU0", "GPU1:0", "GPU1:2", "GPU1:5", "GPU2"]


def test_a_lost_device_keeps_its_index_and_has_no_uuid(here: Here) -> None:
    here.write("gpu\ngpu\n mig on\n instance 3\n instance 5")
    here.add("fail nvmlDeviceGetHandleByIndex_v2 0 15\nfail nvmlDeviceGetUUID 1:3 15")
    gpu, instance, working = devices()
    assert (gpu["label"], gpu["index"], gpu["instance"]) == ("GPU0", 0, None)
    assert (instance["label"], instance["index"], instance["instance"]) == ("GPU1:3", 1, 3)
    for row in (gpu, instance):
        assert (row["state"], row["uuid"], row["gpu_uuid"], row["name"]) == ("broken", *[None] * 3)
        assert "lost" in row["reason"]
    assert (working["gpu_uuid"], working["uuid"]) == (here.uuid("1"), here.uuid("1:5"))


def test_the_compute_mode_decides_which_gpus_can_be_used(here: Here) -> None:
    modes = ["default", "exclusive_thread", "prohibited", "exclusive_process"]
    here.write("".join(f"gpu\n mode {mode}\n" for mode in modes))
    here.add("compute 5000001 900\ngpu\nfail nvmlDeviceGetComputeMode 4 3")
    here.add("fail nvmlDeviceGetHandleByIndex_v2 0 15\ngpu\n mode prohibited\n compute 5000001 900")
    rows = devices()
    assert [row["compute_mode"] for row in rows] == [None, *modes[1:], None, "prohibited"]
    states = ["broken", "free", "prohibited", "busy", "free", "prohibited"]
    assert [row["state"] for row in rows] == states
    for row in (rows[2], rows[5]):
        assert row["is_reserved_but_idle"] is False
        assert "prohibited" in row["reason"]
    text = str(reserve_gpu.status())
    assert text.count("compute mode is prohibited") == 2
    assert text.count("compute mode is exclusive") == 1


def test_the_record_of_a_lost_gpu_names_its_holder(here: Here) -> None:
    """The record must have a valid index, and its file must be locked and of no other device."""
    here.write("gpu\n" * 3 + "fail nvmlDeviceGetHandleByIndex_v2 1 15")
    about: dict[str, Any] = {"label": HOSTILE, "index": 1, "user": HOSTILE}
    invalid: list[dict[str, Any]] = [
        *({"index": index} for index in ("1", True, 1.0, 10**40)),
        {"label": ["GPU1"]},
    ]
    with ExitStack() as stack:
        stack.enter_context(here.rival("0", **about))
        stack.enter_context(here.rival("2", part_mib=1024, **about))
        stack.enter_context(waiter(here, [here.uuid("0")], **about))
        (here.locks / "GPU-old.lock").write_text(json.dumps(about))
        (here.locks / "GPU-link.lock").symlink_to("GPU-old.lock")
        (here.locks / "GPU-folder.lock").mkdir()
        for number, record in enumerate(invalid):
            lock = here.locks / f"GPU-{number}.lock"
            stack.enter_context(have(lock, json.dumps(record).encode()))
        assert [len(row["holders"]) for row in devices()] == [1, 0, 1]
        stack.enter_context(have(here.locks / "GPU-9.lock", json.dumps(about).encode()))
        status = reserve_gpu.status()
    rows = status.to_dict()["devices"]
    assert [row["state"] for row in rows] == ["reserved", "broken", "reserved"]
    assert [len(row["holders"]) for row in rows] == [1, 1, 1]
    assert not re.search(CONTROL_CHARACTERS, str(status) + status._repr_html_())


# -- processes and holders -------------------------------------------------------------------------


@on_a_host
def test_each_process_is_listed_once_with_its_kind(here: Here) -> None:
    """Compute comes before MPS and graphics. No pid has seven digits and is above 4,194,304."""
    here.write(
        "gpu\n compute 5000011 3000\n mps 5000011 3000\n graphics 5000011 20\n mps 5000012 200\n"
        " graphics 5000012 20\n graphics 5000013 20\n"
        "gpu\n graphics 5000013 3000\n"
        "gpu\n graphics 5000013 20\n used 3000\n"
    )
    rows = devices()
    assert [[(each["pid"], each["kind"]) for each in row["processes"]] for row in rows] == [
        [(5000011, "compute"), (5000012, "MPS"), (5000013, "graphics")],
        *[[(5000013, "graphics")]] * 2,
    ]
    assert [row["state"] for row in rows] == ["busy", "free", "busy"]
    assert [row["is_used_without_reservation"] for row in rows] == [True, False, True]
    assert "2.9 GiB" in rows[2]["reason"]
    assert "20 MiB" not in str(reserve_gpu.status())


def last_cell() -> float | None:
    """Return the time at which the first device's holder ended its last cell."""
    moment: float | None = devices()[0]["holders"][0]["last_cell"]
    return moment


@pytest.mark.ipython
def test_a_kernel_records_the_end_of_each_cell(here: Here) -> None:
    """It stops when the extension is unloaded."""
    shell = here.shell()
    shell.run("%reserve_gpu")
    record = record_of(here)
    make_older(record, 7200)
    assert last_cell() is None
    assert devices()[0]["idle_for_s"] == pytest.approx(7200, abs=60)
    before = time.time()
    shell.run("1 / 0")
    recorded = last_cell()
    assert recorded is not None
    assert before - 1 <= recorded <= time.time() + 1
    assert "for 2 h\n" in shell.run("%reserve_gpu --status").values[0]["text/plain"]
    shell.run("%unload_ext reserve_gpu")
    make_older(record, 7200)
    assert shell.run("2").error is None
    assert last_cell() is None


# -- what can't be read ----------------------------------------------------------------------------


@on_a_host
def test_while_the_mutex_is_held_holders_come_from_the_kernel_s_list(here: Here) -> None:
    """A device without a holder in that list is unknown, not free."""
    here.write("gpu\n" * 4)
    here.add("compute 4321000 5000")
    with (
        here.rival("1", note="mine"),
        here.rival("2", part_mib=1024),
        waiter(here, [here.uuid("0")], asks="GPU0"),
        LockDirectory(str(here.locks)) as directory,
        directory.mutex(),
    ):
        status = reserve_gpu.status().to_dict()
    rows = status["devices"]
    assert [row["state"] for row in rows] == ["unknown", "reserved", "reserved", "busy"]
    assert rows[0]["reason"]
    assert rows[1]["holders"][0]["note"] == "mine"
    assert [row["is_used_without_reservation"] for row in rows] == [False, False, False, None]
    assert [entry["asks"] for entry in status["waiting"]] == ["GPU0"]
    assert f"process {os.getpid()} of {own_name()}" in status["problem"]


def test_without_locks_no_gpu_is_free(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    here.write("gpu\ngpu\n compute 4321000 5000")
    monkeypatch.setenv("RESERVE_GPU_LOCK_DIR", "/dev/null")
    assert list(device_states().values()) == ["unknown", "busy"]
    assert "/dev/null" in reserve_gpu.status().to_dict()["problem"]


def test_a_device_whose_lock_can_not_be_opened_is_unknown(here: Here) -> None:
    here.write("gpu\n" * 5)
    with here.rival("1"):
        (here.locks / f"{here.uuid('0')}.lock").mkdir()
        (here.locks / f"{here.uuid('2')}.lock").symlink_to(here.log)
        os.mkfifo(here.locks / f"{here.uuid('3')}.lock")
        rows = devices()
    assert [row["state"] for row in rows] == ["unknown", "reserved", "unknown", "unknown", "free"]
    for row, key in ((rows[0], "directory"), (rows[2], "symbolic link"), (rows[3], "regular")):
        assert key in row["reason"]


def test_without_a_driver_the_magic_prints_a_line_and_status_raises(here: Here) -> None:
    here.add("fail nvmlInitWithFlags * 12")
    cell = here.shell().run("%reserve_gpu --status\nprint('went on')")
    assert cell.error is None
    assert cell.stdout.splitlines()[1:] == ["went on"]
    with pytest.raises(reserve_gpu.NoDriverError):
        reserve_gpu.status()


# -- untrusted text --------------------------------------------------------------------------------


def test_untrusted_queue_entries_are_sanitized_and_cut(here: Here) -> None:
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
    assert not re.search(CONTROL_CHARACTERS, text + html)
    assert "<b>" not in html.replace("<b>waiting", "")


@pytest.mark.ipython
def test_text_and_html_have_the_same_words_and_html_is_escaped(here: Here) -> None:
    """HTML has other columns first, and none for temperature and power."""
    here.use("mig")
    here.add("gpu\n name <b>A&B</b>\ngpu\n compute 1 5000\n memory none")
    shell = here.shell()
    about = {"note": HOSTILE, "user": HOSTILE, "notebook": HOSTILE, "asks": HOSTILE}
    with here.rival("3", note=HOSTILE, notebook=HOSTILE), waiter(here, [here.uuid("3")], **about):
        shown = shell.run("%reserve_gpu --status").values[0]
    html, text = shown["text/html"], shown["text/plain"]
    assert "<script>" in text
    assert "<script>" not in html
    assert not re.search(CONTROL_CHARACTERS, text + html)
    tags = {"table", "thead", "tbody", "tr", "th", "td", "b", "bdi", "div", "meter", "span"}
    assert set(re.findall(r"<(\w+)", html)) == tags
    bare = re.sub("[\u2588\u2591]|\\d+ \u00b0C +\\d+ W|\\btemp +power\\b|\\bwho\\b", "", text)
    words = unescape(re.sub(r"<(/?(?:div|t[dhr])|/?\w+)\b[^>]*>", separate, html)).split()
    assert sorted(bare.split()) == sorted(words)


def separate(tag: re.Match[str]) -> str:
    """Return a space for a tag that separates words."""
    return " " if tag[1].strip("/") in {"div", "tr", "td", "th"} else ""


# -- JSON ------------------------------------------------------------------------------------------


def names_in(value: object) -> object:
    """Return the structure of a JSON value with its names, without the values."""
    if isinstance(value, dict):
        return {name: names_in(part) for name, part in value.items()}
    return [names_in(value[0])] if isinstance(value, list) and value else None


def test_the_json_has_the_documented_names_in_their_order(here: Here) -> None:
    document = (ROOT / "docs" / "formats.md").read_text()
    (example,) = re.findall("```json\n(.*?)```", document, re.DOTALL)
    here.write("gpu\n compute 4321000 300\n graphics 99 900")
    with here.rival(), waiter(here, [here.uuid("0")]):
        found = reserve_gpu.status().to_dict()
    assert repr(names_in(found)) == repr(names_in(json.loads(example)))
