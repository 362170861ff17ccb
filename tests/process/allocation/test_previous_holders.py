"""Traces that previous holders leave on a GPU: processes that outlive them, and their memory."""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest

import reserve_gpu
from tests.support.locked import locked
from tests.support.machine import CHILD, LIMIT_S, Child, Machine, program
from tests.support.parts import CUDA
from tests.support.platforms import on_a_host
from tests.support.processes import own_name, wait_for
from tests.support.reserving import got, of_gpu, refused
from tests.support.users import NOBODY, as_user, for_users

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.here import Here

pytestmark = [on_a_host]

needs_mounts = pytest.mark.skipif(
    bool(os.geteuid()) or not program("unshare"), reason="needs root, for mounts"
)
# Processes of tests that run at the same time have opened other files.
MINOR = 10_000 + os.getpid()
DEVICE_FILE = f"/dev/nvidia{MINOR}"
GPU = f"gpu\n  memory 8192\n  minor {MINOR}\n"
NOTEBOOK = {"JPY_SESSION_NAME": "/home/alice/train.ipynb"}
# Runs a command as the leader of a session, as Jupyter does. The command's /dev has the GPU's
# device file, which no other process sees.
WITH_DEVICE_FILE = f"""
mount --make-rprivate / && mkdir "$0" && mount -t tmpfs none "$0" &&
for name in null zero urandom; do touch "$0/$name" && mount --bind "/dev/$name" "$0/$name"; done &&
touch "$0/nvidia{MINOR}" && chmod 666 "$0/nvidia{MINOR}" && mount --move "$0" /dev &&
exec setsid "$@"
"""
# For a child: fork a child that does not end with it.
FORK = """
import signal
def fork(path=None, reserves=None):
    if pid := os.fork():
        return pid
    file = path and open(path)
    if reserves:
        del os.environ["CUDA_VISIBLE_DEVICES"]
        reserve_gpu.reserve(reserves)
    while True:
        signal.pause()
"""


@pytest.fixture
def one(here: Here) -> Here:
    """Return a machine with one idle GPU, which is not the first one for the driver."""
    here.write(GPU)
    return here


@contextmanager
def kernel(machine: Machine, *user: str) -> Iterator[Child]:
    """Run a Python process as the leader of a session, in a /dev with the GPU's device file."""
    folder = str(machine.folder / "dev")
    prefix = ("unshare", "--mount", "sh", "-c", WITH_DEVICE_FILE, folder, *user)
    child = Child(machine.environ(**NOTEBOOK), machine.folder, *prefix)
    try:
        yield child
    finally:
        child.kill()


@contextmanager
def left_over(machine: Machine, child: Child, path: str | None = DEVICE_FILE) -> Iterator[int]:
    """Let a process reserve a GPU, fork and be killed. Yield the pid of the forked process."""
    assert child.reserve().error is None
    pid: int = child.run(f"{FORK}\nfork({path!r})").value
    try:
        if path:
            wait_for(lambda: path in opened(pid))
        child.kill()
        wait_for(lambda: not locked(machine.locks))  # the forked process closes its copies
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)


def opened(pid: int) -> list[str]:
    """Return the files that a process has open."""
    folder, files = f"/proc/{pid}/fd", []
    for name in os.listdir(folder):
        with suppress(FileNotFoundError):
            files.append(os.readlink(f"{folder}/{name}"))
    return files


def use(machine: Machine, dead: int, child: int, listed: str) -> None:
    """Keep memory of the GPU in use, and list it as one of several drivers would."""
    use = {"nothing": "used 3000", "dead parent": f"compute {dead} 3000"}
    machine.write(f"{GPU}  {use.get(listed, f'compute {child} 3000')}")


@needs_mounts
@pytest.mark.parametrize("listed", ["nothing", "dead parent", "child"])
def test_a_process_that_a_killed_kernel_left_over_is_named(one: Here, listed: str) -> None:
    """A refusal and the status name the forked child of a killed kernel, and how to end it."""
    with kernel(one) as child, left_over(one, child) as pid:
        use(one, child.pid, pid, listed)
        shell = one.shell(is_notebook=True)
        cell = shell.run("%reserve_gpu")
        status = shell.run("%reserve_gpu --status")
        (device,) = reserve_gpu.status().to_dict()["devices"]
    assert f"left over from train.ipynb: {own_name()}, {CHILD} (pid {pid})" in of_gpu(cell.shown)
    for text in (cell.shown, status.shown):
        (line,) = re.findall(r"^GPU0: left over from train\.ipynb: .*", text, re.MULTILINE)
        assert line.endswith(f"!kill {pid}")
        assert "fuser" not in text
    processes = {each["pid"]: each for each in device["processes"]}
    assert processes[pid]["left_by"] == "train.ipynb"
    assert abs(processes[pid]["started"] - time.time()) < LIMIT_S
    assert [each for each in processes if processes[each]["has_ended"]] == (
        [child.pid] if listed == "dead parent" else []
    )


@needs_mounts
def test_a_program_is_not_told_to_end_processes(one: Here) -> None:
    """Each refusal of a program names the left-over process, but no command to end it."""
    with kernel(one) as child, left_over(one, child) as pid:
        use(one, child.pid, pid, "nothing")
        for text in (refused(), refused(), refused("0", memory="7GiB")):
            assert f"left over from train.ipynb: {own_name()}, {CHILD} (pid {pid})" in text
            assert "kill" not in text


@needs_mounts
def test_a_process_that_has_only_opened_the_gpu_is_not_called_left_over(one: Here) -> None:
    """A process of this user that has the device file open is named, next to the general hint."""
    with kernel(one) as child:
        child.run(f"file = open({DEVICE_FILE!r})")
        one.write(f"{GPU}  used 3000")
        text = refused()
    assert f"{CHILD} (pid {child.pid}) has opened GPU0" in text
    assert "left over" not in text
    assert "fuser -v /dev/nvidia*" in text


@needs_mounts
def test_a_process_with_another_reservation_is_not_named(one: Here) -> None:
    """A process that holds another GPU, and its children, are not blamed for an open file."""
    one.write(f"{GPU}gpu\n")
    with kernel(one) as child:
        assert child.reserve("'1'").value == "1"
        pid = child.run(f"{FORK}\nfile = open({DEVICE_FILE!r})\nfork({DEVICE_FILE!r})").value
        try:
            wait_for(lambda: DEVICE_FILE in opened(pid))
            one.write(f"{GPU}  used 3000\ngpu\n")
            text = refused(count=2)
        finally:
            os.kill(pid, signal.SIGKILL)
    assert "opened" not in text
    assert "fuser -v /dev/nvidia*" in text


@needs_mounts
def test_a_child_that_has_reserved_another_gpu_is_not_left_over(one: Here) -> None:
    """The child of a killed kernel that holds a GPU itself only uses this one as well."""
    one.write(f"{GPU}gpu\n")
    with kernel(one) as child:
        assert child.reserve().value == "0"
        pid = child.run(f"{FORK}\nfork(reserves='1')").value
        try:
            wait_for(lambda: f"{one.uuid('1')}.lock" in locked(one.locks))
            child.kill()
            one.write(f"{GPU}  compute {pid} 3000\ngpu\n")
            status = str(reserve_gpu.status())
        finally:
            os.kill(pid, signal.SIGKILL)
    assert f"no reservation: {own_name()}, {CHILD} (pid {pid})" in status
    assert "left over" not in status


@needs_mounts
def test_processes_are_not_searched_while_another_process_explains_the_use(one: Here) -> None:
    """A GPU that a living process uses is busy because of that process alone."""
    with kernel(one) as child, left_over(one, child):
        one.write(f"{GPU}  compute {os.getpid()} 3000")
        assert "left over" not in refused()


@needs_mounts
def test_a_process_left_over_on_a_mig_instance_is_named(one: Here) -> None:
    """The processes of a MIG instance have opened the device file of its GPU."""
    instance = f"{GPU}  mig on\n  instance 0\n  uuid MIG-a\n"
    one.write(instance)
    with kernel(one) as child, left_over(one, child) as pid:
        one.write(f"{instance}  used 3000")
        text = refused()
    assert f"GPU0:0: left over from train.ipynb: {own_name()}, {CHILD} (pid {pid})" in text


def test_a_process_that_a_killed_jupyter_kernel_left_over_is_named(one: Here) -> None:
    """A real kernel leads a session, which identifies its forked child after kill -9."""
    with one.kernel(**NOTEBOOK) as jupyter:
        jupyter.run("%reserve_gpu")
        dead = jupyter.pid
        pid = int(jupyter.run(f"import os\n{FORK}\nprint(fork())").stdout)
        try:
            os.kill(dead, signal.SIGKILL)
            wait_for(lambda: not locked(one.locks))
            use(one, dead, pid, "child")
            text = refused()
        finally:
            os.kill(pid, signal.SIGKILL)
    assert f"GPU0: left over from train.ipynb: {own_name()}, kernel (pid {pid})" in text


@needs_mounts
def test_a_record_says_nothing_about_another_users_process(one: Here) -> None:
    """A user who claims in a record to have started another user's process is ignored."""
    with kernel(one) as child, left_over(one, child) as pid:
        use(one, child.pid, pid, "child")
        assert "left over from train.ipynb" in refused()
        (record,) = one.locks.glob("*.record-*")
        os.chown(record, 1, 1)
        assert "left over" not in refused()


@needs_mounts
def test_another_users_process_is_named_without_a_command() -> None:
    """The listed child of another user's killed kernel is named, without a command."""
    with for_users() as machine, kernel(machine, *as_user(NOBODY)) as child:
        machine.write(GPU)
        with left_over(machine, child, None) as pid:
            use(machine, child.pid, pid, "child")
            text = machine.typed("reserve-gpu", "status").stdout
            use(machine, child.pid, pid, "nothing")
            unlisted = machine.typed("reserve-gpu", "status").stdout
    assert f"GPU0: left over from train.ipynb: {NOBODY}, {CHILD} (pid {pid})" in text
    assert "kill" not in text
    assert "left over" not in unlisted
    assert "fuser -v /dev/nvidia*" in unlisted


# -- memory that is being freed --------------------------------------------------------------------


@contextmanager
def computing(machine: Here, freeing: str) -> Iterator[Child]:
    """Run a process that has reserved the GPU and uses 3300 MiB of it."""
    contexts = machine.folder / "contexts"
    contexts.mkdir()
    machine.write(f"contexts {contexts}\nfreeing {freeing}\n{GPU}")
    with machine.child(**NOTEBOOK) as child:
        assert child.reserve().value == "0"
        assert child.run(f"{CUDA}\nuse(3000) > 2").value is True
        yield child


def refusal() -> tuple[str, dict[str, Any]]:
    """Return the text and the JSON of a refusal."""
    with pytest.raises(reserve_gpu.NoFreeDeviceError) as caught:
        reserve_gpu.reserve()
    return str(caught.value), caught.value.to_dict()


@pytest.mark.parametrize("listed", ["listed", "unlisted"])
def test_memory_that_is_being_freed_is_reported(here: Here, listed: str) -> None:
    """After kill -9, a refusal says that the memory is being freed, if its use decreases."""
    with computing(here, f"{LIMIT_S} gradually {listed}") as child:
        child.kill()
        text, fields = refusal()
    reason = fields["devices"][0]["reason"]
    assert reason in of_gpu(text)
    assert f"{own_name()}, train.ipynb (pid {child.pid}), which has ended" in reason
    assert "being freed" in reason
    assert fields["retry_after_s"] == 5
    assert fields["next"] == ["reserve_gpu.reserve(wait='1h')"]
    assert "fuser" not in text


@pytest.mark.parametrize("listed", ["listed", "unlisted"])
def test_a_killed_holder_is_named_while_its_memory_stays_in_use(here: Here, listed: str) -> None:
    """The text also says if the driver still lists the killed process."""
    with computing(here, f"{LIMIT_S} at-once {listed}") as child:
        child.kill()
        for text in (refusal()[0], str(reserve_gpu.status())):
            last = f"last held by {own_name()}, train.ipynb (pid {child.pid}), which has ended"
            assert last in of_gpu(text)
            assert ("still lists it" in of_gpu(text)) is (listed == "listed")
            assert ("no visible process" in of_gpu(text)) is (listed == "unlisted")
            assert "If the last holder of GPU0 has just ended" in text
            assert "fuser -v /dev/nvidia*" in text


def test_a_released_gpu_whose_memory_is_being_freed_is_reported(here: Here) -> None:
    """After a release, a refusal also says how long ago the GPU was released."""
    with computing(here, f"{LIMIT_S} gradually unlisted") as child:
        child.run("reserve_gpu.release()")
        child.kill()
        text, _ = refusal()
    assert re.search(rf"released \d+ s ago by {own_name()}, train\.ipynb \(pid {child.pid}\)", text)
    assert "being freed" in of_gpu(text)


@pytest.mark.parametrize("listed", ["listed", "unlisted"])
def test_a_waiter_takes_the_gpu_when_its_memory_is_free(here: Here, listed: str) -> None:
    """A waiter gets a killed holder's GPU although no lock changes when its memory is freed."""
    with computing(here, f"1 at-once {listed}") as child:
        child.kill()
        refusal()
        assert got(wait=LIMIT_S) == "0"


def test_a_request_that_gets_a_gpu_never_looks_for_previous_holders(here: Here) -> None:
    """With an idle GPU next to one that is being freed, no memory is read twice."""
    with computing(here, f"{LIMIT_S} gradually unlisted") as child:
        child.kill()
        here.add("gpu")
        here.log.unlink()
        assert got() == "1"
    assert here.calls().count("nvmlDeviceGetMemoryInfo_v2 0") <= 2  # its size, and its use
