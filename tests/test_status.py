"""%reserve_gpu --status: every device, who uses it, who has it, and who waits."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from contextlib import ExitStack, closing, contextmanager, suppress
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import pytest

import reserve_gpu
from reserve_gpu.locks.directory import LockDirectory
from reserve_gpu.locks.queue import QueueEntry
from reserve_gpu.model.devices import Device, Fault, Process, State, Usage
from reserve_gpu.model.holders import DeviceStatus, Holder, Record
from reserve_gpu.model.queue import Ticket
from reserve_gpu.model.requests import ReservationTerms, Size
from reserve_gpu.render import frontends, phrases, reasons
from reserve_gpu.render.frontends import MAGIC
from reserve_gpu.render.pictures import Picture
from reserve_gpu.render.status_view import Status
from tests.holders import a_holder, changed
from tests.locked import have
from tests.machine import CHILD, LIMIT_S, ROOT, TAKE_THE_MUTEX, Machine
from tests.processes import own_name, wait_for
from tests.test_machines import CONTAINER, behind, on_a_host

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.here import Here
    from tests.machine import Child, Machine

ME = own_name()


def devices() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = reserve_gpu.status().to_dict()["devices"]
    return rows


def states() -> dict[str, str]:
    return {device["label"]: device["state"] for device in devices()}


def devices_of(child: Child) -> list[dict[str, Any]]:
    """Return the same, as a child sees it."""
    rows: list[dict[str, Any]] = child.run("reserve_gpu.status().to_dict()").value["devices"]
    return rows


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


# -- who has what ----------------------------------------------------------------------------------


@pytest.mark.promise
@on_a_host
@pytest.mark.process
def test_who_holds_and_who_uses(here: Here) -> None:
    """A holder is named with pid, user and note, a process without a reservation is marked."""
    with here.child() as holder:
        holder.reserve("0, note='until Friday'")
        here.write(f"gpu\n compute {holder.pid} 300\ngpu\n compute {os.getpid()} 700")
        first, second = devices()
        is_its_own = devices_of(holder)[0]["is_this_process"]
    (who,) = first["holders"]
    assert first["state"] == "reserved"
    assert (who["pid"], who["note"], who["confirmed"]) == (holder.pid, "until Friday", True)
    assert who["user"] == ME
    assert [process["pid"] for process in first["processes"]] == [holder.pid]
    assert first["processes"][0]["command"].startswith("python")
    assert not first["is_reserved_but_idle"]
    assert (first["is_this_process"], is_its_own) == (False, True)
    assert second["state"] == "busy"
    assert second["is_used_without_reservation"]
    assert second["processes"][0]["memory_mib"] == 700


@on_a_host
@pytest.mark.process
def test_whose_processes_are_on_a_reserved_device(here: Here) -> None:
    """A holder's children count as its own; others are strangers, or of the same user beside it."""
    here.write("gpu\n" * 3)
    with here.child() as holder:
        holder.reserve("'0,1,2'")
        holder.run("import subprocess; helper = subprocess.Popen(['sleep', '1000'])")
        helper, stranger = holder.run("helper.pid").value, os.getpid()
        both = f" compute {helper} 300\n compute {stranger} 200\n"
        here.write(f"gpu\n compute {helper} 300\ngpu\n compute 4321000 9\ngpu\n{both}")
        rows = devices()
        holder.run("helper.kill()")
    assert [row["state"] for row in rows] == ["reserved"] * 3
    assert [row["is_reserved_but_idle"] for row in rows] == [False, True, False]
    assert [row["is_used_without_reservation"] for row in rows] == [False, True, False]
    beside = [[process["beside"] for process in row["processes"]] for row in rows]
    assert beside == [[None], [None], [None, CHILD]]
    assert [process["has_reserved"] for process in rows[2]["processes"]] == [True, False]


@pytest.mark.process
def test_all_who_share_are_named(here: Here) -> None:
    """Each one who shares a device is a holder with all of its own; this process comes first."""
    notebooks = {"a.ipynb": "till noon", "b.ipynb": "till two"}
    with ExitStack() as stack:
        for notebook, note in notebooks.items():
            child = stack.enter_context(here.child(JPY_SESSION_NAME=f"/home/{notebook}"))
            child.run("import warnings; warnings.simplefilter('ignore')")
            assert child.reserve(f"0, memory='1GB', note={note!r}").value == "0"
        reserve_gpu.reserve("0", memory="1GB")
        holders = devices()[0]["holders"]
        text = str(reserve_gpu.status())
        assert states() == {"GPU0": "reserved", "GPU1": "free"}
    assert holders[0]["pid"] == os.getpid()
    assert {holder["notebook"]: holder["note"] for holder in holders[1:]} == notebooks
    assert len({holder["pid"] for holder in holders}) == 3
    assert len({holder["since"] for holder in holders}) == 3
    assert all(holder["user"] == ME and holder["confirmed"] for holder in holders)
    assert all(f"{notebook} (pid " in text for notebook in notebooks)
    assert all(f': "{note}"\n' in text for note in notebooks.values())
    assert text.count("this process: ") == 1


@on_a_host
@pytest.mark.process
def test_a_refusal_says_what_the_status_says(here: Here) -> None:
    """Who has each GPU, who uses it and what is wrong is the same in a refusal and in a status."""
    here.write(
        "gpu\ngpu\n compute 4321000 900\ngpu\n mode prohibited\n"
        "gpu\n mode exclusive_process\n compute 4321000 9\ngpu\ngpu"
    )
    with here.child() as holder, here.child() as other:
        for child, number in ((holder, 0), (other, 5)):
            child.reserve(f"{number}, note='thesis'")
            age(here.locks / f"{here.uuid(str(number))}.lock", 7200)
        here.add("fail nvmlDeviceGetHandleByIndex_v2 4 15\nfail nvmlDeviceGetComputeMode 5 999")
        status = reserve_gpu.status()
        with pytest.raises(reserve_gpu.NoFreeDeviceError) as refused:
            reserve_gpu.reserve()
    assert isinstance(refused.value.picture, Picture)
    pictures = (status.picture(), refused.value.picture)
    seen, said = ([(e.state, e.who, e.more) for e in each.layout.entries] for each in pictures)
    assert said == seen


LOST = "fail nvmlDeviceGetHandleByIndex_v2 1 15"


@on_a_host
@pytest.mark.process
@pytest.mark.parametrize("memory", [None, "1GB"], ids=["whole", "shared"])
def test_a_lost_gpu_keeps_its_holder(here: Here, *, memory: str | None) -> None:
    """The holder of a lost GPU is named until it releases it, by the number in its record."""
    with here.child() as holder:
        wish = f"'1', note='until Friday', memory={memory!r}"
        assert holder.reserve(wish).value == "1"
        here.add(LOST)
        assert devices()[1]["holders"][0]["pid"] == holder.pid
        first, lost = devices()
        text = str(reserve_gpu.status())
        is_its_own = devices_of(holder)[1]["is_this_process"]
        holder.run("reserve_gpu.release()")
        assert devices()[1]["holders"] == []
    assert (first["state"], first["holders"]) == ("free", [])
    (who,) = lost["holders"]
    assert (who["pid"], who["user"], who["note"]) == (holder.pid, ME, "until Friday")
    assert (lost["state"], lost["uuid"], is_its_own) == ("broken", None, True)
    assert (lost["is_this_process"], lost["is_reserved_but_idle"]) == (False, None)
    assert f"reserved as GPU1 by {ME}, " in text
    assert "GPU is lost (nvmlDeviceGetHandleByIndex)" in text


@pytest.mark.process
def test_a_lost_instance_keeps_its_holder(here: Here) -> None:
    """The holders of lost instances stand where these were; of a lost GPU all of them."""
    here.write("gpu\ngpu\n mig on\n instance 3\n instance 5")
    with here.child() as three, here.child() as five:
        assert not three.reserve("'1:3'").error
        assert not five.reserve("'1:5'").error
        here.add("fail nvmlDeviceGetUUID 1:3 15\nfail nvmlDeviceGetUUID 1:5 15")
        pids = [[holder["pid"] for holder in row["holders"]] for row in devices()]
        assert pids == [[], [three.pid], [five.pid]]
        here.add(LOST)
        first, gpu = devices()
    assert first["holders"] == []
    assert {holder["pid"] for holder in gpu["holders"]} == {three.pid, five.pid}


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


@pytest.mark.process
def test_in_a_container_only_memory_tells_of_idleness(here: Here) -> None:
    """Where processes can't be seen, memory in use says neither that it is idle nor whose it is."""
    here.write("gpu\ngpu\n used 300\ngpu\n compute 4321000 300")
    with here.rival("0"), here.rival("1"), behind(here, *CONTAINER) as child:
        rows = devices_of(child)
    assert [row["state"] for row in rows] == ["reserved", "reserved", "busy"]
    assert [row["is_reserved_but_idle"] for row in rows] == [True, None, False]
    assert rows[2]["processes"][0]["has_reserved"] is None
    assert rows[0]["holders"][0]["pid"] == os.getpid()
    assert rows[0]["holders"][0]["elsewhere"]


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


# -- since when ------------------------------------------------------------------------------------


def lock_of(machine: Machine) -> Path:
    (lock,) = (path for path in machine.locks.glob("GPU-*.record-*") if path.read_text())
    return lock


def age(lock: Path, seconds: float) -> None:
    """Let a reservation have been made so long ago, and nothing been done since."""
    record = json.loads(lock.read_text())
    for name in ("since", "written"):
        record[name] -= seconds
        record[f"{name}_boot"] -= seconds
    lock.write_text(json.dumps(record))
    os.utime(lock, (record["written"], record["written"]))


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


SHELL = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
for line in ("%load_ext reserve_gpu", "%reserve_gpu"):
    shell.run_cell(line)
"""
RUN_A_CELL_IN_A_FORK = """
pid = os.fork()
if not pid:
    shell.run_cell("1")
    os._exit(0)
os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""


@pytest.mark.process
def test_a_fork_of_a_kernel_notes_no_cells(machine: Machine) -> None:
    """What a child runs that was forked from a kernel is no cell of that kernel."""
    with machine.child() as child:
        assert not child.run(SHELL).error
        lock = lock_of(machine)
        age(lock, 7200)
        before = lock.stat().st_mtime
        assert child.run(RUN_A_CELL_IN_A_FORK).value == 0
        assert lock.stat().st_mtime == before
        child.run("shell.run_cell('1')")
        assert lock.stat().st_mtime > before


@pytest.mark.process
def test_absurd_times_are_not_shown(here: Here) -> None:
    """A reservation, or a cell, of the future or of no time at all has no time in the picture."""
    with here.child() as holder:
        holder.reserve("0")
        lock = lock_of(here)
        record = json.loads(lock.read_text())
        for since, written, mtime in [
            (9e10, -1, 4e9),
            (-5, 1e300, 4e9),
            ("x", "y", 1),
            (1e99, -9, 0),
        ]:
            times = {"since": since, "written": written}
            by_boot = {f"{name}_boot": value for name, value in times.items()}
            lock.write_text(json.dumps({**record, **times, **by_boot}))
            os.utime(lock, (mtime, mtime))
            text = str(reserve_gpu.status())
            assert f"(pid {holder.pid}), idle\n" in text


@pytest.mark.process
@pytest.mark.usefixtures("terminal")
def test_a_kernel_that_was_left_alone(here: Here) -> None:
    """How long ago a kernel that holds an idle device ended a cell is said, and what to do."""
    here.write("gpu")
    with here.child(JPY_SESSION_NAME="/home/bob/eval.ipynb") as holder:
        holder.reserve("0")
        lock = lock_of(here)
        age(lock, 9 * 3600)
        hours_ago = time.time() - 3 * 3600 - 60
        os.utime(lock, (hours_ago, hours_ago))
        text = str(reserve_gpu.status())
    assert " for 9 h, idle for 3 h 1 min\n" in text
    held = f"GPU0 has been idle for 3 h 1 min in your eval.ipynb (pid {holder.pid}). To release it"
    assert f"{held}: reserve-gpu release {holder.pid}\nOr wait in the queue: " in text
    assert text.startswith("GPU0 is not free.")


# -- looking ---------------------------------------------------------------------------------------


@pytest.mark.process
def test_looking_takes_nothing(here: Here) -> None:
    """While statuses are read without end every reservation succeeds, and no status lacks any."""
    with here.child() as looker:
        looker.send(
            "problems = []\n"
            "while not os.path.exists('enough'): problems.append(reserve_gpu.status().problem)\n"
            "problems"
        )
        wait_for(lambda: here.calls().count("nvmlShutdown") > 1)
        for _ in range(50):
            assert reserve_gpu.reserve(count=2).environ["CUDA_VISIBLE_DEVICES"] == "0,1"
            reserve_gpu.release()
        (here.folder / "enough").touch()
        problems = looker.answer().value
    assert len(problems) > 1
    assert not any(problems)


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


@pytest.mark.process
def test_in_a_container_while_the_mutex_is_held(machine: Machine) -> None:
    """Where others' locks can't be seen without it, what is not known is unknown, and said."""
    with behind(machine, *CONTAINER) as child:
        child.run(TAKE_THE_MUTEX)
        found = child.run("reserve_gpu.status().to_dict()").value
    assert [device["state"] for device in found["devices"]] == ["unknown", "unknown"]
    assert "in progress" in found["problem"]


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


# -- the queue -------------------------------------------------------------------------------------


@pytest.mark.process
def test_the_queue_says_who_waits_for_what(here: Here) -> None:
    """Each waiter is listed with its request in words; what it could use is no longer just free."""
    here.write("gpu\n memory 20000\ngpu\n memory 20000\ngpu")
    request = "count=2, min_memory='16GiB', name='nvidia', note='thesis'"
    with here.rival("1"), here.child() as child:
        child.send(f"reserve_gpu.reserve({request}, wait=60)")
        wait_for(lambda: reserve_gpu.status().waiting)
        status = reserve_gpu.status()
    found, text = status.to_dict(), str(status)
    (ticket,) = found["waiting"]
    asks = "2 GPUs of 16.0 GiB or more with 'nvidia' in the name"
    assert (ticket["pid"], ticket["note"], ticket["asks"]) == (child.pid, "thesis", asks)
    assert ticket["wants"] == sorted(device["uuid"] for device in found["devices"][:2])
    assert [device["next_in_line"] for device in found["devices"]] == [1, 1, None]
    assert re.search(r"^0 +awaited .* by your python3? \S+: ", text, re.MULTILINE)
    waits = r"has waited \d+ s for 2 GPUs of 16.0 GiB"
    assert re.search(rf'1\. your python3? \S+ \(pid {child.pid}\) {waits}.*: "thesis"', text)


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


# -- the picture -----------------------------------------------------------------------------------

NOW = 1_795_000_000.0
GPUS = [Device(index, f"GPU-{index}", "Tesla T4", memory_mib=15360) for index in range(3)]
READ = Usage(compute=0, mps=0, total_mib=15360, used_mib=5120)
ALICE = a_holder(4321000, "alice", "train.ipynb", since=NOW - 7800, seen=True)
CAROL = a_holder(99, "carol", "sweep.ipynb", since=NOW - 720, seen=True)
TICKET = Ticket(1, "queue-1-0.lock", None, CAROL, "2 GPUs")
FREE = [DeviceStatus(device, State.FREE, READ, 3) for device in GPUS]
RESERVED = [row._replace(state=State.RESERVED, holders=(ALICE,)) for row in FREE]
AWAITED = [row._replace(awaited_by=CAROL) for row in FREE]
UNUSED = [row._replace(is_unused=True) for row in RESERVED]
IN_PARTS = RESERVED[1]._replace(
    holders=(changed(ALICE, terms=ReservationTerms(Size(2048.0))),), promisable_mib=12000.0
)
PART = Device(1, "MIG-1", "Tesla T4 MIG 1g.5gb", memory_mib=4864, instance=2)


def picture(*rows: DeviceStatus, waiting: tuple[Ticket, ...] = (), **about: Any) -> list[str]:
    """Return the lines of a status with these rows, without the bars and the time of the day."""
    text = repr(Status(rows, waiting, time=NOW, host="box", frontend=MAGIC, **about))
    text = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d", "NOW", text)
    return [re.sub("[\u2588\u2591]", "", line) for line in text.splitlines()]


DARK = DeviceStatus(GPUS[0], State.UNKNOWN, Usage(compute=0, sees_all=False))
UNREAD = "GPU0's usage can't be read. If you know it is unused: %reserve_gpu 0"
GET, QUEUE = "Get one with %reserve_gpu", "Wait in the queue: %reserve_gpu --wait"
HEADS: dict[str, tuple[tuple[DeviceStatus, ...], str, list[str]]] = {
    "nothing": ((), "No GPU found.", []),
    "one of three": (
        (FREE[0], RESERVED[1], RESERVED[2]), "1 of 3 GPUs is free: GPU0.", [GET]
    ),
    "two of three": (
        (FREE[0], RESERVED[1], FREE[2]), "2 of 3 GPUs are free: GPU0 and GPU2.", [GET]
    ),
    "instances": (
        (FREE[0], DeviceStatus(PART, State.BUSY)), "1 of 2 devices is free: GPU0.", [GET]
    ),
    "both": ((FREE[0], FREE[1]), "Both GPUs are free.", [GET]),
    "all": (tuple(FREE), "All 3 GPUs are free.", [GET]),
    "in a row": (
        (RESERVED[0], *(each._replace(device=each.device._replace(index=n)) for n, each in
         enumerate((FREE[0],) * 4, 1)), DeviceStatus(PART, State.FREE)),
        "5 of 6 devices are free: GPU1 to GPU4 and GPU1:2.", [GET],
    ),
    "the only one, free": ((FREE[0],), "GPU0 is free.", [GET]),
    "the only one, mine": ((RESERVED[0]._replace(is_mine=True),), "GPU0 is the only GPU here.", []),
    "none": (tuple(RESERVED), "None of 3 GPUs is free.", [QUEUE]),
    "the only one": ((RESERVED[0],), "GPU0 is not free.", [QUEUE]),
    "reserved but idle": (
        (UNUSED[0], RESERVED[1]),
        "None of 2 GPUs is free.",
        ["Ask alice (train.ipynb) for GPU0, idle for 2 h 10 min.", f"Or w{QUEUE[1:]}"],
    ),
    "lost": (
        (DeviceStatus(Fault(0, "lost"), State.BROKEN), DeviceStatus(GPUS[1], State.PROHIBITED)),
        "None of 2 GPUs is free.",
        [reasons.trouble([State.BROKEN])],
    ),
    "one of two lost": (
        (DeviceStatus(Fault(0, "lost"), State.BROKEN), RESERVED[1]),
        "None of 2 GPUs is free.",
        [QUEUE],
    ),
    "awaited": (
        tuple(AWAITED),
        "None of 3 GPUs is free.",
        ["The free GPUs are offered to the queue first.", QUEUE],
    ),
    "room for a part": (
        (RESERVED[0], IN_PARTS),
        "None of 2 GPUs is free.",
        ["11.7 GiB of GPU1 is available now: %reserve_gpu --memory 12GB", QUEUE],
    ),
    "room for a smaller part": (
        (IN_PARTS._replace(promisable_mib=6666.0),),
        "GPU1 is not free.",
        ["6.5 GiB of GPU1 is available now: %reserve_gpu --memory 6GB", QUEUE],
    ),
    "too little room for a part": (
        (IN_PARTS._replace(promisable_mib=1000.0),), "GPU1 is not free.", [QUEUE]
    ),
    "room that somebody waits for": (
        (IN_PARTS._replace(awaited_by=CAROL),), "GPU1 is not free.", [QUEUE]
    ),
    "room beside strangers": (
        (FREE[0]._replace(state=State.BUSY, promisable_mib=9000.0),),
        "GPU0 is not free.",
        [
            "As root, find the processes that may hold that memory: fuser -v /dev/nvidia*",
            f"Or w{QUEUE[1:]}",
        ],
    ),
    "what can't be seen": ((DARK,), "GPU0 is not free.", [UNREAD]),
    "what can't be seen beside what comes free": (
        (DARK, RESERVED[1]), "None of 2 GPUs is free.", [UNREAD, f"Or w{QUEUE[1:]}"]
    ),
    "ours": (
        (RESERVED[0]._replace(is_mine=True), FREE[1]), "1 of 2 GPUs is free: GPU1.", []
    ),
}  # fmt: skip


@pytest.mark.parametrize(("rows", "head", "advice"), HEADS.values(), ids=HEADS.keys())
def test_what_to_do(rows: tuple[DeviceStatus, ...], head: str, advice: list[str]) -> None:
    """The first line counts what is free, the last says what one who has nothing should do."""
    is_awaited = any(row.awaited_by for row in rows)
    waiting = (TICKET._replace(memory_limit_mib=2048.0),) if is_awaited else ()
    lines = picture(*rows, waiting=waiting)
    assert re.sub(r", \d x Tesla T4$", "", lines[0]) == f"{head}  box, NOW"
    layout = Status(rows, waiting, time=NOW, frontend=MAGIC).picture().layout
    assert list(map(phrases.plain, layout.foot)) == advice
    assert lines[len(lines) - len(advice) :] == advice


def test_what_one_has_is_said_first() -> None:
    """Who has a GPU reads that before the table, as it is called there."""
    row = RESERVED[0]._replace(is_mine=True)
    for frontend, expected in [
        (MAGIC, "This kernel has GPU0."),
        (frontends.PYTHON, "This process has GPU0."),
        (frontends.SHELL, "This process has GPU0."),
    ]:
        assert str(Status((row,), frontend=frontend)).splitlines()[1] == expected


def test_what_the_rows_say() -> None:
    """A line has state, name, memory and use, then who; below it what more there is to say."""
    mine = Process(4321000, 5000, "alice", "python3", has_reserved=True)
    other = Process(777, 120, "bob", "python3", has_reserved=False)
    unseen = Process(1, 5)
    lines = picture(
        RESERVED[0]._replace(processes=(other, mine), utilisation=97, is_unreserved_use=True),
        UNUSED[1]._replace(
            holders=(
                changed(ALICE, terms=ReservationTerms(note="till noon"), last_cell=NOW - 3600),
            )
        ),
        DeviceStatus(GPUS[2], State.BUSY, READ, 0, (other,), is_unreserved_use=True),
        DeviceStatus(GPUS[0], State.BUSY, READ, None, (unseen,), is_unreserved_use=None),
        DeviceStatus(GPUS[1], State.UNKNOWN, reason="can't be seen"),
        DeviceStatus(Fault(7, "GPU is lost"), State.BROKEN, reason="GPU is lost"),
        AWAITED[2],
        waiting=(TICKET,),
    )
    alice = "alice, train.ipynb (pid 4321000) for 2 h 10 min"
    assert [" ".join(line.split()) for line in lines[2:-3]] == [
        f"0 reserved 5.0 of 15.0 GiB 97 % {alice}",
        "without a reservation: bob, python3 (pid 777)",
        f'1 reserved 5.0 of 15.0 GiB 3 % {alice}, idle for 1 h: "till noon"',
        "2 busy 5.0 of 15.0 GiB 0 % no reservation: bob, python3 (pid 777)",
        "0 busy 5.0 of 15.0 GiB used by pid 1",
        "1 unknown ? of 15.0 GiB can't be seen",
        "7 broken GPU is lost",
        "2 awaited 5.0 of 15.0 GiB 3 % by carol (sweep.ipynb)",
        "waiting in the queue",
        "1. carol, sweep.ipynb (pid 99) has waited 12 min for 2 GPUs",
    ]


def test_a_split_gpu_stands_above_its_instances() -> None:
    """The instances of a GPU stand under a row with its model, each with its profile."""
    lines = picture(
        FREE[0],
        DeviceStatus(PART, State.FREE, READ, 0),
        DeviceStatus(Fault(1, "x", 4), State.BROKEN),
    )
    rows = [line for line in lines[2:] if re.match(r" *\d", line)]
    assert [line[: len("  1:2  free")] for line in rows] == [
        "0      free", "1          ", "  1:2  free", "  1:4  brok",
    ]  # fmt: skip
    assert "Tesla T4" in rows[1]
    assert "split by MIG" in rows[1]
    assert " 1g.5gb " in rows[2]


def test_who_is_only_half_known() -> None:
    """Of a holder whose pid only the record names it is said that all is unverified."""
    unknown, elsewhere = Holder(), ALICE._replace(is_other_namespace=True, listed_pid=None)
    first, second = picture(RESERVED[0]._replace(holders=(unknown, elsewhere)))[2:4]
    assert first.endswith(" %  unknown user")
    assert second.endswith("(pid 4321000 in another container, unverified) for 2 h 10 min")


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


@pytest.mark.process
def test_in_ipython_in_a_terminal(machine: Machine) -> None:
    """IPython in a real terminal shows the status in its colours and its width."""
    machine.use("mig")
    text = screen(machine, 60, "%reserve_gpu --status")
    assert "\x1b" in text
    bare = COLOURS.sub("", text)
    assert max(map(len, bare.splitlines())) <= 60
    assert re.search(r"^  1:2 +free +2g\.10gb", bare, re.MULTILINE)


def screen(machine: Machine, columns: int, *lines: str) -> str:
    """Return what IPython shows in a terminal of so many columns."""
    terminal, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))
    command = [sys.executable, "-m", "IPython", "--no-banner", "--no-term-title"]
    environ = machine.environ(TERM="xterm-256color")
    for name in ("NO_COLOR", "COLUMNS", "LINES"):  # the last two go before what the terminal says
        environ.pop(name, None)
    text = b""
    with closing(os.fdopen(terminal, "rb", buffering=0)) as read, subprocess.Popen(
        [*command, "--ext=reserve_gpu", "-c", "\n".join(lines)],
        env=environ, cwd=machine.folder, stdin=subprocess.DEVNULL, stdout=end, stderr=end,
    ) as process:  # fmt: skip
        os.close(end)
        with suppress(OSError):  # EIO at the end
            while part := read.read(65536):
                text += part
        assert process.wait(LIMIT_S) == 0, text
    return text.decode().replace("\r\n", "\n")


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


@pytest.mark.process
def test_in_ipython_where_letters_are_few(machine: Machine) -> None:
    """IPython shows the status also where its output is not UTF-8."""
    machine.use("busy")
    done = machine.ipython("%reserve_gpu --status", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()
    assert re.search(r"0 +busy +\?{6} ", done.stdout)


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


@pytest.mark.process
def test_below_a_reservation(machine: Machine) -> None:
    """Inside of `reserve-gpu run` the limit is told as that reservation's, not as somebody's."""
    run = (sys.executable, "-m", "reserve_gpu", "run", "1", "--", "sh", "-c")
    said = machine.command(*run, f"{sys.executable} -m reserve_gpu status; true").stdout
    assert (
        "This process runs under your reservation of GPU1, so CUDA_VISIBLE_DEVICES='1' is already "
        "set. Don't change it."
    ) in said
    status = (sys.executable, "-m", "reserve_gpu", "status")
    said = machine.command(*status, CUDA_VISIBLE_DEVICES="1").stdout
    assert "CUDA_VISIBLE_DEVICES='1' was set elsewhere" in said


@pytest.mark.process
def test_once_cuda_has_started(machine: Machine) -> None:
    """Who could not use another GPU any more is not told how to get one."""
    with machine.child() as child:
        assert "Get one with" in child.run("str(reserve_gpu.status())").value
        child.run("import ctypes; ctypes.CDLL('libcuda.so.1').cuInit(0)")
        said = child.run("str(reserve_gpu.status())").value
    assert "CUDA has started in this process: only GPUs that it sees can be reserved." in said
    assert "Get one with" not in said
