"""A restart of a kernel keeps its GPU, and nothing else does."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from reserve_gpu.system import lock_keeper, subprocesses
from tests.support.locked import held, locked
from tests.support.machine import TAKE_THE_MUTEX
from tests.support.processes import US, is_running, wait_for
from tests.support.reserving import of_gpu
from tests.support.users import DAEMON, NOBODY, child_of, for_users
from tests.support.waiters import Waiter

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import psutil

    from tests.support.here import Here
    from tests.support.machine import Child, Machine

from tests.support.restart import LEAVE, file_of, heirs, take_over


@pytest.fixture
def users() -> Iterator[Machine]:
    with for_users() as machine:
        yield machine


def leave(child: Child, file: Path, seconds: float = 60) -> None:
    """Leave what the child holds to the next kernel with that connection file."""
    call = f"restart_handover.leave_to_lock_keeper, session(), {str(file)!r}, {seconds}"
    answer = child.run(LEAVE.format(call=call))
    assert answer.error is None, answer.text


def heir_of(file: Path) -> psutil.Process:
    (process,) = heirs(file)
    return process


def lock(machine: Here, number: str) -> Path:
    """Return the lock file of a whole device."""
    return machine.locks / f"{machine.uuid(number)}.lock"


def record(machine: Here, number: str) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(lock(machine, number).read_bytes())
    return fields


# -- by kernels ------------------------------------------------------------------------------------


@pytest.mark.ipython
@pytest.mark.promise
def test_a_restart_keeps_the_gpu(here: Here) -> None:
    """A kernel that restarts has its GPU again before one who waits, with its note and lease."""
    with here.kernel() as kernel, here.child() as child:
        assert not kernel.run("%reserve_gpu 1 --note thesis --for 4h").error
        before = record(here, "1")
        waiter = Waiter(here, child, "'1'")
        kernel.restart()
        wait_for(lambda: record(here, "1").get("kept_until"))
        waiter.sees(1, "reserved")
        told = child_picture(here)
        assert "1     kept" in told or of_gpu(told, "1").startswith("kept: ")
        assert ", kept for its restart (" in told
        loaded = kernel.run("%load_ext reserve_gpu\nprint('a cell')")
        assert "GPU1 is kept for this kernel until " in loaded.all
        assert kernel.run("1").all.strip() == "1"  # told once
        cell = kernel.run("%reserve_gpu")
        assert "CUDA_VISIBLE_DEVICES = '1'" in cell.stdout
        after = record(here, "1")
        same = ("since", "until", "note", "label")
        assert [after.get(name) for name in same] == [before.get(name) for name in same]
        assert after["pid"] == kernel.pid
        assert not after.get("kept_until")
        assert kernel.run("%reserve_gpu --release").error is None
        assert waiter.answer().value == "1"


COUNT_COMMANDS = """
import os, re, sys
read = []
def hook(event, arguments):
    if event == "open" and re.fullmatch("/proc/[0-9]+/cmdline", str(arguments[0])):
        read.append(arguments[0])
sys.addaudithook(hook)
"""


@pytest.mark.ipython
def test_the_lock_keeper_is_searched_for_only_once(here: Here) -> None:
    """A kernel without a lock keeper reads no other process's command line after its first cell."""
    with here.kernel() as kernel:
        kernel.run(COUNT_COMMANDS)
        assert "CUDA_VISIBLE_DEVICES" in kernel.run("%reserve_gpu").stdout
        others = kernel.run("print({*read} - {f'/proc/{os.getpid()}/cmdline'})")
    assert others.stdout == "set()\n"


def child_picture(machine: Machine) -> str:
    """Return the status that another process prints."""
    return machine.python("import reserve_gpu; print(reserve_gpu.status())").stdout


@pytest.mark.promise
@pytest.mark.parametrize("how", ["shutdown", "kill -9"])
def test_whatever_is_no_restart_frees_the_gpu(here: Here, how: str) -> None:
    """A kernel that is shut down or killed leaves no heir: whoever waits has the GPU at once."""
    with here.kernel() as kernel, here.child() as child:
        assert not kernel.run("%reserve_gpu 0").error
        pid = kernel.pid
        waiter = Waiter(here, child, "'0'")
        if how == "shutdown":
            kernel.client.shutdown()
        else:
            os.kill(pid, signal.SIGKILL)
        assert waiter.answer().value == "0"
        assert not heirs(Path(kernel.manager.connection_file))


# -- what is kept, and for whom --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scenario", "wish", "visible"),
    [
        ("eight", "'5,2'", "5,2"),
        ("eight", "'3', memory='10GB'", "3"),
        pytest.param("eight", "'3', memory='1GB'", "3", marks=pytest.mark.full),
        pytest.param("mig570", "'1:1'", "MIG-", marks=pytest.mark.full),
    ],
)
def test_all_of_it_is_kept(here: Here, scenario: str, wish: str, visible: str) -> None:
    """Several GPUs in their order, a part with its size, a shared one, an instance: as before."""
    here.use(scenario)
    with file_of(here) as file, here.child() as first, here.child() as second:
        first.reserve(wish)
        asked = "reserve_gpu.current().memory_mib, dict(reserve_gpu.current().environ)"
        before = first.run(asked).value
        files = locked(here.locks)
        leave(first, file)
        first.kill()
        assert locked(here.locks) == files
        assert take_over(second, file) == (before[1]["CUDA_VISIBLE_DEVICES"], [])
        assert second.run(asked).value == before
        assert before[1]["CUDA_VISIBLE_DEVICES"].startswith(visible)
        assert locked(here.locks) == files
        assert not heirs(file)


def test_an_heir_has_the_locks_and_nothing_else(here: Here) -> None:
    """It has no file, no directory, no parent and no session of the kernel's, but for its locks."""
    with file_of(here) as file, here.child() as child:
        child.run("import socket; other = socket.socket(); other.set_inheritable(True)")
        child.reserve("'0,1'")
        leave(child, file)
        process = heir_of(file)
        folder = f"/proc/{process.pid}/fd"
        files = {os.readlink(f"{folder}/{number}") for number in os.listdir(folder)}
        own = {str(lock(here, index)) for index in "01"}
        own |= {path.replace(".lock", f".record-{os.geteuid()}-0") for path in own}
        assert files == {os.devnull, *own}
        assert process.cwd() == "/"
        assert os.getsid(process.pid) not in (os.getsid(child.pid), process.pid)
        assert child.pid not in [parent.pid for parent in process.parents()]
        assert set(process.environ()) <= {lock_keeper.LEFT, "LC_CTYPE"}


def test_it_is_kept_for_the_time_that_is_set(here: Here) -> None:
    """The GPU is free when the time is over that the setting gives to a restart."""
    with file_of(here) as file, here.child() as child:
        child.reserve("'0'")
        leave(child, file, 0.5)
        child.kill()
        assert held(here) == [0]
        wait_for(lambda: held(here) == [])


def test_without_its_connection_file_nobody_comes(here: Here) -> None:
    """Where Jupyter removes the connection file, as in a shutdown, the GPU is free soon."""
    with file_of(here) as file, here.child() as child:
        child.reserve("'0'")
        leave(child, file)
        child.kill()
        assert held(here) == [0]
        file.unlink()
        wait_for(lambda: held(here) == [])


def test_a_lease_ends_also_while_it_is_kept(here: Here) -> None:
    """What is kept is kept no longer than it was reserved for, and what is overdue is not kept."""
    with file_of(here) as file, here.child() as child, here.child() as late:
        child.reserve("'0', for_=30")
        leave(child, file)
        words = heir_of(file).cmdline()
        assert 0 < float(words[-1]) <= 30
        late.reserve("'1'")
        late.run("import ctypes; assert not ctypes.CDLL('libcuda.so.1').cuInit(0)")
        late.reserve("'1', for_=0.1")
        wait_for(lambda: record(here, "1").get("overdue"))
        leave(late, file)
        assert len(heirs(file)) == 1


@pytest.mark.parametrize(
    ("kept", "wish", "visible"),
    [("'1'", "count=2", "0,1"), ("'0,1'", "'1'", "1"), ("'1'", "'0'", "0"), ("'1'", "", "1")],
    ids=["more", "less", "another", "any"],
)
def test_another_wish_counts_what_is_kept(here: Here, kept: str, wish: str, visible: str) -> None:
    """More, less or another GPU: what is kept is the kernel's own, as if it had not restarted."""
    with file_of(here) as file, here.child() as first, here.child() as second:
        first.reserve(kept)
        leave(first, file)
        first.kill()
        take_over(second, file)
        assert second.reserve(wish).value == visible
        assert held(here) == [int(gpu) for gpu in visible.split(",")]


def test_the_old_kernels_memory_is_no_use(here: Here) -> None:
    """A warning names the user's other processes on the GPU, but not the old kernel itself."""
    with file_of(here) as file, here.child() as first, here.child() as second:
        first.reserve("'1'")
        leave(first, file)
        first.kill()
        with here.child() as other:
            here.add(f"compute {first.pid} 900\ncompute {other.pid} 100")
            visible, (line,) = take_over(second, file)
            assert visible == "1"
            assert line.startswith(
                "GPU1 is still in use by your own process from before the restart"
            )
            assert f"pid {other.pid}" in line
            assert f"pid {first.pid}" not in line


@pytest.mark.xdist_group("users")
def test_another_users_process_on_a_kept_gpu(users: Machine) -> None:
    """A warning after a restart tells a process of another user from the user's own."""
    with (
        file_of(users) as file,
        child_of(users, NOBODY) as first,
        child_of(users, DAEMON) as other,
        child_of(users, NOBODY) as second,
    ):
        if not first.run("os.access(sys.executable, os.X_OK)").value:
            pytest.skip("only root can run this Python")
        last = users.scenario.read_text().count("gpu\n") - 1
        first.reserve(f"'{last}'")
        leave(first, file)
        first.kill()
        users.add(f"compute {other.pid} 100")
        _, (line,) = take_over(second, file)
        told = f"GPU{last} is reserved for this kernel, but other processes are using it: busy, "
        assert told in line
        assert f"pid {other.pid}" in line


# -- who may not have it, and what may go wrong ----------------------------------------------------


def test_another_kernel_gets_nothing(here: Here) -> None:
    """A kernel with another connection file leaves alone what is kept."""
    with file_of(here) as file, here.child() as first, here.child() as second:
        first.reserve("'0'")
        leave(first, file)
        first.kill()
        assert take_over(second, file.with_name("other.json")) == (None, [])
        assert held(here) == [0]


def test_two_that_take_over_the_same(here: Here) -> None:
    """Of two processes that take over the same only one gets it."""
    with file_of(here) as file, here.child() as first, here.child() as a, here.child() as b:
        first.reserve("'0'")
        leave(first, file)
        first.kill()
        code = f"from reserve_gpu import api\napi.take_over({str(file)!r})"
        for child in (a, b):
            child.send(code)
        for child in (a, b):
            assert child.answer().error is None
        assert sorted([a.visible() or "", b.visible() or ""]) == ["", "0"]


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_stopped_or_killed_heir(here: Here, number: signal.Signals) -> None:
    """What a stopped heir keeps is taken over all the same; a killed one keeps nothing."""
    with file_of(here) as file, here.child() as first, here.child() as second:
        first.reserve("'0'")
        leave(first, file)
        first.kill()
        process = heir_of(file)
        process.send_signal(number)
        wait_for(lambda: number == signal.SIGSTOP or not is_running(process.pid))
        assert take_over(second, file) == ("0" if number == signal.SIGSTOP else None, [])
        assert held(here) == ([0] if number == signal.SIGSTOP else [])


def test_a_restart_in_the_middle_of_a_restart(here: Here) -> None:
    """A kernel that restarts before it has asked leaves what was kept to the next one."""
    with file_of(here) as file, here.child() as first, here.child() as third:
        first.reserve("'0'")
        leave(first, file)
        first.kill()
        with here.child() as second:
            leave(second, file)
        assert take_over(third, file) == ("0", [])


def test_cuda_that_has_started_can_not_use_it(here: Here) -> None:
    """A kernel that starts CUDA before it asks is too late, and what is kept stays kept."""
    with file_of(here) as file, here.child() as first, here.child() as second:
        first.reserve("'1'")
        leave(first, file)
        first.kill()
        second.run("import ctypes; assert not ctypes.CDLL('libcuda.so.1').cuInit(0)")
        assert take_over(second, file) == (None, [])
        assert held(here) == [1]


def test_what_an_heir_may_say(here: Here) -> None:
    """A process that says nonsense of what it keeps is passed over."""
    nonsense = [
        "",
        "x",
        "[]",
        "{}",
        '{"devices": [{}]}',
        '{"devices": [], "locks": 1}',
        "[" * 50000,
    ]
    with file_of(here) as file, here.child() as child:
        for left in nonsense:
            subprocesses.start_background(
                ["-I", "-S", lock_keeper.PROGRAM, str(file), "60"], (), {lock_keeper.LEFT: left}
            )
        assert len(heirs(file)) == len(nonsense)
        assert take_over(child, file) == (None, [])


def test_a_forged_record_ends_nobody(here: Here) -> None:
    """Whatever the record in a lock file says is kept, the process that has the lock stays."""
    with file_of(here) as file, here.child() as first, here.child() as second:
        first.reserve("'0'")
        fields = record(here, "0") | {"kept_until": 9e9}
        lock(here, "0").write_text(json.dumps(fields))
        assert take_over(second, file) == (None, [])
        assert is_running(first.pid)
        assert held(here) == [0]


@pytest.mark.xdist_group("users")
def test_what_another_user_has_left(users: Machine) -> None:
    """A user's kernel gets nothing of what another user has left for the same path."""
    with (
        file_of(users) as file,
        child_of(users, NOBODY) as first,
        child_of(users, DAEMON) as other,
        child_of(users, NOBODY) as second,
    ):
        if not first.run("os.access(sys.executable, os.X_OK)").value:
            pytest.skip("only root can run this Python")
        first.reserve("'0'")
        leave(first, file)
        first.kill()
        assert take_over(other, file) == (None, [])
        assert other.reserve("'0'").error == "NoFreeDeviceError"
        assert take_over(second, file) == ("0", [])


def test_a_setting_that_is_no_number(here: Here) -> None:
    """A setting that is no number of seconds is said at the next reservation of a kernel."""
    with here.kernel() as kernel:
        kernel.run("%env RESERVE_GPU_RESTART=1h")
        answer = kernel.run("%reserve_gpu").all
        assert "RESERVE_GPU_RESTART='1h' must be a number of seconds" in answer


def test_a_setting_of_restarts_is_nothing_to_exec(here: Here) -> None:
    """A setting that is no number keeps no kernel from becoming another program."""
    with here.kernel() as kernel:
        assert not kernel.run("%reserve_gpu").error
        kernel.run("%env RESERVE_GPU_RESTART=1h")
        assert not kernel.run("from reserve_gpu import api; api.before_exec()").error


@pytest.mark.parametrize("how", ["released", "deleted"])
def test_what_the_heir_has_lost(here: Here, how: str) -> None:
    """What the kernel released after it was left, or whose file is gone, is not given back."""
    with file_of(here) as file, here.child() as first, here.child() as second:
        first.reserve("'0'")
        leave(first, file)
        if how == "released":  # by a cell that is interrupted for the restart
            first.run("reserve_gpu.release()")
        else:
            lock(here, "0").unlink()
        first.kill()
        with here.child() as third:
            assert third.reserve("'0', memory='1GB'").value == "0"
            assert take_over(second, file) == (None, [])
            assert not heirs(file)
            assert second.reserve("'0'").error == "NoFreeDeviceError"


def test_a_busy_mutex_loses_nothing(here: Here) -> None:
    """A kernel that could not ask, as others had the mutex, gets what is kept the next time."""
    with file_of(here) as file, here.child() as first, here.child() as second:
        first.reserve("'0'")
        leave(first, file)
        first.kill()
        with here.child() as other:
            other.run(TAKE_THE_MUTEX)
            second.send(f"from reserve_gpu import api\napi.take_over({str(file)!r})")
            wait_for(lambda: second_waits(here, second))
            second.process.send_signal(signal.SIGINT)
            assert second.answer().error == "KeyboardInterrupt"
        assert take_over(second, file) == ("0", [])


def second_waits(machine: Machine, child: Child) -> bool:
    """Tell whether the process has the mutex's file open, for which it waits."""
    folder = f"/proc/{child.pid}/fd"
    with suppress(OSError):
        return any(os.readlink(f"{folder}/{n}").endswith("mutex.lock") for n in os.listdir(folder))
    return False


def test_what_looks_like_an_heir(here: Here) -> None:
    """An editor or `tail` that has the file of the heir's program open is no heir."""
    with file_of(here) as file, here.child() as child:
        for words in ([], [str(file)], [str(file), "60"]):
            command = ["tail", "-f", lock_keeper.PROGRAM, *words]
            with here.running(*command, environ=here.environ(), stdout=subprocess.DEVNULL,
                              stderr=subprocess.DEVNULL):  # fmt: skip
                assert take_over(child, file) == (None, [])


@contextmanager
def pretender(
    machine: Machine, file: Path, left: dict[str, Any], words: Sequence[str]
) -> Iterator[None]:
    """Have the file that was left locked by a process of these words, which says what it keeps."""
    environ = machine.environ() | {lock_keeper.LEFT: json.dumps(left)}
    ((_, name, _),) = left["locks"]
    with (machine.locks / name).open("r+b") as own:
        fcntl.flock(own, fcntl.LOCK_EX)
        process = subprocess.Popen([*words, str(file), "60"], env=environ, pass_fds=[own.fileno()])
    try:
        wait_for(lambda: heirs(file))
        yield
    finally:
        process.kill()
        process.wait()
        for each in heirs(file):
            each.kill()
            each.wait()


def left_by_a_kernel(machine: Machine, child: Child, file: Path) -> dict[str, Any]:
    """Return what a kernel says that leaves GPU0, which is free again then."""
    child.reserve("'0'")
    leave(child, file)
    process = heir_of(file)
    left: dict[str, Any] = json.loads(process.environ()[lock_keeper.LEFT])
    for each in (child, process):
        each.kill()
    wait_for(lambda: not locked(machine.locks))
    return left


def test_who_is_no_heir(here: Here) -> None:
    """Who has an heir's words among others is no heir, nor who has the lock of another GPU."""
    with file_of(here) as file, here.child() as first, here.child() as second:
        left = left_by_a_kernel(here, first, file)
        sleep = ["-c", "import time; time.sleep(60)"]
        with pretender(here, file, left, [sys.executable, *sleep, *lock_keeper.WORDS]):
            assert take_over(second, file) == (None, [])
        left["devices"][0] |= {"uuid": here.uuid("1"), "index": 1}
        with pretender(here, file, left, [sys.executable, *lock_keeper.WORDS]):
            assert take_over(second, file) == (None, [])


@pytest.mark.xdist_group("users")
def test_a_program_that_runs_as_another_user_is_no_heir(users: Machine) -> None:
    """What `su` has from the user who started it is not root's, whatever it says it keeps."""
    with file_of(users) as file, child_of(users, "root") as first:
        left = left_by_a_kernel(users, first, file)
        su = ["setpriv", "--ruid=nobody", sys.executable, *lock_keeper.WORDS]
        with pretender(users, file, left, su), child_of(users, "root") as second:
            assert take_over(second, file) == (None, [])


def test_a_plain_wish_means_what_is_kept(here: Here) -> None:
    """A part, or a shared GPU, that was kept is what a plain `%reserve_gpu` gets."""
    with file_of(here) as file, here.child() as first, here.child() as second:
        first.reserve("'0', memory='2GB', note='mine'")
        before = first.run("dict(reserve_gpu.current().environ)").value
        leave(first, file)
        first.kill()
        take_over(second, file)
        assert second.reserve().value == "0"
        assert second.run("dict(reserve_gpu.current().environ)").value == before
        assert second.run("reserve_gpu.current().note").value == "mine"


@pytest.mark.parametrize("end", [[], ["--end"]], ids=["release", "end"])
def test_what_is_kept_is_released(here: Here, end: list[str]) -> None:
    """`reserve-gpu release`, with --end too, frees what is kept, and ends nothing but the heir."""
    with file_of(here) as file, here.child() as first:
        first.reserve("'0'")
        leave(first, file)
        first.kill()
        done = here.command(*US, "release", *end)
        assert done.stdout.startswith("Released GPU0 of ")
        assert done.returncode == 0
        assert held(here) == []


def test_the_pid_of_before_means_what_is_kept(here: Here) -> None:
    """`reserve-gpu release` of the pid that a kernel had frees what is kept for its restart."""
    with file_of(here) as file, here.child() as first:
        first.reserve("'0'")
        leave(first, file)
        first.kill()
        done = here.command(*US, "release", str(first.pid))
        assert done.stdout.startswith("Released GPU0 of ")
        assert held(here) == []


def test_the_lock_of_imports_is_not_needed(here: Here) -> None:
    """With Python's lock for imports left to the main thread a restart gets its GPU back."""
    with file_of(here) as file, here.child() as first, here.child() as second:
        first.reserve("'1'")
        leave(first, file)
        first.kill()
        second.run("import _imp\n_imp.acquire_lock()")
        assert take_over(second, file)[0] == "1"
