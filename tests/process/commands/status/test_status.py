"""The status of devices whose holders, waiters and readers are other processes."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from contextlib import ExitStack, closing, suppress
from typing import TYPE_CHECKING

import pytest

import reserve_gpu
from reserve_gpu.render.pictures import Picture
from tests.support.locked import make_older
from tests.support.machine import CHILD, LIMIT_S, TAKE_THE_MUTEX, Machine
from tests.support.platforms import CONTAINER, behind, on_a_host
from tests.support.processes import US, own_name, wait_for
from tests.support.status import device_states, devices, devices_of, record_of

if TYPE_CHECKING:
    from tests.support.here import Here

USER = own_name()
LOST = "fail nvmlDeviceGetHandleByIndex_v2 1 15"


# -- holders and processes -------------------------------------------------------------------------


@pytest.mark.promise
@on_a_host
def test_the_status_names_holders_and_processes_without_a_reservation(here: Here) -> None:
    with here.child() as holder:
        holder.reserve("0, note='until Friday'")
        here.write(f"gpu\n compute {holder.pid} 300\ngpu\n compute {os.getpid()} 700")
        first, second = devices()
        is_its_own = devices_of(holder)[0]["is_this_process"]
    (found,) = first["holders"]
    assert first["state"] == "reserved"
    assert (found["pid"], found["note"], found["confirmed"]) == (holder.pid, "until Friday", True)
    assert found["user"] == USER
    assert [process["pid"] for process in first["processes"]] == [holder.pid]
    assert first["processes"][0]["command"].startswith("python")
    assert not first["is_reserved_but_idle"]
    assert (first["is_this_process"], is_its_own) == (False, True)
    assert second["state"] == "busy"
    assert second["is_used_without_reservation"]
    assert second["processes"][0]["memory_mib"] == 700


@on_a_host
def test_a_holder_s_children_have_reserved_and_other_processes_have_not(here: Here) -> None:
    """A process of the same user next to the holder is marked as such."""
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


def test_each_holder_of_a_shared_gpu_is_named_and_this_process_comes_first(here: Here) -> None:
    notebooks = {"a.ipynb": "till noon", "b.ipynb": "till two"}
    with ExitStack() as stack:
        for notebook, note in notebooks.items():
            child = stack.enter_context(here.child(JPY_SESSION_NAME=f"/home/{notebook}"))
            child.run("import warnings; warnings.simplefilter('ignore')")
            assert child.reserve(f"0, memory='1GB', note={note!r}").value == "0"
        reserve_gpu.reserve("0", memory="1GB")
        holders = devices()[0]["holders"]
        text = str(reserve_gpu.status())
        assert device_states() == {"GPU0": "reserved", "GPU1": "free"}
    assert holders[0]["pid"] == os.getpid()
    assert {holder["notebook"]: holder["note"] for holder in holders[1:]} == notebooks
    assert len({holder["pid"] for holder in holders}) == 3
    assert len({holder["since"] for holder in holders}) == 3
    assert all(holder["user"] == USER and holder["confirmed"] for holder in holders)
    for word in (*notebooks, *notebooks.values(), "this process"):
        assert text.count(word) == 1


@on_a_host
def test_a_refusal_has_the_same_rows_as_the_status(here: Here) -> None:
    here.write(
        "gpu\ngpu\n compute 4321000 900\ngpu\n mode prohibited\n"
        "gpu\n mode exclusive_process\n compute 4321000 9\ngpu\ngpu"
    )
    with here.child() as holder, here.child() as other:
        for child, number in ((holder, 0), (other, 5)):
            child.reserve(f"{number}, note='thesis'")
            make_older(here.locks / f"{here.uuid(str(number))}.lock", 7200)
        here.add("fail nvmlDeviceGetHandleByIndex_v2 4 15\nfail nvmlDeviceGetComputeMode 5 999")
        status = reserve_gpu.status()
        with pytest.raises(reserve_gpu.NoFreeDeviceError) as refused:
            reserve_gpu.reserve()
    assert isinstance(refused.value.picture, Picture)
    of_status, of_refusal = (
        [(entry.state, entry.who, entry.more) for entry in picture.layout.entries]
        for picture in (status.picture(), refused.value.picture)
    )
    assert of_refusal == of_status


@on_a_host
@pytest.mark.parametrize("memory", [None, "1GB"], ids=["whole", "shared"])
def test_a_lost_gpu_keeps_its_holder(here: Here, *, memory: str | None) -> None:
    with here.child() as holder:
        assert holder.reserve(f"'1', note='thesis', memory={memory!r}").value == "1"
        here.add(LOST)
        first, lost = devices()
        is_its_own = devices_of(holder)[1]["is_this_process"]
        holder.run("reserve_gpu.release()")
        assert devices()[1]["holders"] == []
    assert (first["state"], first["holders"]) == ("free", [])
    (found,) = lost["holders"]
    assert (found["pid"], found["user"], found["note"]) == (holder.pid, USER, "thesis")
    assert (lost["state"], lost["uuid"], is_its_own) == ("broken", None, True)
    assert (lost["is_this_process"], lost["is_reserved_but_idle"]) == (False, None)


def test_a_lost_instance_keeps_its_holder(here: Here) -> None:
    """A lost GPU has the holders of all its instances."""
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


def test_in_a_container_used_memory_has_no_known_process(here: Here) -> None:
    here.write("gpu\ngpu\n used 300\ngpu\n compute 4321000 300")
    with here.rival("0"), here.rival("1"), behind(here, *CONTAINER) as child:
        rows = devices_of(child)
    assert [row["state"] for row in rows] == ["reserved", "reserved", "busy"]
    assert [row["is_reserved_but_idle"] for row in rows] == [True, None, False]
    assert rows[2]["processes"][0]["has_reserved"] is None
    assert rows[0]["holders"][0]["pid"] == os.getpid()
    assert rows[0]["holders"][0]["elsewhere"]


# -- the age of reservations and cells -------------------------------------------------------------

START_SHELL = """
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


def test_a_fork_of_a_kernel_records_no_cells(machine: Machine) -> None:
    with machine.child() as child:
        assert not child.run(START_SHELL).error
        record = record_of(machine)
        make_older(record, 7200)
        before = record.stat().st_mtime
        assert child.run(RUN_A_CELL_IN_A_FORK).value == 0
        assert record.stat().st_mtime == before
        child.run("shell.run_cell('1')")
        assert record.stat().st_mtime > before


def test_impossible_times_in_a_record_are_not_shown(here: Here) -> None:
    with here.child() as holder:
        holder.reserve("0")
        path = record_of(here)
        record = json.loads(path.read_text())
        for since, written, mtime in [(9e10, -1, 4e9), (-5, 1e300, 4e9), ("x", "y", 1)]:
            times = {"since": since, "written": written}
            by_boot = {f"{name}_boot": value for name, value in times.items()}
            path.write_text(json.dumps({**record, **times, **by_boot}))
            os.utime(path, (mtime, mtime))
            assert f"(pid {holder.pid}), idle\n" in str(reserve_gpu.status())


@pytest.mark.usefixtures("terminal")
def test_the_user_of_an_idle_kernel_reads_how_to_release_its_gpu(here: Here) -> None:
    here.write("gpu")
    with here.child(JPY_SESSION_NAME="/home/bob/eval.ipynb") as holder:
        holder.reserve("0")
        make_older(record_of(here), 9 * 3600, 3 * 3600 + 60)
        text = str(reserve_gpu.status())
        assert devices()[0]["idle_for_s"] == pytest.approx(3 * 3600 + 60, abs=60)
    assert f"reserve-gpu release {holder.pid}\n" in text


# -- the reader ------------------------------------------------------------------------------------


def test_reading_the_status_delays_no_reservation(here: Here) -> None:
    """No status is incomplete during reservations."""
    with here.child() as reader:
        reader.send(
            "problems = []\n"
            "while not os.path.exists('enough'): problems.append(reserve_gpu.status().problem)\n"
            "problems"
        )
        wait_for(lambda: here.calls().count("nvmlShutdown") > 1)
        for _ in range(50):
            assert reserve_gpu.reserve(count=2).environ["CUDA_VISIBLE_DEVICES"] == "0,1"
            reserve_gpu.release()
        (here.folder / "enough").touch()
        problems = reader.answer().value
    assert len(problems) > 1
    assert not any(problems)


def test_in_a_container_devices_are_unknown_while_the_mutex_is_held(machine: Machine) -> None:
    with behind(machine, *CONTAINER) as child:
        child.run(TAKE_THE_MUTEX)
        found = child.run("reserve_gpu.status().to_dict()").value
    assert [device["state"] for device in found["devices"]] == ["unknown", "unknown"]
    assert "in progress" in found["problem"]


def test_a_waiter_is_listed_with_its_request_and_the_devices_it_could_use(here: Here) -> None:
    here.write("gpu\n memory 20000\ngpu\n memory 20000\ngpu")
    request = "count=2, min_memory='16GiB', name='nvidia', note='thesis'"
    with here.rival("1"), here.child() as child:
        child.send(f"reserve_gpu.reserve({request}, wait=60)")
        wait_for(lambda: reserve_gpu.status().waiting)
        status = reserve_gpu.status()
    found, text = status.to_dict(), str(status)
    (entry,) = found["waiting"]
    asks = "2 GPUs of 16.0 GiB or more with 'nvidia' in the name"
    assert (entry["pid"], entry["note"], entry["asks"]) == (child.pid, "thesis", asks)
    assert entry["wants"] == sorted(device["uuid"] for device in found["devices"][:2])
    assert [device["next_in_line"] for device in found["devices"]] == [1, 1, None]
    assert re.search(r"^0 +awaited ", text, re.MULTILINE)
    assert re.search(rf'1\. .*\(pid {child.pid}\).*: "thesis"', text)


# -- IPython and the command line ------------------------------------------------------------------


def test_ipython_in_a_terminal_shows_colours_in_its_width(machine: Machine) -> None:
    machine.use("mig")
    terminal, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("4H", 24, 60, 0, 0))
    environ = machine.environ(TERM="xterm-256color")
    for name in ("NO_COLOR", "COLUMNS", "LINES"):  # the size in variables would win
        environ.pop(name, None)
    ipython = [sys.executable, "-m", "IPython", "--no-banner", "--no-term-title"]
    output = b""
    with closing(os.fdopen(terminal, "rb", buffering=0)) as read, subprocess.Popen(
        [*ipython, "--ext=reserve_gpu", "-c", "%reserve_gpu --status"],
        env=environ, cwd=machine.folder, stdin=subprocess.DEVNULL, stdout=end, stderr=end,
    ) as process:  # fmt: skip
        os.close(end)
        with suppress(OSError):  # EIO at the end
            while part := read.read(65536):
                output += part
        assert process.wait(LIMIT_S) == 0, output
    text = output.decode().replace("\r\n", "\n")
    assert "\x1b" in text
    bare = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert max(map(len, bare.splitlines())) <= 60
    assert re.search(r"^  1:2 +free +2g\.10gb", bare, re.MULTILINE)


def test_inside_reserve_gpu_run_the_limit_is_that_reservation_s(machine: Machine) -> None:
    inside = machine.command(*US, "run", "1", "--", "sh", "-c", f"{' '.join(US)} status; true")
    assert "under your reservation of GPU1" in inside.stdout
    outside = machine.command(*US, "status", CUDA_VISIBLE_DEVICES="1")
    assert "set elsewhere" in outside.stdout


def test_after_cuda_has_started_the_status_suggests_no_reservation(machine: Machine) -> None:
    with machine.child() as child:
        assert child.run("reserve_gpu.status().is_late").value is False
        child.run("import ctypes; ctypes.CDLL('libcuda.so.1').cuInit(0)")
        assert child.run("reserve_gpu.status().is_late").value is True
