"""Tests that child processes neither keep, nor free, nor hold the locks of their parent."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.machine import Machine
from tests.support.processes import living, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.machine import Child

# Code that starts a child which keeps running, and returns its pid. A forked child reports that it
# is running.
FORKED = """
told, tell = os.pipe()
pid, *_ = {fork}
if not pid:
    import signal
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.write(tell, b"x")
    while True:
        signal.pause()
os.read(told, 1)
pid
"""


# A script whose child reserves a GPU, and prints the result. A fork server starts first.
CHILD_RESERVES = """
import multiprocessing, os, sys

def reserve(tell):
    import reserve_gpu
    try:
        result = reserve_gpu.reserve().devices[0].label
    except reserve_gpu.ReserveGPUError as error:
        result = type(error).__name__
    tell.send((result, os.environ.get("CUDA_VISIBLE_DEVICES")))

def run_process(context, target, *arguments):
    process = context.Process(target=target, args=arguments)
    process.start()
    process.join()

if __name__ == "__main__":
    context = multiprocessing.get_context("forkserver")
    run_process(context, os.getpid)
    import reserve_gpu
    if sys.argv[1]:
        reserve_gpu.reserve(sys.argv[1])
    told, tell = context.Pipe(duplex=False)
    run_process(context, reserve, tell)
    print(*told.recv(), sep=", ")
"""
CHILDREN = {
    "fork": FORKED.format(fork="os.fork(),"),
    "Popen with open files and code": "import subprocess; "
    "subprocess.Popen(['sleep', '1000'], close_fds=False, preexec_fn=os.setsid).pid",
    "posix_spawn": "os.posix_spawn('/bin/sleep', ['sleep', '1000'], os.environ)",
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """Make a machine for many tests, each of which leaves all GPUs free."""
    return Machine(tmp_path_factory.mktemp("shared"))


@pytest.fixture(scope="module")
def processes(shared: Machine) -> Iterator[tuple[Child, Child]]:
    """Start two processes, the first of which can run code in a fork."""
    with shared.child() as holder, shared.child() as other:
        holder.run(IN_FORK)
        yield holder, other


@pytest.fixture
def holder(processes: tuple[Child, Child]) -> Iterator[Child]:
    """Return a process that can run code in a fork, and release its GPUs at the end."""
    yield processes[0]
    processes[0].run("reserve_gpu.release()")


@pytest.fixture
def other(processes: tuple[Child, Child]) -> Iterator[Child]:
    """Return another process on the same machine, and release its GPUs at the end."""
    yield processes[1]
    processes[1].run("reserve_gpu.release()")


@pytest.mark.promise
@pytest.mark.parametrize("kind", CHILDREN)
def test_a_child_does_not_keep_the_lock_of_a_killed_holder(
    shared: Machine, other: Child, kind: str
) -> None:
    """A killed holder's GPU is free at once, even if a child of it is still running."""
    with shared.child() as holder:
        assert holder.reserve("0").value == "0"
        started = holder.run(CHILDREN[kind])
        assert isinstance(started.value, int), started
        with living(started.value):
            assert other.reserve("0").error == "NoFreeDeviceError"
            holder.kill()
            assert other.reserve("0").value == "0"


def test_a_foreground_command_of_a_killed_kernel_does_not_keep_its_lock(machine: Machine) -> None:
    """A `!command` does not keep the GPU of its killed kernel."""
    with machine.kernel() as kernel, machine.child() as other:
        assert not kernel.run("%reserve_gpu 0").error
        pid = kernel.pid
        pipe = machine.folder / "started"
        os.mkfifo(pipe)
        kernel.start(f"!trap '' HUP; echo $$ >{pipe}; sleep 1000")
        with living(int(pipe.read_text())):
            os.kill(pid, signal.SIGKILL)
            # The lock is released when the last thread of the kernel has ended.
            wait_for(lambda: other.reserve("0").value == "0")


# -- forked children -------------------------------------------------------------------------------

IN_FORK = """
def in_fork(code):
    told, tell = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            answer = repr(eval(code))
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        try:
            os.write(tell, answer.encode())
        finally:
            os._exit(0)
    os.close(tell)
    os.waitpid(pid, 0)
    with os.fdopen(told) as answers:
        return answers.read()
"""


def in_fork(child: Child, code: str) -> str:
    """Run code in a fork of the child, and return its value or error as text."""
    answer = child.run(f"in_fork({code!r})")
    assert answer.error is None, answer
    return str(answer.value)


HOLD = """
from reserve_gpu.model.holders import Record
from reserve_gpu.reservation.session import session
held = reserve_gpu.reserve(0)
locks = list(session()._held.locks.values())
"""


@pytest.mark.promise
@pytest.mark.parametrize(
    "code",
    [
        "reserve_gpu.release()",
        "[lock.release() for lock in locks]",
        "[reserve_gpu.current(), globals().pop('held'), __import__('gc').collect()]",
        "__import__('atexit')._run_exitfuncs()",
        "reserve_gpu.reserve()",
        "os.closerange(3, 1000)",
    ],
)
def test_a_forked_child_does_not_free_its_parents_gpu(
    holder: Child, other: Child, code: str
) -> None:
    """A forked child that releases, collects garbage or exits does not free its parent's GPU."""
    assert holder.run(HOLD).error is None
    in_fork(holder, code)
    refused = other.reserve("0")
    assert refused.error == "NoFreeDeviceError"
    assert f"pid {holder.pid}" in refused.text
    assert holder.run("reserve_gpu.current() is held").value is True
    assert holder.visible() == "0"


def test_a_child_forked_in_c_does_not_free_its_parents_gpu(holder: Child, other: Child) -> None:
    """A child that was forked in C, without Python's hooks, does not free its parent's GPU."""
    assert holder.run(HOLD).error is None
    in_c = IN_FORK.replace("in_fork", "in_fork_in_c").replace("os.fork", "ctypes.PyDLL(None).fork")
    assert holder.run(f"import ctypes\n{in_c}").error is None
    for code in ("[lock.release() for lock in locks]", "[lock.write(Record()) for lock in locks]"):
        assert holder.run(f"in_fork_in_c({code!r})").value == "[None]"
        assert f"pid {holder.pid}" in other.reserve("0").text
    assert holder.run("reserve_gpu.current() is held").value is True


def test_the_exit_of_a_forked_child_does_not_free_its_parents_gpu(machine: Machine) -> None:
    """A forked child that exits normally does not free its parent's GPU."""
    script = """if True:
        import os, reserve_gpu, subprocess, sys
        held = reserve_gpu.reserve(0)
        if not os.fork():
            sys.exit()
        assert os.wait()[1] == 0
        environ = {k: v for k, v in os.environ.items() if not k.startswith("CUDA")}
        other = "import reserve_gpu; reserve_gpu.reserve(0)"
        done = subprocess.run([sys.executable, "-c", other], env=environ, capture_output=True)
        print(b"NoFreeDeviceError" in done.stderr, b"pid %d" % os.getpid() in done.stderr)
    """
    done = machine.python(script)
    assert done.stdout == "True True\n", done.stderr


@pytest.mark.promise
def test_a_forked_child_holds_nothing(holder: Child) -> None:
    """A forked child holds nothing, and the error of its own request contains its parent's pid."""
    holder.reserve()
    assert in_fork(holder, "reserve_gpu.current()") == "None"
    assert in_fork(holder, "reserve_gpu.release()") == "()"
    refused = in_fork(holder, "reserve_gpu.reserve()")
    assert refused.startswith("ReservedAboveError")
    assert f"pid {holder.pid}" in refused
    assert holder.run("reserve_gpu.current().devices[0].label").value == "GPU0"
    assert holder.visible() == "0"


@pytest.mark.promise
def test_a_forked_child_can_reserve_for_itself(holder: Child, other: Child) -> None:
    """A forked child of a process without a GPU holds what it reserves until it exits."""
    holder.reserve()
    holder.run("reserve_gpu.release()")
    forked = FORKED.format(fork="os.fork(),").replace(
        "os.write", "reserve_gpu.reserve(0), os.write"
    )
    pid = holder.run(forked).value
    with living(pid):
        refused = other.reserve("0")
        assert f"pid {pid}" in refused.text
        assert holder.run("reserve_gpu.current()").value is None
    holder.run(f"os.waitpid({pid}, 0)")
    assert other.reserve("0").value == "0"


# The interpreter calls the hook when the new file is open, but not yet registered.
FORK_WHILE_OPENING = """
import signal, threading
from reserve_gpu.locks.directory import LockDirectory
opened, forked, pids = threading.Event(), threading.Event(), []
def hook(event, arguments):
    if event == "os.chmod" and arguments[1] == 0o666:
        opened.set()
        forked.wait(0.3)  # a fork that does not wait for this thread happens now
def fork():
    opened.wait(30)
    told, tell = os.pipe()
    pid = os.fork()
    if not pid:
        os.write(tell, b"x")
        while True:
            signal.pause()
    os.read(told, 1)
    pids.append(pid)
    forked.set()
thread = threading.Thread(target=fork)
thread.start()
sys.addaudithook(hook)
with LockDirectory() as directory:
    lock = directory.acquire("a.lock")
thread.join()
[pids[0], opened.is_set()]
"""


def test_a_fork_waits_until_another_thread_has_opened_its_lock(machine: Machine) -> None:
    """A fork while another thread opens a lock does not give the child the open lock."""
    with machine.child() as holder:
        pid, hooked = holder.run(FORK_WHILE_OPENING).value
        with living(pid):
            paths = {os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()}
            assert hooked
            assert str(machine.locks / "a.lock") not in paths


# Forks the process when another thread is inside the bindings, which have a lock of their own. The
# child has a time limit.
FORK_AT_EVENT = """
import signal, threading
there, forked = threading.Event(), threading.Event()
def hook(event, arguments):
    if threading.current_thread() is not threading.main_thread() and not there.is_set():
        if event == "ctypes.dlsym" and "nvml" in arguments[1]:
            there.set()
            forked.wait(0.5)  # a fork that does not wait for this thread happens now
def act():
    try:
        return reserve_gpu.reserve()
    except reserve_gpu.NoFreeDeviceError as error:
        return type(error).__name__
sys.addaudithook(hook)
thread = threading.Thread(target=act)
thread.start()
assert there.wait(30)
pid = os.fork()
if not pid:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, 10)
    act()
    os._exit(0)
forked.set()
thread.join()
os.waitpid(pid, 0)[1]
"""


def importing(file: str) -> str:
    """Return the condition for the execution of a module's code."""
    return f"event == 'exec' and getattr(arguments[0], 'co_filename', '').endswith({file!r})"


@pytest.mark.parametrize(
    ("seen", "code"),
    [
        (importing("pynvml.py"), "reserve_gpu.status()"),
        (importing("render/status_view.py"), "reserve_gpu.status()"),
        (importing("ctypes/__init__.py"), "reserve_gpu.reserve()"),
        # The bindings have a lock of their own.
        ("event == 'ctypes.dlsym' and 'nvml' in arguments[1]", "reserve_gpu.reserve()"),
    ],
    ids=["bindings", "status", "ctypes", "inside the bindings"],
)
def test_a_fork_during_a_first_call(machine: Machine, seen: str, code: str) -> None:
    """A child that is forked while another thread imports modules can make the same call."""
    machine.use("busy")
    with machine.child() as child:
        answer = child.run(FORK_AT_EVENT.format(seen=seen, code=code))
    assert answer.error is None, answer
    assert answer.value == 0


LOADED = """
import warnings
from reserve_gpu.system import forks
warnings.simplefilter("ignore")
loaded = []
def hook(event, arguments):
    if event == "exec" and arguments[0].co_name == "<module>":
        is_own = forks.no_fork._is_owned()
        if not is_own and forks.no_fork.acquire(blocking=False):  # unlocked
            forks.no_fork.release()
            loaded.append(arguments[0].co_filename)
def try_to_reserve(**arguments):
    try:
        reserve_gpu.reserve(**arguments)
    except reserve_gpu.NoFreeDeviceError:
        pass
sys.addaudithook(hook)
{calls}
[file for file in loaded if file != "<sent>"]
"""
CALLS = (
    "reserve_gpu.status()",
    "try_to_reserve(memory='1GB')\nreserve_gpu.release()",
    "try_to_reserve(wait=0.1)",
)


@pytest.mark.parametrize("scenario", ["two", "busy"])
@pytest.mark.parametrize("first", range(len(CALLS)))
def test_no_fork_during_imports(machine: Machine, scenario: str, first: int) -> None:
    """Modules, including codecs, are only imported while no other thread can fork."""
    machine.use(scenario)
    with machine.child() as child:
        answer = child.run(LOADED.format(calls="\n".join(CALLS[first:] + CALLS[:first])))
    assert answer.value == [], answer


RESERVING_IN_A_THREAD = """
import threading
stop = threading.Event()
def reserve_and_release():
    while not stop.is_set():
        reserve_gpu.reserve().release()
thread = threading.Thread(target=reserve_and_release)
thread.start()
answers = [in_fork("reserve_gpu.reserve(1).devices[0].label") for _ in range(12)]
stop.set()
thread.join()
sorted(set(answers))
"""


@pytest.mark.promise
def test_a_fork_in_one_thread_while_another_reserves(machine: Machine) -> None:
    """A child that is forked while another thread reserves can make its own reservation."""
    with machine.child() as child:
        child.run(IN_FORK)
        answers = child.run(RESERVING_IN_A_THREAD)
    assert answers.error is None, answers
    refusals = [answer for answer in answers.value if answer != "'GPU1'"]
    assert all(each.startswith("RequestError: GPU1 ") for each in refusals), refusals


@pytest.mark.parametrize(("held", "result"), [("1,0", "ReservedAboveError, 1,0"), ("", "GPU0, 0")])
def test_a_child_of_multiprocessing(machine: Machine, held: str, result: str) -> None:
    """A multiprocessing child sees its parent's GPUs, and can reserve if its parent holds none."""
    script = machine.folder / "reserving.py"
    script.write_text(CHILD_RESERVES)
    done = machine.command(sys.executable, str(script), held)
    assert done.stdout.strip() == result, done


def test_a_release_during_a_fork(machine: Machine) -> None:
    """A child that has not yet closed its parent's locks does not keep them."""
    with machine.child() as child:
        child.run("import time; os.register_at_fork(after_in_child=lambda: time.sleep(0.05))")
        assert child.reserve().value == "0"
        child.run(
            "pid = os.fork()\nif not pid: os._exit(0)\nreserve_gpu.release()\n"
            "again = reserve_gpu.reserve().devices[0].label\nos.waitpid(pid, 0)"
        )
        assert child.run("again").value == "GPU0"


START_CUDA = "import ctypes; ctypes.CDLL('libcuda.so.1').cuInit(0)"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("reserve_gpu.reserve()", START_CUDA),
        (START_CUDA, "reserve_gpu.reserve()"),
    ],
)
def test_a_forked_child_knows_that_cuda_had_started(
    machine: Machine, before: str, after: str
) -> None:
    """A request in a fork of a process that has started CUDA is too late."""
    with machine.child() as child:
        child.run(IN_FORK)
        child.run(before)
        child.run(after)
        assert in_fork(child, "reserve_gpu.reserve(0)").startswith("TooLateError")
