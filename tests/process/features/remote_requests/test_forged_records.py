"""The process that `reserve-gpu release` selects, if other users write into lock files."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

import pytest

from reserve_gpu.model.holders import Answer
from reserve_gpu.reservation import remote_release
from reserve_gpu.reservation.remote_release import Choice
from tests.support.locked import held
from tests.support.processes import US, is_running, wait_for
from tests.support.remote_release import release
from tests.support.users import DAEMON, NOBODY, UUIDS, as_user, child_of

if TYPE_CHECKING:
    from pathlib import Path

    from reserve_gpu.model.holders import Reserved
    from tests.support.here import Here
    from tests.support.machine import Child, Machine

pytestmark = [pytest.mark.xdist_group("users")]

SLEEP = ("sleep", "98765")


@pytest.fixture
def owned(users: Machine) -> Machine:
    """Let one user own the lock files and their directory."""
    with child_of(users, DAEMON) as first:
        first.reserve("'0,1'")
    return users


def can_end(machine: Machine, name: str) -> bool:
    """Return whether `release NAME --end` as the holder ends a process."""
    return release(machine, name, "--end", user=NOBODY).stdout.startswith("Ended ")


def program_of(pid: int) -> str:
    """Return the name of the program that a process runs."""
    with open(f"/proc/{pid}/comm", encoding="utf-8") as name:
        return name.read().rstrip()


def forge(child: Child, path: Path, **fields: Any) -> None:
    """Let a process of another user write into a lock file."""
    text = json.dumps(json.loads(path.read_bytes()) | fields)
    assert child.run(f"open({str(path)!r}, 'w').write({text!r})").error is None


def lock_file(machine: Here, number: str) -> Path:
    """Return the lock file of a GPU."""
    return machine.locks / f"{machine.uuid(number)}.lock"


# -- names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["train.py", "train", "train.ipynb", "98765", "python train.py"])
def test_forged_name_ends_no_process(users: Machine, name: str) -> None:
    with child_of(users, NOBODY) as holder, child_of(users, DAEMON) as other:
        holder.reserve("'1'")
        path = users.locks / f"{UUIDS[1]}.lock"
        forge(other, path, command=f"python {name}", notebook=None, index=0, label="GPU0")
        assert not can_end(users, name)
        forge(other, path, command=name, notebook=name)
        assert not can_end(users, name)
        assert is_running(holder.pid)
        assert can_end(users, "child.py")


def test_number_means_a_gpu_or_a_pid(here: Here) -> None:
    """A number does not match a word of a command line."""
    argv = [*US, "run", "1", "--", *SLEEP]
    with here.running(*argv, environ=here.environ(), stdout=2) as command:
        wait_for(lambda: program_of(command.pid) == "sleep")
        assert release(here, SLEEP[1], "--end").returncode == 2
        assert is_running(command.pid)
        assert release(here, SLEEP[0], "--end").returncode == 0


def test_forged_number_of_a_gpu_ends_no_notebook(here: Here) -> None:
    """Without a driver, a GPU's number in a lock file is not trusted."""
    with here.kernel() as kernel, here.child() as other:
        kernel.run("%reserve_gpu 1")
        pid = kernel.pid
        forge(other, lock_file(here, "1"), index=0, label="GPU0")
        here.add("fail nvmlInitWithFlags * 999")
        for end in ([], ["--end"]):
            assert release(here, "0", *end).returncode == 2
        assert is_running(pid)
        assert release(here, str(pid)).returncode == 0
        assert held(here) == []


def test_name_of_a_notebook_comes_from_jupyter(here: Here) -> None:
    with here.kernel(JPY_SESSION_NAME="/home/alice/train.ipynb") as kernel, here.child() as other:
        kernel.run("%reserve_gpu 1")
        forge(other, lock_file(here, "1"), notebook="old.ipynb", command="x")
        assert f"train.ipynb (pid {kernel.pid})" in here.command(*US, "list").stdout
        assert release(here, "old.ipynb").returncode == 2
        assert held(here) == [1]
        assert release(here, "train").returncode == 0
        assert held(here) == []
        kernel.run("%reserve_gpu 1")
        forge(other, lock_file(here, "1"), notebook="old.ipynb")
        assert release(here, "1").returncode == 0  # this confirms no name


def test_script_has_no_notebook_name(here: Here) -> None:
    """A script that inherits the variable with a notebook's name does not have that name."""
    with here.child(JPY_SESSION_NAME="train.ipynb") as child:
        child.reserve("'1'")
        assert release(here, "train.ipynb", "--end").returncode == 2
        assert is_running(child.pid)


def test_name_of_two_processes_ends_neither(here: Here) -> None:
    with here.child() as one, here.child() as other:
        one.reserve("'0'")
        other.reserve("'1'")
        done = release(here, "child.py", "--end")
        assert done.stderr.splitlines()[1::2] == [
            f"reserve-gpu release {child.pid}" for child in (one, other)
        ]
        assert is_running(one.pid)
        assert is_running(other.pid)


@pytest.mark.parametrize(("owner", "name"), [(os.geteuid(), "far.ipynb"), (None, None), (12, None)])
def test_notebook_name_in_a_record_needs_the_kernels_user(
    here: Here, owner: int | None, name: str | None
) -> None:
    """The name in a record counts only if no other user can write the record."""
    with here.kernel() as kernel:
        kernel.run("__vsc_ipynb_file__ = '/home/alice/far.ipynb'")
        kernel.run("%reserve_gpu 1")
        each = only_reservation()
        process = each.holder.record.who._replace(notebook="far.ipynb")
        record = each.holder.record._replace(who=process)
        holder = each.holder._replace(record=record, record_owner=owner)
        known = remote_release.identified(each._replace(holder=holder))
        assert known.holder.notebook == name
        assert sys.executable.rpartition("/")[2] not in (known.holder.name or "")


# -- lock files ------------------------------------------------------------------------------------


def swap_lock_files(machine: Machine) -> None:
    """Swap the names of two lock files, as their owner can."""
    one, other = (machine.locks / f"{uuid}.lock" for uuid in UUIDS)
    one.rename(machine.locks / "x")
    other.rename(one)
    (machine.locks / "x").rename(other)


def test_renamed_lock_file_ends_no_script(owned: Machine) -> None:
    """A GPU's number ends no script whose lock file was renamed, but the script's pid does."""
    with child_of(owned, NOBODY) as zero, child_of(owned, NOBODY) as one:
        zero.reserve("'0'")
        one.reserve("'1'")
        swap_lock_files(owned)
        assert not can_end(owned, "0")
        assert is_running(zero.pid)
        assert is_running(one.pid)
        assert can_end(owned, str(one.pid))
        assert is_running(zero.pid)


def test_driver_confirms_the_device_of_a_script(owned: Machine) -> None:
    """A script without a record is ended by its GPU's number if the driver lists it there."""
    with child_of(owned, NOBODY) as child:
        child.reserve("'1'")
        (record,) = owned.locks.glob("*.record-65534-*")
        record.unlink()
        assert not can_end(owned, "1")
        owned.add(f"compute {child.pid} 100")
        assert can_end(owned, "1")


def test_environment_confirms_the_device_of_a_command(owned: Machine) -> None:
    """A command of `reserve-gpu run` is ended only by its own GPU's number."""
    argv = [*as_user(NOBODY), *US, "run", "1", "--", *SLEEP]
    with owned.running(*argv, environ=owned.environ(), stdout=2) as command:
        wait_for(lambda: program_of(command.pid) == "sleep")
        swap_lock_files(owned)
        assert not can_end(owned, "0")
        assert is_running(command.pid)
        swap_lock_files(owned)
        assert can_end(owned, "1")


def test_second_name_of_a_lock_file_ends_no_process(users: Machine) -> None:
    """Another user who links a second GPU's name to a lock file can't cause an end."""
    with child_of(users, NOBODY) as holder, child_of(users, DAEMON) as other:
        holder.reserve("'1'")
        paths = [str(users.locks / f"{uuid}.lock") for uuid in reversed(UUIDS)]
        assert other.run(f"os.path.exists({paths[1]!r}) or os.link(*{paths})").error is None
        can_end(users, "0")
        assert is_running(holder.pid)
        assert can_end(users, "1")


def test_forged_restart_does_not_prevent_an_end(here: Here) -> None:
    """A record that says that the GPU is kept for a restart is not trusted."""
    with here.child() as child:
        child.reserve("'1'")
        forge(child, lock_file(here, "1"), kept_until=9e9)
        assert release(here, "1", "--end").returncode == 0
        assert held(here) == []


# -- processes -------------------------------------------------------------------------------------


def only_reservation() -> Reserved:
    """Return the only reservation of this user."""
    (each,) = remote_release.reservations_of_user()
    return each


def test_process_without_the_lock_is_not_ended(here: Here) -> None:
    """A process that has the lock file open, but not locked, is not ended."""
    with here.child() as child:
        child.reserve("'1'")
        each = only_reservation()
        child.run(f"reserve_gpu.release(); kept = open({str(lock_file(here, '1'))!r})")
        with here.child() as next_holder:
            next_holder.reserve("'1'")
            assert remote_release.release(Choice(each, each.rows), is_end=True) is Answer.GONE
            assert is_running(next_holder.pid)
        assert is_running(child.pid)


def test_process_that_released_the_named_gpu_is_not_ended(here: Here) -> None:
    with here.child() as child:
        child.reserve("'0,1'")
        each = only_reservation()
        child.reserve("'1'")
        row = next(row for row in each.rows if row.label == "GPU0")
        assert remote_release.release(Choice(each, (row,)), is_end=True) is Answer.GONE
        assert is_running(child.pid)


def test_later_process_with_the_same_pid_is_not_ended(here: Here) -> None:
    with here.child() as child:
        child.reserve("'1'")
        each = only_reservation()
        earlier = each._replace(began_boot=(each.began_boot or 0.0) - 1.0)
        assert remote_release.release(Choice(earlier, each.rows), is_end=True) is Answer.GONE
        assert is_running(child.pid)


def test_pid_of_another_namespace_is_not_ended(here: Here) -> None:
    """No process is ended if /proc shows another PID namespace."""
    with here.child() as child:
        child.reserve("'1'")
        apart = ["unshare", "--pid", "--fork", "--"]
        if here.command(*apart, "true").returncode:
            pytest.skip("no PID namespace can be created here")
        done = here.command(*apart, *US, "release", "--all", "--end")
        assert "Ended" not in done.stdout
        assert is_running(child.pid)


# Leave the locks to a lock keeper, as a kernel with another pid would.
LEAVE = """
import json, time
from reserve_gpu.system import lock_keeper, subprocesses
from reserve_gpu.reservation import exec_handover
from reserve_gpu.reservation.session import session
locks = [*session().held.locks.values()]
left = {{"kernel": {kernel}, "until": time.time() + 60, "since": [lock.since for lock in locks]}}
left |= {{"directory": os.path.dirname(locks[0].path), **exec_handover.serialize(session().held)}}
numbers = [locks[0].descriptor, locks[0].owned.descriptor]
environ = {{lock_keeper.LEFT: json.dumps(left)}}
subprocesses.start_background([*lock_keeper.WORDS, "k", "60"], numbers, environ)
"""


def test_reused_pid_of_a_kernel_keeps_the_gpu_for_its_restart(here: Here) -> None:
    """The pid of an ended kernel, which another holder has now, does not release the kept GPU."""
    with here.child() as first, here.child() as second:
        first.reserve("'0'")
        second.reserve("'1'")
        assert first.run(LEAVE.format(kernel=second.pid)).error is None
        first.kill()
        assert release(here, str(second.pid), "--end").returncode == 0
        assert held(here) == [0]
        assert release(here, "0").returncode == 0
        assert held(here) == []


SU = (
    "import subprocess, sys\n"
    "for name in os.listdir('/proc/self/fd'):\n"
    "    if 'lock' in os.path.basename(os.path.realpath(f'/proc/self/fd/{name}')):\n"
    "        os.set_inheritable(int(name), True)\n"
    "r, w = os.pipe()\n"
    "os.set_inheritable(w, True)\n"
    "os.dup2(r, 0)\n"
    "os.execvp('su', ['su', '-c', 'true'])"
)


def test_set_uid_program_is_never_ended(users: Machine) -> None:
    """`--end` sends no signal to a set-UID program, such as `su` that waits for a password."""
    with child_of(users, NOBODY) as holder:
        holder.reserve("'1'")
        holder.send(SU)
        wait_for(lambda: program_of(holder.pid) == "su")
        assert is_running(holder.pid)
        assert not can_end(users, "--all")
        assert release(users, "1", "--end").returncode
        assert is_running(holder.pid)
