"""Devices of a kernel that restarts, which a lock keeper holds for the new kernel."""

from __future__ import annotations

import fcntl
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from reserve_gpu.system import lock_keeper, subprocesses
from tests.support.locked import held, locked
from tests.support.machine import TAKE_THE_MUTEX
from tests.support.processes import US, is_running, queue, wait_for
from tests.support.users import DAEMON, NOBODY, child_of
from tests.support.waiters import LONG_S, Waiter

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.support.here import Here
    from tests.support.machine import Child, Machine

RESTARTS = int(os.environ.get("RESTARTS", "10"))
MOMENTS = int(os.environ.get("MOMENTS", "7"))  # kills at a random moment
START_CUDA = "import ctypes; assert not ctypes.CDLL('libcuda.so.1').cuInit(0)"  # for a child
LEAVE = (
    "from reserve_gpu.reservation import restart_handover\n"
    "from reserve_gpu.reservation.session import session\n"
    "session().run(restart_handover.leave_to_lock_keeper, session(), {file!r}, {seconds})"
)


@pytest.fixture
def file(request: pytest.FixtureRequest) -> Iterator[Path]:
    """Create a connection file, and kill the lock keepers for its kernel at the end."""
    is_for_users = "users" in request.fixturenames
    machine: Machine = request.getfixturevalue("users" if is_for_users else "here")
    path = machine.folder / "kernel.json"
    path.write_text("{}")
    yield path
    for process in keepers(path):
        process.kill()


def keepers(file: Path) -> list[psutil.Process]:
    """Return the lock keepers for the kernel with that connection file."""
    words = [lock_keeper.PROGRAM, str(file)]
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        found += [process] if [word for word in line if word in words] == words else []
    return found


def keeper(file: Path) -> psutil.Process:
    """Return the only lock keeper."""
    (process,) = keepers(file)
    return process


def leave(child: Child, file: Path, seconds: float = 60, *, is_killed: bool = True) -> None:
    """Let a child process leave its devices to the next kernel with that connection file."""
    answer = child.run(LEAVE.format(file=str(file), seconds=seconds))
    assert answer.error is None, answer.text
    if is_killed:
        child.kill()


def take_over(child: Child, file: Path) -> Any:
    """Let a child process take over devices; return CUDA_VISIBLE_DEVICES and the notices."""
    code = f"from reserve_gpu import api\nnotices = api.take_over({str(file)!r})"
    assert child.run(code).error is None
    return child.visible(), child.run("notices").value


def lock(machine: Here, number: str) -> Path:
    """Return the lock file of a GPU."""
    return machine.locks / f"{machine.uuid(number)}.lock"


def record(machine: Here, number: str) -> dict[str, Any]:
    """Return the record in the lock file of a GPU."""
    fields: dict[str, Any] = json.loads(lock(machine, number).read_bytes())
    return fields


# -- kernels ---------------------------------------------------------------------------------------


@pytest.mark.ipython
@pytest.mark.promise
def test_restart_keeps_the_device(here: Here) -> None:
    """A restarted kernel has its GPU before any waiter, with the same note and lease."""
    with here.kernel() as kernel, here.child() as child:
        assert not kernel.run("%reserve_gpu 1 --note thesis --for 4h").error
        before = record(here, "1")
        waiter = Waiter(here, child, "'1'")
        kernel.restart()
        wait_for(lambda: record(here, "1").get("kept_until"))
        waiter.sees(1, "reserved")
        status = json.loads(here.command(*US, "status", "--json").stdout)
        assert status["devices"][1]["holders"][0]["kept_until"]
        loaded = kernel.run("%load_ext reserve_gpu\nprint('a cell')")
        assert "GPU1 is kept" in loaded.all
        assert kernel.run("1").all.strip() == "1"  # the notice is shown once
        cell = kernel.run("%reserve_gpu")
        assert "CUDA_VISIBLE_DEVICES = '1'" in cell.stdout
        after = record(here, "1")
        same = ("since", "until", "note", "label")
        assert [after.get(name) for name in same] == [before.get(name) for name in same]
        assert after["pid"] == kernel.pid
        assert not after.get("kept_until")
        assert kernel.run("%reserve_gpu --release").error is None
        assert waiter.answer().value == "1"


@pytest.mark.promise
@pytest.mark.parametrize("how", ["shutdown", "kill -9"])
def test_shutdown_frees_the_device(here: Here, how: str) -> None:
    """A kernel that is shut down or killed leaves no lock keeper, so a waiter gets the GPU."""
    with here.kernel() as kernel, here.child() as child:
        assert not kernel.run("%reserve_gpu 0").error
        pid = kernel.pid
        waiter = Waiter(here, child, "'0'")
        if how == "shutdown":
            kernel.client.shutdown()
        else:
            os.kill(pid, signal.SIGKILL)
        assert waiter.answer().value == "0"
        assert not keepers(Path(kernel.manager.connection_file))


def test_invalid_setting_is_reported_but_does_not_prevent_exec(here: Here) -> None:
    """An invalid RESERVE_GPU_RESTART fails the next reservation, but not the start of a program."""
    with here.kernel() as kernel:
        kernel.run("%env RESERVE_GPU_RESTART=1h")
        assert "RESERVE_GPU_RESTART='1h'" in kernel.run("%reserve_gpu").all
        kernel.run("%env RESERVE_GPU_RESTART=60")
        assert not kernel.run("%reserve_gpu").error
        kernel.run("%env RESERVE_GPU_RESTART=1h")
        assert not kernel.run("from reserve_gpu import api; api.before_exec()").error


@pytest.mark.full
def test_repeated_restarts_keep_the_device_from_ten_waiters(here: Here) -> None:
    here.write("gpu\n")
    with ExitStack() as stack:
        kernel = stack.enter_context(here.kernel())
        assert not kernel.run("%reserve_gpu").error
        children = [stack.enter_context(here.child()) for _ in range(10)]
        waiters = [Waiter(here, child, limit_s=600) for child in children]
        for _ in range(RESTARTS):
            kernel.restart()
            kernel.run("%load_ext reserve_gpu")
            assert "CUDA_VISIBLE_DEVICES = '0'" in kernel.run("%reserve_gpu").stdout
            assert len(queue(here)) == len(waiters)
        kernel.client.shutdown()
        streams: dict[Any, Waiter] = {waiter.child.process.stdout: waiter for waiter in waiters}
        (first, *_), _, _ = select.select(list(streams), [], [], LONG_S)
        assert streams[first].answer().value == "0"


# -- the devices that are kept ---------------------------------------------------------------------


@pytest.mark.parametrize("wish", ["'5,2'", "'3', memory='10GB'"], ids=["two GPUs", "part of a GPU"])
def test_reservation_is_kept_unchanged(here: Here, file: Path, wish: str) -> None:
    """The new kernel has the same devices and variables, also after a request without a size."""
    here.use("eight")
    with here.child() as first, here.child() as second:
        first.reserve(wish)
        terms = "(r := reserve_gpu.current()) and [r.memory_mib, dict(r.environ), r.note]"
        before = first.run(terms).value
        files = locked(here.locks)
        leave(first, file)
        assert locked(here.locks) == files
        assert take_over(second, file) == (before[1]["CUDA_VISIBLE_DEVICES"], [])
        assert second.run(terms).value == before
        assert locked(here.locks) == files
        assert not keepers(file)
        second.reserve()
        assert second.run(terms).value == before


def test_lock_keeper_has_only_the_locks(here: Here, file: Path) -> None:
    """A lock keeper has no other file, directory, parent, session or variables of the kernel."""
    with here.child() as child:
        child.run("import socket; other = socket.socket(); other.set_inheritable(True)")
        child.reserve("'0,1'")
        leave(child, file, is_killed=False)
        process = keeper(file)
        folder = f"/proc/{process.pid}/fd"
        files = {os.readlink(f"{folder}/{number}") for number in os.listdir(folder)}
        own = {str(lock(here, index)) for index in "01"}
        own |= {path.replace(".lock", f".record-{os.geteuid()}-0") for path in own}
        assert files == {os.devnull, *own}
        assert process.cwd() == "/"
        assert os.getsid(process.pid) not in (os.getsid(child.pid), process.pid)
        assert child.pid not in [parent.pid for parent in process.parents()]
        assert set(process.environ()) <= {lock_keeper.LEFT, "LC_CTYPE"}


@pytest.mark.parametrize("how", ["timeout", "no connection file"])
def test_device_is_free_if_no_kernel_comes(here: Here, file: Path, how: str) -> None:
    """The device is free after a time, or soon after Jupyter removes the connection file."""
    with here.child() as child:
        child.reserve("'0'")
        leave(child, file, 0.5 if how == "timeout" else 60)
        assert held(here) == [0]
        if how != "timeout":
            file.unlink()
        wait_for(lambda: held(here) == [])


def test_device_is_kept_until_the_end_of_its_lease(here: Here, file: Path) -> None:
    """The lease limits the time for which a device is kept, and an overdue device is not kept."""
    with here.child() as child, here.child() as late:
        child.reserve("'0', for_=30")
        leave(child, file)
        assert 0 < float(keeper(file).cmdline()[-1]) <= 30
        late.reserve("'1'")
        late.run(START_CUDA)
        late.reserve("'1', for_=0.1")
        wait_for(lambda: record(here, "1").get("overdue"))
        leave(late, file)
        assert len(keepers(file)) == 1


def test_warning_names_only_other_processes_on_the_device(here: Here, file: Path) -> None:
    """The old kernel, whose memory is still being freed, is not named."""
    with here.child() as first, here.child() as second, here.child() as other:
        first.reserve("'1'")
        leave(first, file)
        here.add(f"compute {first.pid} 900\ncompute {other.pid} 100")
        visible, (line,) = take_over(second, file)
        assert visible == "1"
        assert "your own process" in line
        assert f"pid {other.pid}" in line
        assert f"pid {first.pid}" not in line


@pytest.mark.parametrize("how", ["", "pid"])
def test_kept_device_can_be_released(here: Here, file: Path, how: str) -> None:
    """`reserve-gpu release` frees a kept device, also by the pid of the old kernel."""
    with here.child() as first:
        first.reserve("'0'")
        leave(first, file)
        words = [str(first.pid)] if how else []
        done = here.command(*US, "release", *words)
        assert done.stdout.startswith("Released GPU0 ")
        assert done.returncode == 0
        assert held(here) == []


# -- takeovers that fail ---------------------------------------------------------------------------


def test_another_kernel_takes_nothing_over(here: Here, file: Path) -> None:
    with here.child() as first, here.child() as second:
        first.reserve("'0'")
        leave(first, file)
        assert take_over(second, file.with_name("other.json")) == (None, [])
        assert held(here) == [0]


def test_one_of_two_concurrent_processes_takes_over(here: Here, file: Path) -> None:
    with here.child() as first, here.child() as a, here.child() as b:
        first.reserve("'0'")
        leave(first, file)
        code = f"from reserve_gpu import api\napi.take_over({str(file)!r})"
        for child in (a, b):
            child.send(code)
        for child in (a, b):
            assert child.answer().error is None
        assert sorted([a.visible() or "", b.visible() or ""]) == ["", "0"]


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_only_a_living_lock_keeper_keeps_the_device(
    here: Here, file: Path, number: signal.Signals
) -> None:
    """A stopped lock keeper is taken over from, and a killed one keeps nothing."""
    with here.child() as first, here.child() as second:
        first.reserve("'0'")
        leave(first, file)
        process = keeper(file)
        process.send_signal(number)
        wait_for(lambda: number == signal.SIGSTOP or not is_running(process.pid))
        assert take_over(second, file) == ("0" if number == signal.SIGSTOP else None, [])
        assert held(here) == ([0] if number == signal.SIGSTOP else [])


def test_kernel_with_cuda_can_not_take_over(here: Here, file: Path) -> None:
    with here.child() as first, here.child() as second:
        first.reserve("'1'")
        leave(first, file)
        second.run(START_CUDA)
        assert take_over(second, file) == (None, [])
        assert held(here) == [1]


@pytest.mark.parametrize("how", ["released", "deleted"])
def test_lost_lock_is_not_taken_over(here: Here, file: Path, how: str) -> None:
    """A device that the old kernel released later, or whose lock file is gone, is not kept."""
    with here.child() as first, here.child() as second, here.child() as third:
        first.reserve("'0'")
        leave(first, file, is_killed=False)
        if how == "released":  # by a cell that is interrupted for the restart
            first.run("reserve_gpu.release()")
        else:
            lock(here, "0").unlink()
        first.kill()
        assert third.reserve("'0', memory='1GB'").value == "0"
        assert take_over(second, file) == (None, [])
        assert not keepers(file)
        assert second.reserve("'0'").error == "NoFreeDeviceError"


def has_mutex_open(child: Child) -> bool:
    """Return whether a process has the mutex's file open, and thus waits for the mutex."""
    folder = f"/proc/{child.pid}/fd"
    with suppress(OSError):
        return any(os.readlink(f"{folder}/{n}").endswith("mutex.lock") for n in os.listdir(folder))
    return False


def test_interrupted_takeover_can_be_repeated(here: Here, file: Path) -> None:
    """A takeover that is interrupted while it waits for the mutex loses nothing."""
    with here.child() as first, here.child() as second:
        first.reserve("'0'")
        leave(first, file)
        with here.child() as other:
            other.run(TAKE_THE_MUTEX)
            second.send(f"from reserve_gpu import api\napi.take_over({str(file)!r})")
            wait_for(lambda: has_mutex_open(second))
            second.process.send_signal(signal.SIGINT)
            assert second.answer().error == "KeyboardInterrupt"
        assert take_over(second, file) == ("0", [])


@pytest.mark.full
@pytest.mark.parametrize("victim", ["kernel", "lock keeper", "both"])
def test_kill_during_a_restart_leaves_at_most_one_holder(
    here: Here, file: Path, victim: str
) -> None:
    here.write("gpu\n")
    dice = random.Random(victim)  # noqa: S311 - not a secret
    for _ in range(MOMENTS):
        with here.child() as first, here.child() as second:
            first.reserve()
            delay_s = dice.uniform(0, 0.1)
            first.send(LEAVE.format(file=str(file), seconds=60))
            time.sleep(delay_s)  # a random moment
            if victim != "lock keeper":
                first.kill()
            if victim != "kernel":
                for process in keepers(file):
                    with suppress(psutil.NoSuchProcess):  # it ends by itself meanwhile
                        process.kill()
                        process.wait(LONG_S)  # until then, it has its locks
            first.kill()
            visible, _ = take_over(second, file)
            assert visible in (None, "0")
            # A lock keeper that is still starting keeps the GPU.
            reserved = second.reserve()
            if reserved.value != "0":
                wait_for(partial(keepers, file))  # it forks, so one search might miss it
        for process in keepers(file):
            process.kill()
            process.wait(LONG_S)


def test_invalid_data_of_a_lock_keeper_is_ignored(here: Here, file: Path) -> None:
    invalid = ["", "x", "[]", "{}", '{"devices": [{}]}', '{"devices": [], "locks": 1}', "[" * 50000]
    with here.child() as child:
        for left in invalid:
            subprocesses.start_background(
                ["-I", "-S", lock_keeper.PROGRAM, str(file), "60"], (), {lock_keeper.LEFT: left}
            )
        assert len(keepers(file)) == len(invalid)
        assert take_over(child, file) == (None, [])


def test_forged_record_ends_no_holder(here: Here, file: Path) -> None:
    """A record that says that a device is kept does not end the process with the lock."""
    with here.child() as first, here.child() as second:
        first.reserve("'0'")
        lock(here, "0").write_text(json.dumps(record(here, "0") | {"kept_until": 9e9}))
        assert take_over(second, file) == (None, [])
        assert is_running(first.pid)
        assert held(here) == [0]


@pytest.mark.xdist_group("users")
def test_device_is_kept_for_the_same_user(users: Machine, file: Path) -> None:
    with (
        child_of(users, NOBODY) as first,
        child_of(users, DAEMON) as other,
        child_of(users, NOBODY) as second,
    ):
        if not first.run("os.access(sys.executable, os.X_OK)").value:
            pytest.skip("only root can run this Python")
        first.reserve("'0'")
        leave(first, file)
        assert take_over(other, file) == (None, [])
        assert other.reserve("'0'").error == "NoFreeDeviceError"
        assert take_over(second, file) == ("0", [])


@contextmanager
def pretender(
    machine: Machine, file: Path, left: dict[str, Any], words: Sequence[str]
) -> Iterator[None]:
    """Start a process with the lock and the data of a lock keeper, but another command line."""
    environ = machine.environ() | {lock_keeper.LEFT: json.dumps(left)}
    ((_, name, _),) = left["locks"]
    with (machine.locks / name).open("r+b") as own:
        fcntl.flock(own, fcntl.LOCK_EX)
        process = subprocess.Popen([*words, str(file), "60"], env=environ, pass_fds=[own.fileno()])
    try:
        wait_for(lambda: keepers(file))
        yield
    finally:
        process.kill()
        process.wait()
        for each in keepers(file):
            each.kill()
            each.wait()


def data_of_a_lock_keeper(machine: Machine, child: Child, file: Path) -> dict[str, Any]:
    """Return the data that a kernel leaves to its lock keeper, and end both."""
    child.reserve("'0'")
    leave(child, file)
    process = keeper(file)
    left: dict[str, Any] = json.loads(process.environ()[lock_keeper.LEFT])
    process.kill()
    wait_for(lambda: not locked(machine.locks))
    return left


def test_pretenders_are_not_lock_keepers(here: Here, file: Path) -> None:
    """A lock keeper needs the exact command line, and the lock of the device that it names."""
    with here.child() as first, here.child() as second:
        left = data_of_a_lock_keeper(here, first, file)
        sleep = ["-c", "import time; time.sleep(60)"]
        with pretender(here, file, left, [sys.executable, *sleep, *lock_keeper.WORDS]):
            assert take_over(second, file) == (None, [])
        left["devices"][0] |= {"uuid": here.uuid("1"), "index": 1}
        with pretender(here, file, left, [sys.executable, *lock_keeper.WORDS]):
            assert take_over(second, file) == (None, [])


@pytest.mark.xdist_group("users")
def test_program_of_another_real_user_is_not_a_lock_keeper(users: Machine, file: Path) -> None:
    """A set-UID program that another user has started is not trusted as root's."""
    with child_of(users, "root") as first, child_of(users, "root") as second:
        left = data_of_a_lock_keeper(users, first, file)
        su = ["setpriv", "--ruid=nobody", sys.executable, *lock_keeper.WORDS]
        with pretender(users, file, left, su):
            assert take_over(second, file) == (None, [])
