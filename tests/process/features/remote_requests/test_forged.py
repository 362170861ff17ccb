"""Which process `reserve-gpu release` means, whatever other users write into the lock files."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

import pytest

from reserve_gpu.model.devices import Device, State
from reserve_gpu.model.holders import Answer, DeviceStatus, Reserved
from reserve_gpu.render import reservation_list
from reserve_gpu.reservation import remote_release
from reserve_gpu.reservation.remote_release import Choice
from tests.support.holders import a_holder
from tests.support.locked import held
from tests.support.machine import CHILD
from tests.support.processes import US, is_running, wait_for
from tests.support.users import DAEMON, NOBODY, UUIDS, as_user, child_of, for_users

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from subprocess import CompletedProcess

    from tests.support.here import Here
    from tests.support.machine import Child, Machine

pytestmark = [pytest.mark.xdist_group("users")]

ENDLESS = ("sleep", "98765")


@pytest.fixture
def users() -> Iterator[Machine]:
    with for_users() as machine:
        yield machine


def release(machine: Machine, *words: str) -> CompletedProcess[str]:
    return machine.command(*US, "release", *words)


def as_nobody(machine: Machine, *words: str) -> CompletedProcess[str]:
    return machine.command(*as_user(NOBODY), *US, "release", *words)


def name_of(pid: int) -> str:
    """Return the name of the program that a process runs."""
    with open(f"/proc/{pid}/comm", encoding="utf-8") as name:
        return name.read().rstrip()


def forge(child: Child, path: Path, **fields: Any) -> None:
    """Have a process of another user write into a lock file."""
    told = json.dumps(json.loads(path.read_bytes()) | fields)
    assert child.run(f"open({str(path)!r}, 'w').write({told!r})").error is None


@pytest.mark.parametrize("word", ["train.py", "train", "train.ipynb", "98765", "python train.py"])
def test_a_forged_name_ends_no_process(users: Machine, word: str) -> None:
    """--end ends no process by a name that another user wrote into its lock file."""
    with child_of(users, NOBODY) as holder, child_of(users, DAEMON) as other:
        holder.reserve("'1'")
        path = users.locks / f"{UUIDS[1]}.lock"
        forge(other, path, command=f"python {word}", notebook=None, index=0, label="GPU0")
        done = as_nobody(users, word, "--end")
        assert done.returncode == 2
        assert done.stderr.startswith(f"You don't hold '{word}'.")
        forge(other, path, command=word, notebook=word)
        assert as_nobody(users, word, "--end").returncode == 2
        assert is_running(holder.pid)
        assert as_nobody(users, "child.py", "--end").stdout.startswith(f"Ended {CHILD}")


def test_a_number_means_a_gpu_or_a_pid(here: Here) -> None:
    """A number never means a word of a command line."""
    argv = [*US, "run", "1", "--", *ENDLESS]
    with here.running(*argv, environ=here.environ(), stdout=2) as command:
        wait_for(lambda: name_of(command.pid) == "sleep")
        done = release(here, ENDLESS[1], "--end")
        assert done.stderr.startswith(f"You don't hold '{ENDLESS[1]}'.")
        assert is_running(command.pid)
        assert release(here, ENDLESS[0], "--end").stdout.startswith(f"Ended {' '.join(ENDLESS)}")


def test_a_forged_number_of_a_lost_gpu(here: Here) -> None:
    """Without a driver, --end ends no notebook by a GPU number in its lock file."""
    with here.kernel() as kernel, here.child() as other:
        kernel.run("%reserve_gpu 1")
        pid = kernel.pid
        forge(other, here.locks / f"{here.uuid('1')}.lock", index=0, label="GPU0")
        here.add("fail nvmlInitWithFlags * 999")
        for end in ([], ["--end"]):
            done = release(here, "0", *end)
            assert "You don't hold '0'." in done.stderr
            assert done.returncode == 2
        assert is_running(pid)
        assert release(here, str(pid)).returncode == 0
        assert held(here) == []


def renamed(machine: Machine, first: str, second: str) -> None:
    """Let two lock files swap their names, as the owner of both can."""
    one, other = machine.locks / f"{first}.lock", machine.locks / f"{second}.lock"
    one.rename(machine.locks / "x")
    other.rename(one)
    (machine.locks / "x").rename(other)


@pytest.fixture
def idle(users: Machine) -> Machine:
    """Make a machine whose lock files, and their directory, belong to one of its users."""
    with child_of(users, DAEMON) as first:
        first.reserve("'0,1'")
    return users


def test_renamed_lock_files(idle: Machine) -> None:
    """A GPU's number ends no script whose lock file was renamed, and its pid ends it."""
    with child_of(idle, NOBODY) as zero, child_of(idle, NOBODY) as one:
        zero.reserve("'0'")
        one.reserve("'1'")
        renamed(idle, *UUIDS)
        done = as_nobody(idle, "0", "--end")
        assert "did not confirm that it is the one" in done.stdout
        assert is_running(zero.pid)
        assert is_running(one.pid)
        assert as_nobody(idle, str(one.pid), "--end").stdout.startswith("Ended ")
        assert is_running(zero.pid)


def test_the_driver_shows_the_process(idle: Machine) -> None:
    """A script without a record is ended by its GPU's number while the driver shows it there."""
    with child_of(idle, NOBODY) as child:
        child.reserve("'1'")
        (record,) = idle.locks.glob("*.record-65534-*")
        record.unlink()
        assert "did not confirm" in as_nobody(idle, "1", "--end").stdout
        idle.add(f"compute {child.pid} 100")
        assert as_nobody(idle, "1", "--end").stdout.startswith("Ended ")


def test_a_command_has_its_number_in_its_environment(idle: Machine) -> None:
    """Only its own GPU's number ends a command of `reserve-gpu run`."""
    argv = [*as_user(NOBODY), *US, "run", "1", "--", *ENDLESS]
    with idle.running(*argv, environ=idle.environ(), stdout=2) as command:
        wait_for(lambda: name_of(command.pid) == "sleep")
        renamed(idle, *UUIDS)
        assert "did not confirm" in as_nobody(idle, "0", "--end").stdout
        assert is_running(command.pid)
        renamed(idle, *UUIDS)
        assert as_nobody(idle, "1", "--end").stdout.startswith("Ended ")


def test_a_second_name_of_a_lock_file(users: Machine) -> None:
    """Another user who links the name of a second GPU to a lock file makes --end end nothing."""
    with child_of(users, NOBODY) as holder, child_of(users, DAEMON) as other:
        holder.reserve("'1'")
        paths = [str(users.locks / f"{uuid}.lock") for uuid in reversed(UUIDS)]
        assert other.run(f"os.path.exists({paths[1]!r}) or os.link(*{paths})").error is None
        as_nobody(users, "0", "--end")
        assert is_running(holder.pid)
        assert as_nobody(users, "1", "--end").stdout.startswith("Ended ")


def test_names_come_from_the_process(here: Here) -> None:
    """A notebook is listed and released by the name from Jupyter, not by a forged one."""
    with here.kernel(JPY_SESSION_NAME="/home/alice/train.ipynb") as kernel, here.child() as other:
        kernel.run("%reserve_gpu 1")
        forge(other, here.locks / f"{here.uuid('1')}.lock", notebook="old.ipynb", command="x")
        assert f"train.ipynb (pid {kernel.pid})" in here.command(*US, "list").stdout
        done = release(here, "old.ipynb")
        assert done.stderr.startswith("You don't hold 'old.ipynb'.")
        done = release(here, "train")
        assert done.stdout == f"Released GPU1 of train.ipynb (pid {kernel.pid}).\n"
        kernel.run("%reserve_gpu 1")
        forge(other, here.locks / f"{here.uuid('1')}.lock", notebook="old.ipynb")
        assert release(here, "1").stdout.startswith("Released GPU1")  # it confirms no name


def test_a_script_has_no_notebook(here: Here) -> None:
    """A script that inherits a notebook's name in its environment does not go by that name."""
    with here.child(JPY_SESSION_NAME="train.ipynb") as child:
        child.reserve("'1'")
        assert release(here, "train.ipynb", "--end").returncode == 2
        assert is_running(child.pid)


def test_two_of_one_name(here: Here) -> None:
    """A command that two processes run ends neither; their pids are listed."""
    with here.child() as one, here.child() as other:
        one.reserve("'0'")
        other.reserve("'1'")
        done = release(here, "child.py", "--end")
        assert done.stderr.splitlines()[1::2] == [
            f"reserve-gpu release {child.pid}" for child in (one, other)
        ]
        assert is_running(one.pid)
        assert is_running(other.pid)


def test_only_what_has_it_locked_is_ended(here: Here) -> None:
    """A process is not ended if it has the lock file open without the lock."""
    with here.child() as child:
        child.reserve("'1'")
        (each,) = remote_release.reservations_of_user()
        path = str(here.locks / f"{here.uuid('1')}.lock")
        child.run(f"reserve_gpu.release(); kept = open({path!r})")
        with here.child() as next_holder:
            next_holder.reserve("'1'")
            assert remote_release.release(Choice(each, each.rows), is_end=True) is Answer.GONE
            assert is_running(next_holder.pid)
        assert is_running(child.pid)


def test_only_the_gpu_that_was_named(here: Here) -> None:
    """A process that still holds another GPU is not ended after it released the named one."""
    with here.child() as child:
        child.reserve("'0,1'")
        (each,) = remote_release.reservations_of_user()
        child.reserve("'1'")
        row = next(row for row in each.rows if row.label == "GPU0")
        assert remote_release.release(Choice(each, (row,)), is_end=True) is Answer.GONE
        assert is_running(child.pid)


def test_a_later_process_of_the_same_number(here: Here) -> None:
    """A process is not ended if it started at another time than the chosen one."""
    with here.child() as child:
        child.reserve("'1'")
        (each,) = remote_release.reservations_of_user()
        earlier = each._replace(began_boot=(each.began_boot or 0.0) - 1.0)
        assert remote_release.release(Choice(earlier, each.rows), is_end=True) is Answer.GONE
        assert is_running(child.pid)


def test_the_number_of_another_pid_namespace(here: Here) -> None:
    """No process is ended if /proc shows another PID namespace."""
    with here.child() as child:
        child.reserve("'1'")
        apart = ["unshare", "--pid", "--fork", "--"]
        if here.command(*apart, "true").returncode:
            pytest.skip("no PID namespace can be made here")
        done = here.command(*apart, *US, "release", "--all", "--end")
        assert "Ended" not in done.stdout
        assert is_running(child.pid)


# Leaves the locks to an heir, as a kernel with another pid would.
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


def test_a_kept_gpu_is_known_by_its_lock(here: Here) -> None:
    """The pid of a kernel that has ended does not release its GPU after another process got it."""
    with here.child() as first, here.child() as second:
        first.reserve("'0'")
        second.reserve("'1'")
        assert first.run(LEAVE.format(kernel=second.pid)).error is None
        first.kill()
        assert release(here, str(second.pid), "--end").stdout.startswith("Ended ")
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


def test_su_is_never_ended(users: Machine) -> None:
    """--end sends no signal to a set-UID program, such as `su` that waits for a password."""
    with child_of(users, NOBODY) as holder:
        holder.reserve("'1'")
        holder.send(SU)
        wait_for(lambda: name_of(holder.pid) == "su")
        assert is_running(holder.pid)
        for done in (as_nobody(users, "--all", "--end"), release(users, "1", "--end")):
            assert "can't be ended from here" in done.stdout
        assert is_running(holder.pid)


def test_a_warning_before_the_first_signal(here: Here) -> None:
    """--end warns before its first signal that before_end() functions are not called."""
    with here.child() as child:
        child.reserve("'1'")
        done = release(here, "1", "--end")
        assert done.stderr == (
            f"{CHILD} (pid {child.pid}) can't be asked to end: it gets SIGTERM now and SIGKILL 10 "
            "s later, and its before_end() functions are not called.\n"
        )
        assert done.stdout.startswith("Ended ")


def test_a_forged_pid_joins_no_reservations() -> None:
    """A holder that the kernel does not list is not merged with the pid in its record."""
    own = a_holder(4321, seen=True)._replace(file="GPU-0.lock")
    other = a_holder(4321)._replace(file="GPU-1.lock")
    rows = (
        DeviceStatus(Device(0, "GPU-0"), State.RESERVED, holders=(own,)),
        DeviceStatus(Device(1, "GPU-1"), State.RESERVED, holders=(other,)),
    )
    assert [(each.holder, each.rows) for each in Reserved.among(rows)] == [
        (own, rows[:1]), (other, rows[1:])
    ]  # fmt: skip


def test_a_pid_that_is_a_gpus_number_too() -> None:
    """A process is named by its GPU if its pid equals a GPU's number."""
    holder = a_holder(1, seen=True)
    each = Reserved(holder, (DeviceStatus(Device(0, "GPU-0"), State.RESERVED, holders=(holder,)),))
    there = Reserved(a_holder(9, seen=True), (DeviceStatus(Device(1, "GPU-1"), State.RESERVED),))
    assert reservation_list.name(each, [each]) == "1"
    assert reservation_list.name(each, [each, there]) == "GPU0"


@pytest.mark.parametrize(("owner", "name"), [(os.geteuid(), "far.ipynb"), (None, None), (12, None)])
def test_whose_record_names_a_notebook(here: Here, owner: int | None, name: str | None) -> None:
    """The name in a record counts if only the user of the kernel can write the record."""
    with here.kernel() as kernel:
        kernel.run("__vsc_ipynb_file__ = '/home/alice/far.ipynb'")
        kernel.run("%reserve_gpu 1")
        (each,) = remote_release.reservations_of_user()
        said = each.holder.record.who._replace(notebook="far.ipynb")
        record = each.holder.record._replace(who=said)
        holder = each.holder._replace(record=record, record_owner=owner)
        known = remote_release.identified(each._replace(holder=holder))
        assert known.holder.notebook == name
        assert sys.executable.rpartition("/")[2] not in (known.holder.name or "")
