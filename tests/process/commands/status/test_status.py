"""%reserve_gpu --status: every device, who uses it, who has it, and who waits."""

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
import time
from contextlib import ExitStack, closing, suppress
from typing import TYPE_CHECKING

import pytest

import reserve_gpu
from reserve_gpu.render.pictures import Picture
from tests.support.machine import CHILD, LIMIT_S, TAKE_THE_MUTEX, Machine
from tests.support.platforms import CONTAINER, behind, on_a_host
from tests.support.processes import own_name, wait_for

if TYPE_CHECKING:
    from tests.support.here import Here
    from tests.support.machine import Machine

from tests.support.status import age, devices, devices_of, lock_of, states

ME = own_name()


# -- who has what ----------------------------------------------------------------------------------


@pytest.mark.promise
@on_a_host
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


def test_in_a_container_while_the_mutex_is_held(machine: Machine) -> None:
    """Where others' locks can't be seen without it, what is not known is unknown, and said."""
    with behind(machine, *CONTAINER) as child:
        child.run(TAKE_THE_MUTEX)
        found = child.run("reserve_gpu.status().to_dict()").value
    assert [device["state"] for device in found["devices"]] == ["unknown", "unknown"]
    assert "in progress" in found["problem"]


# -- the queue -------------------------------------------------------------------------------------


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


# -- in a terminal, in a log -----------------------------------------------------------------------

COLOURS = re.compile(r"\x1b\[[0-9;]*m")


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


def test_in_ipython_where_letters_are_few(machine: Machine) -> None:
    """IPython shows the status also where its output is not UTF-8."""
    machine.use("busy")
    done = machine.ipython("%reserve_gpu --status", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()
    assert re.search(r"0 +busy +\?{6} ", done.stdout)


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


def test_once_cuda_has_started(machine: Machine) -> None:
    """Who could not use another GPU any more is not told how to get one."""
    with machine.child() as child:
        assert "Get one with" in child.run("str(reserve_gpu.status())").value
        child.run("import ctypes; ctypes.CDLL('libcuda.so.1').cuInit(0)")
        said = child.run("str(reserve_gpu.status())").value
    assert "CUDA has started in this process: only GPUs that it sees can be reserved." in said
    assert "Get one with" not in said
