"""Notices after a cell about waiters for idle devices, and about other users of the devices."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from reserve_gpu.features.waiters.notifier import WaiterNotices
from reserve_gpu.reservation.session import session
from tests.support.here import feature
from tests.support.locked import watched
from tests.support.processes import wait_for
from tests.support.waiters import Waiter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.here import Here
    from tests.support.shell import Shell
IDLE = "gpu\n  memory 8192\n"
WAITS, USED_BY_OTHERS = "has waited", "other processes are using it"


def set_times(**seconds: float) -> WaiterNotices:
    """Replace this process's feature by one with these times."""
    waiters = WaiterNotices(session(), **seconds)
    session().features = {**session().features, "WaiterNotices": waiters}
    return waiters


@pytest.fixture(autouse=True)
def _no_pause(here: Here) -> None:
    set_times(pause_s=0.0, idle_s=0.0)


def notebook(here: Here, devices: str = "") -> Shell:
    """Return a notebook that has reserved devices, by default the only one, which is idle."""
    if not devices:
        here.write(IDLE)
    shell = here.shell(is_notebook=True)
    assert not shell.run(f"%reserve_gpu {devices}").error
    return shell


def use_it(here: Here) -> None:
    """Let this process use the only device."""
    here.write(f"{IDLE}  compute {os.getpid()} 900\n  utilisation 90\n")


@pytest.mark.promise
def test_waiter_is_shown_once(here: Here) -> None:
    """A waiter is shown after one cell, with the command to type, unless the GPU is in use."""
    shell = notebook(here)
    assert shell.run("pass").all.strip() == ""
    with here.child() as child:
        waiter = Waiter(here, child, "'0', note='thesis'")
        use_it(here)
        assert WAITS not in shell.run("pass").all
        here.write(IDLE)
        feature(WaiterNotices)._tell_at = 0.0
        shown = shell.run("pass").shown.strip()
        assert WAITS in shown
        assert "thesis" in shown
        assert shown.endswith("\n%reserve_gpu --release")
        assert WAITS not in shell.run("pass").all
        shell.run("%reserve_gpu --release")
        assert waiter.answer().value == "0"


def test_device_is_not_idle_for_ten_minutes_after_its_use(here: Here) -> None:
    """No waiter is shown until ten minutes after the reservation and the last use."""
    waiters = set_times(pause_s=0.0)
    shell = notebook(here)
    with here.child() as child:
        Waiter(here, child)
        assert WAITS not in shell.run("pass").all
        for lock in session().holding.locks.values():
            lock.taken = lock.taken.later(-600.0)  # ten minutes later
        use_it(here)
        assert WAITS not in shell.run("pass").all
        here.write(IDLE)
        assert WAITS not in shell.run("pass").all  # it was in use just now
        waiters._used_at -= 600.0
        assert WAITS in shell.run("pass").all


def test_second_waiter_is_shown_after_ten_minutes(here: Here) -> None:
    shell = notebook(here)
    with here.child() as one, here.child() as two:
        Waiter(here, one, "note='first'")
        assert '("first")' in shell.run("pass").shown
        Waiter(here, two, "note='second'")
        assert WAITS not in shell.run("pass").shown
        feature(WaiterNotices)._tell_at = 0.0  # ten minutes later
        assert '("second")' in shell.run("pass").shown


@pytest.mark.parametrize(
    ("held", "wanted", "setting", "is_shown"),
    [("0", "0", "0", False), ("0", "1", "1", False), ("0,1", "1", "1", True)],
    ids=["switched off", "another GPU", "one of two GPUs"],
)
def test_only_wanted_waiters_for_a_held_device_are_shown(
    here: Here, held: str, wanted: str, setting: str, *, is_shown: bool
) -> None:
    shell = notebook(here, held)
    shell.run(f"%env RESERVE_GPU_TELL_WAITERS={setting}")
    with here.child() as other, here.child() as child:
        other.reserve("'1'")
        Waiter(here, child, f"'{wanted}'")
        assert (WAITS in shell.run("pass").all) is is_shown


def test_unlocked_tickets_are_ignored(here: Here) -> None:
    """Ten thousand unlocked files with names of tickets are not waiters."""
    shell = notebook(here)
    for number in range(10_000):
        (here.locks / f"queue-4711-{number}.lock").touch()
    assert WAITS not in shell.run("pass").all


def test_check_does_not_list_the_lock_directory(here: Here) -> None:
    """Waiters are found by name, because another user can fill the directory with files."""
    shell = notebook(here)
    listed: list[str] = []

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("os.listdir", "os.scandir"):
            listed.append(os.path.realpath(arguments[0]))

    with here.child() as child:
        Waiter(here, child)
        with watched(note):
            assert WAITS in shell.run("pass").shown
    assert str(here.locks) not in listed


# -- processes of other users ----------------------------------------------------------------------


@contextmanager
def process_of_another_user() -> Iterator[int]:
    """Start a process of another user. An ordinary user gets process 1, which is root's."""
    if os.geteuid():
        yield 1
        return
    line = "setpriv --reuid=nobody --regid=nogroup --clear-groups sleep 600 >/dev/null & echo $!"
    pid = int(subprocess.check_output(["sh", "-c", line]))  # not a child of this process
    try:
        command = Path(f"/proc/{pid}/cmdline")
        wait_for(lambda: command.read_bytes().startswith(b"sleep"))
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)


def run_until(shell: Shell, text: str) -> str:
    """Run cells until one shows the text, because a check after a slow one is delayed."""
    shown = [""]

    def is_shown() -> bool:
        shown[0] = shell.run("1").all
        return text in shown[0]

    wait_for(is_shown)
    return shown[0]


@pytest.mark.parametrize(
    ("before", "after", "name"),
    [
        (f"compute {{}} 900\ncompute {os.getpid()} 2000", "compute {} 3000", "(pid {}"),
        (
            "memory 24576\ngraphics {} 2000",
            "memory 24576\ngraphics {} 9000",
            "(pid {}, graphics)",
        ),
    ],
    ids=["compute", "graphics"],
)
def test_large_process_of_another_user_is_shown_once(
    here: Here, before: str, after: str, name: str
) -> None:
    """A process of another user is shown if it uses more memory than a desktop."""
    shell = here.shell()
    shell.run("%reserve_gpu 1")
    with process_of_another_user() as pid:
        here.use("two")
        here.add(before.format(pid))
        assert USED_BY_OTHERS not in shell.run("1").all
        here.use("two")
        here.add(after.format(pid))
        assert name.format(pid) in run_until(shell, USED_BY_OTHERS)
        assert USED_BY_OTHERS not in shell.run("1").all


def test_next_cell_is_not_checked_again(here: Here) -> None:
    """After two cells in quick succession, only the first check calls the driver."""
    set_times()
    shell = here.shell()
    assert not shell.run("%reserve_gpu").error
    before = here.calls().count("nvmlInitWithFlags")
    shell.run("1")
    # When a cell begins, the number of the GPU is read, because CUDA has not started.
    assert here.calls().count("nvmlInitWithFlags") == before + 1
