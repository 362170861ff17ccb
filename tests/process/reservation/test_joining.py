"""A second process on what a first one of the same user has reserved."""

from __future__ import annotations

import json
import re
import shlex
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.locked import held
from tests.support.machine import CHILD
from tests.support.processes import US
from tests.support.reserving import got, of_gpu, refused
from tests.support.users import DAEMON, NOBODY, child_of, for_users

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.here import Here
    from tests.support.machine import Machine

from tests.support.joining import JOIN, SESSION, guest, join

ENVIRON = "{k: v for k, v in os.environ.items() if k[:5] in ('CUDA_', 'XLA_C', 'CUPY_', 'RESER')}"
PRINT = f"import json, os; print(json.dumps({ENVIRON}))"


@pytest.mark.promise
@pytest.mark.parametrize(
    ("scenario", "wish"),
    [
        ("eight", "'5,2'"),
        ("eight", "'3', memory='10GB'"),
        pytest.param("eight", "'3', memory='1GB'", marks=pytest.mark.full),
        pytest.param("mig570", "'1:1'", marks=pytest.mark.full),
    ],
)
def test_the_same_variables(here: Here, scenario: str, wish: str) -> None:
    """The command has the holder's GPUs in their order, its part, and its caps."""
    here.use(scenario)
    with here.child() as child:
        child.reserve(wish)
        expected = child.run(ENVIRON).value
        done = join(here, "--", sys.executable, "-c", PRINT)
        assert done.stdout, done.stderr
        environ: dict[str, Any] = json.loads(done.stdout)
        for own in ("RESERVE_GPU_HELD", "RESERVE_GPU_CAPS"):
            environ.pop(own, None)
            expected.pop(own, None)
        assert environ == expected
        assert done.stderr.startswith(f"Joined {CHILD} on GPU")


def test_the_command_is_ones_own(here: Here) -> None:
    """Its exit code is the command's; without a command it is the user's shell; all is said."""
    with here.child() as child:
        assert join(here).stderr == "You hold no GPU on this machine.\n"
        child.reserve("'1'")
        assert join(here, "1", "--", "sh", "-c", "exit 7").returncode == 7
        assert join(here, "--", "nonsense").stderr == "Command not found: nonsense.\n"
        assert join(here, "nonsense", "--", "true").returncode == 2
        shell = here.folder / "shell"
        shell.write_text("#!/bin/sh\necho my shell on $CUDA_VISIBLE_DEVICES\n")
        shell.chmod(0o755)
        assert join(here, SHELL=str(shell)).stdout == "my shell on 1\n"
        again = join(here, "--", "sh", "-c", f"{shlex.join(US)} run -- true; exit 3")
        assert (
            "The process that started this one has already reserved GPU1 for both" in again.stderr
        )


def test_several_reservations(here: Here) -> None:
    """Of several reservations each is listed with the command that joins it."""
    with here.child() as one, here.child() as other:
        one.reserve("'0'")
        other.reserve("'1'")
        done = join(here, "--", "true")
        assert done.returncode == 2
        lines = done.stderr.splitlines()
        assert lines[0] == "There are 2 reservations. Which one do you mean?"
        assert lines[1::2] == [f"reserve-gpu join {child.pid}" for child in (one, other)]
        done = join(here, str(other.pid), "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES")
        assert done.stdout == "1\n"


@pytest.mark.promise
@pytest.mark.parametrize("wish", ["'0'", "'0', memory='1GB'"])
def test_taken_while_either_lives(here: Here, wish: str) -> None:
    """The GPU is taken until both the holder and the guest have ended, whichever goes first."""
    for first in ("holder", "guest"):
        with here.child() as holder:
            holder.reserve(wish)
            with guest(here) as other:
                (holder if first == "holder" else other).kill()
                assert held(here) == [0]
                assert "GPU0" in refused("0")
            if first == "guest":
                assert held(here) == [0]
        assert held(here) == []


@pytest.mark.parametrize("wishes", [{}, {"memory": "1GB"}])
def test_nobody_shares_what_a_guest_is_left_with(here: Here, wishes: dict[str, Any]) -> None:
    """The guest of one who shared with nobody shares with nobody either, when that one has gone."""
    with here.child() as holder:
        holder.reserve("'0'")
        with guest(here):
            holder.kill()
            text = refused("0", **wishes)
            assert "overdue: the reservation that it joined has been released" in of_gpu(text)


def test_a_part_is_counted_once(here: Here) -> None:
    """A guest has the holder's part, not another one; it keeps it when the holder has gone."""
    here.use("eight")
    with here.child() as holder:
        holder.reserve("'3', memory='50GB'")
        with guest(here), here.child() as third:
            assert third.reserve("'3', memory='30GB'").value == "3"
            assert "has no room for 37.3 GiB" in refused("3", memory="40GB")
            assert holder.reserve("'3', memory='52GB'").value == "3"
            holder.kill()
            assert "has no room for 37.3 GiB" in refused("3", memory="40GB")
        assert got("3", memory="40GB") == "3"


def test_the_status_shows_both(here: Here) -> None:
    """Holder and guest have a line each; processes of either are theirs, others stand beside."""
    with here.child() as holder, here.child() as own:
        holder.reserve("'1', note='thesis'")
        with guest(here) as other:
            users = "\n".join(f"compute {child.pid} 100" for child in (holder, other, own))
            here.add(users)
            import reserve_gpu

            status = reserve_gpu.status()
            line = of_gpu(str(status), "1")
            assert line.startswith("reserved: ")
            assert f"child.py (pid {holder.pid}) for" in line
            assert f"(pid {other.pid}) joined to {CHILD} for" in line
            assert "without a reservation" not in line
            assert f"not joined to {CHILD}: " in line
            assert f"child.py (pid {own.pid})" in line
            row = status.to_dict()["devices"][1]
            assert row["is_used_without_reservation"] is False
            assert [h["beside"] for h in row["holders"]] == [None, CHILD]


def test_the_use_of_a_guest_is_the_holders(here: Here) -> None:
    """What holder and guest use together counts against their part."""
    here.use("eight")
    with here.child() as holder:
        holder.reserve("'3', memory='10GB'")
        with guest(here) as other:
            gpus = here.scenario.read_text().split("gpu\n")
            gpus[4] += f"  compute {holder.pid} 6000\n  compute {other.pid} 6000\n"
            here.write("gpu\n".join(gpus))
            import reserve_gpu

            row = reserve_gpu.status().rows[3]
            assert [h.is_over for h in row.holders if not h.beside] == [True]


def test_a_deleted_lock_file(here: Here) -> None:
    """Holder and guest whose lock files somebody has deleted lock them anew, beside each other."""
    with here.child() as holder:
        holder.reserve("'0'")
        with guest(here) as other:
            for path in here.locks.glob(f"{here.uuid('0')}*"):
                path.unlink()
            renew = f"{SESSION}session().run(session().renew)"
            for child in (holder, other):
                (line,) = child.run(renew).value
                assert re.match(r"The lock file of GPU\d \(.*\) was deleted or replaced\.", line)
            holder.kill()
            assert held(here) == [0]


def test_too_late(here: Here) -> None:
    """Who holds something, or has started CUDA, can't join: the first has to release it."""
    with here.child() as holder, here.child() as other, here.child() as late:
        holder.reserve("'0'")
        other.reserve("'1'")
        answer = other.run(JOIN.format("'0'"))
        assert answer.error == "RequestError"
        assert answer.text == "This kernel holds GPU1. Release it first:\n%reserve_gpu --release"
        late.run("import ctypes; assert not ctypes.CDLL('libcuda.so.1').cuInit(0)")
        assert late.run(JOIN.format("'0'")).error == "TooLateError"


def test_in_a_notebook(here: Here) -> None:
    """A second notebook joins; it is told when the first has gone, and can reserve the GPU then."""
    pytest.importorskip("ipykernel.kernelspec")
    with here.child() as holder, here.kernel() as kernel:
        holder.reserve("'1'")
        cell = kernel.run("%reserve_gpu --join")
        assert cell.stdout.splitlines()[0] == f"Joined {CHILD} on GPU1."
        assert "CUDA_VISIBLE_DEVICES = '1'" in cell.stdout
        assert "CUDA_VISIBLE_DEVICES = '1'" in kernel.run("%reserve_gpu").stdout  # it has one
        assert "released" not in kernel.run("1").all
        holder.kill()
        told = f"{CHILD} has released GPU1, which this kernel had joined."
        assert told in kernel.run("1").shown
        assert "CUDA_VISIBLE_DEVICES = '1'" in kernel.run("%reserve_gpu").stdout
        assert "released" not in kernel.run("1").all
        assert held(here) == [1]
        assert "You hold no GPU on this machine." in kernel.run("%reserve_gpu --join 1").stderr


def test_a_guest_asks_for_something_else(here: Here) -> None:
    """A guest gets what it has by asking for nothing particular; for another wish it releases."""
    with here.child() as holder:
        holder.reserve("'0'")
        with guest(here) as other:
            assert other.reserve().value == "0"
            for wish in ("memory='1GB'", "'1'", "count=2"):
                answer = other.reserve(wish)
                assert answer.error == "RequestError"
                assert answer.text.startswith(f"This kernel has joined {CHILD} on GPU0.")
            assert other.visible() == "0"
        with here.child() as sharer:
            sharer.reserve("'1', memory='1GB'")
            with guest(here, "'1'") as other:
                assert other.reserve().value == "1"
                assert other.run("reserve_gpu.current().memory_mib").value == 1e9 / 2**20


def test_two_guests_of_one_that_has_gone(here: Here) -> None:
    """The first of two that reserves anew has the GPU, and the other one is its guest."""
    with here.child() as holder:
        holder.reserve("'0'")
        with guest(here) as one, guest(here, "'0'") as two:
            holder.kill()
            assert one.reserve().value == "0"
            assert one.run("reserve_gpu.current().lease.until").error is None
            two.run("from reserve_gpu.reservation import joining")
            assert two.run(f"{SESSION}joining.has_lost_holder(session().held)").value is False


# -- who may ---------------------------------------------------------------------------------------


@pytest.fixture
def users() -> Iterator[Machine]:
    with for_users() as machine:
        yield machine


@pytest.mark.xdist_group("users")
def test_another_user_can_not_join(users: Machine) -> None:
    """What another user has reserved is nothing to join."""
    with child_of(users, NOBODY) as holder, child_of(users, DAEMON) as other:
        holder.reserve("'0'")
        answer = other.run(JOIN.format("'0'"))
        assert answer.text == "You hold no GPU on this machine."
        with child_of(users, NOBODY) as same:
            assert same.run(JOIN.format("'0'")).error is None


@pytest.mark.xdist_group("users")
def test_a_forged_guest_counts_as_what_it_is(users: Machine) -> None:
    """A sharer that calls itself another user's guest is a sharer, with a part of its own."""
    users.write("gpu\n  memory 8192\n  uuid GPU-00000000-0000-4000-8000-000000000000")
    with (
        child_of(users, NOBODY) as honest,
        child_of(users, DAEMON) as forger,
        child_of(users, NOBODY) as third,
    ):
        honest.reserve("'0', memory='3GB'")
        forger.reserve("'0', memory='4GB'")
        (path,) = users.locks.glob("*.share-65534-0.lock")
        since = json.loads(path.read_text())["since"]
        forge = (
            f"import glob, json, os\n(path,) = glob.glob('{users.locks}/*.share-1-0.lock')\n"
            f"text = json.dumps(json.load(open(path)) | {{'guest_of': {since!r}}})\n"
            "file = open(path, 'r+'); file.write(text); file.truncate(); file.close()"
        )
        assert forger.run(forge).error is None
        assert third.reserve("'0', memory='4GB'").error == "NoFreeDeviceError"
        forger.run("reserve_gpu.release()")


def test_a_quota_counts_the_gpu_once(here: Here) -> None:
    """One GPU per user: a guest counts with its holder, and in its place when that has gone."""
    here.rules.write_text("[limits]\ngpus = 1\n")
    with here.child() as holder:
        holder.reserve("'0'")
        with guest(here), here.child() as other:
            assert other.reserve("'1'").error == "NoFreeDeviceError"
            assert holder.reserve("'0'").value == "0"
            holder.kill()
            assert other.reserve("'1'").error == "NoFreeDeviceError"
