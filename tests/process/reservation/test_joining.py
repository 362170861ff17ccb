"""A second process joins the reservation of another process of the same user."""

from __future__ import annotations

import json
import shlex
import sys
from typing import TYPE_CHECKING, Any

import pytest

from reserve_gpu.model.devices import State
from tests.support.locked import held
from tests.support.machine import CHILD
from tests.support.processes import US
from tests.support.reserving import got, would_be_refused
from tests.support.users import DAEMON, NOBODY, child_of

if TYPE_CHECKING:
    from tests.support.here import Here
    from tests.support.machine import Machine

from tests.support.joining import JOIN, SESSION, guest, join

ENVIRON = "{k: v for k, v in os.environ.items() if k[:5] in ('CUDA_', 'XLA_C', 'CUPY_', 'RESER')}"
PRINT = f"import json, os; print(json.dumps({ENVIRON}))"


@pytest.mark.parametrize(
    ("scenario", "wish"),
    [
        ("eight", "'5,2'"),
        ("eight", "'3', memory='10GB'"),
    ],
)
def test_a_joined_command_has_the_holders_variables(here: Here, scenario: str, wish: str) -> None:
    """The devices are in the same order, with the same part and memory caps."""
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


def test_a_command_joins_the_reservation(here: Here) -> None:
    """The exit code is the command's, and without a command the user's shell is started."""
    with here.child() as child:
        assert "no GPU" in join(here).stderr
        child.reserve("'1'")
        assert join(here, "1", "--", "sh", "-c", "exit 7").returncode == 7
        assert "nonsense" in join(here, "--", "nonsense").stderr
        assert join(here, "nonsense", "--", "true").returncode == 2
        shell = here.folder / "shell"
        shell.write_text("#!/bin/sh\necho my shell on $CUDA_VISIBLE_DEVICES\n")
        shell.chmod(0o755)
        assert join(here, SHELL=str(shell)).stdout == "my shell on 1\n"
        again = join(here, "--", "sh", "-c", f"{shlex.join(US)} run -- true; exit 3")
        assert "already reserved GPU1 for both" in again.stderr


@pytest.mark.promise
@pytest.mark.parametrize("wish", ["'0'", "'0', memory='1GB'"])
def test_a_gpu_is_reserved_until_both_processes_have_ended(here: Here, wish: str) -> None:
    """Either the holder or the process that joined can end first."""
    for first in ("holder", "joined process"):
        with here.child() as holder:
            holder.reserve(wish)
            with guest(here) as other:
                (holder if first == "holder" else other).kill()
                assert held(here) == [0]
                assert would_be_refused("0").rows[0].label == "GPU0"
            if first == "joined process":
                assert held(here) == [0]
        assert held(here) == []


def test_a_joined_process_has_the_holders_part(here: Here) -> None:
    """The part counts once, and the process keeps it after the holder has ended."""
    here.use("eight")
    with here.child() as holder:
        holder.reserve("'3', memory='50GB'")
        with guest(here), here.child() as third:
            assert third.reserve("'3', memory='30GB'").value == "3"
            assert would_be_refused("3", memory="40GB").rows[0].state is State.FULL
            assert holder.reserve("'3', memory='52GB'").value == "3"
            holder.kill()
            assert would_be_refused("3", memory="40GB").rows[0].state is State.FULL
        assert got("3", memory="40GB") == "3"


def test_deleted_lock_files_are_locked_again_by_both_processes(here: Here) -> None:
    with here.child() as holder:
        holder.reserve("'0'")
        with guest(here) as other:
            for path in here.locks.glob(f"{here.uuid('0')}*"):
                path.unlink()
            renew = f"{SESSION}session().run(session().renew)"
            for child in (holder, other):
                (line,) = child.run(renew).value
                assert "was deleted or replaced" in line
            holder.kill()
            assert held(here) == [0]


def test_a_process_that_holds_a_gpu_or_runs_cuda_can_not_join(here: Here) -> None:
    """A holder has to release its GPU first."""
    with here.child() as holder, here.child() as other, here.child() as late:
        holder.reserve("'0'")
        other.reserve("'1'")
        answer = other.run(JOIN.format("'0'"))
        assert answer.error == "RequestError"
        assert "holds GPU1" in answer.text
        late.run("import ctypes; assert not ctypes.CDLL('libcuda.so.1').cuInit(0)")
        assert late.run(JOIN.format("'0'")).error == "TooLateError"


def test_a_second_notebook_joins_and_can_reserve_the_gpu_later(here: Here) -> None:
    """After the holder has ended, a cell says so once."""
    pytest.importorskip("ipykernel.kernelspec")
    with here.child() as holder, here.kernel() as kernel:
        holder.reserve("'1'")
        cell = kernel.run("%reserve_gpu --join")
        assert f"Joined {CHILD} on GPU1" in cell.stdout
        assert "CUDA_VISIBLE_DEVICES = '1'" in cell.stdout
        assert "CUDA_VISIBLE_DEVICES = '1'" in kernel.run("%reserve_gpu").stdout
        assert "released" not in kernel.run("1").all
        holder.kill()
        assert f"{CHILD} has released GPU1" in kernel.run("1").shown
        assert "CUDA_VISIBLE_DEVICES = '1'" in kernel.run("%reserve_gpu").stdout
        assert "released" not in kernel.run("1").all
        assert held(here) == [1]
        assert "You hold no GPU" in kernel.run("%reserve_gpu --join 1").stderr


def test_a_joined_process_can_request_only_what_it_has(here: Here) -> None:
    """A request without conditions returns what it has, and any other one is refused."""
    with here.child() as holder:
        holder.reserve("'0'")
        with guest(here) as other:
            assert other.reserve().value == "0"
            for wish in ("memory='1GB'", "'1'", "count=2"):
                answer = other.reserve(wish)
                assert answer.error == "RequestError"
                assert f"joined {CHILD} on GPU0" in answer.text
            assert other.visible() == "0"
        with here.child() as sharer:
            sharer.reserve("'1', memory='1GB'")
            with guest(here, "'1'") as other:
                assert other.reserve().value == "1"
                assert other.run("reserve_gpu.current().memory_mib").value == 1e9 / 2**20


# -- users and quotas ------------------------------------------------------------------------------


@pytest.mark.xdist_group("users")
def test_another_users_reservation_can_not_be_joined(users: Machine) -> None:
    with child_of(users, NOBODY) as holder, child_of(users, DAEMON) as other:
        holder.reserve("'0'")
        answer = other.run(JOIN.format("'0'"))
        assert "You hold no GPU" in answer.text
        with child_of(users, NOBODY) as same:
            assert same.run(JOIN.format("'0'")).error is None


@pytest.mark.xdist_group("users")
def test_a_part_with_a_forged_record_counts_in_full(users: Machine) -> None:
    """A process that claims to have joined another user's reservation has a part of its own."""
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


def test_a_joined_gpu_counts_once_towards_the_quota(here: Here) -> None:
    """It still counts after the holder has ended."""
    here.rules.write_text("[limits]\ngpus = 1\n")
    with here.child() as holder:
        holder.reserve("'0'")
        with guest(here), here.child() as other:
            assert other.reserve("'1'").error == "NoFreeDeviceError"
            assert holder.reserve("'0'").value == "0"
            holder.kill()
            assert other.reserve("'1'").error == "NoFreeDeviceError"
