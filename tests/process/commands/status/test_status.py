"""The status of devices whose holders, waiters and readers are other processes."""

from __future__ import annotations

import json
import os
import re
from typing import TYPE_CHECKING

import pytest

import reserve_gpu
from tests.support.locked import make_older
from tests.support.machine import CHILD, Machine
from tests.support.platforms import CONTAINER, behind, on_a_host
from tests.support.processes import US, own_name, wait_for
from tests.support.status import devices, devices_of, record_of

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


def test_in_a_container_used_memory_has_no_known_process(here: Here) -> None:
    here.write("gpu\ngpu\n used 300\ngpu\n compute 4321000 300")
    with here.rival("0"), here.rival("1"), behind(here, *CONTAINER) as child:
        rows = devices_of(child)
    assert [row["state"] for row in rows] == ["reserved", "reserved", "busy"]
    assert [row["is_reserved_but_idle"] for row in rows] == [True, None, False]
    assert rows[2]["processes"][0]["has_reserved"] is None
    assert rows[0]["holders"][0]["pid"] == os.getpid()
    assert rows[0]["holders"][0]["elsewhere"]


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


def test_inside_reserve_gpu_run_the_limit_is_that_reservation_s(machine: Machine) -> None:
    inside = machine.command(*US, "run", "1", "--", "sh", "-c", f"{' '.join(US)} status; true")
    assert "under your reservation of GPU1" in inside.stdout
    outside = machine.command(*US, "status", CUDA_VISIBLE_DEVICES="1")
    assert "set elsewhere" in outside.stdout
