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
from tests.support.reserving import of_gpu, refused

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
def fork(path):
    if pid := os.fork():
        return pid
    file = open(path)
    while True:
        signal.pause()
"""


@pytest.fixture
def one(here: Here) -> Here:
    """Return a machine with one idle GPU, which is not the first one for the driver."""
    here.write(GPU)
    return here


@contextmanager
def kernel(machine: Machine) -> Iterator[Child]:
    """Run a Python process as the leader of a session, in a /dev with the GPU's device file."""
    folder = str(machine.folder / "dev")
    prefix = ("unshare", "--mount", "sh", "-c", WITH_DEVICE_FILE, folder)
    child = Child(machine.environ(**NOTEBOOK), machine.folder, *prefix)
    try:
        yield child
    finally:
        child.kill()


@contextmanager
def left_over(machine: Machine, child: Child) -> Iterator[int]:
    """Let a process reserve a GPU, fork and be killed. Yield the pid of the forked process."""
    assert child.reserve().error is None
    pid: int = child.run(f"{FORK}\nfork({DEVICE_FILE!r})").value
    try:
        wait_for(lambda: DEVICE_FILE in opened(pid))
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


def use(machine: Machine, child: int, listed: str) -> None:
    """Keep memory of the GPU in use, and list it as one of several drivers would."""
    machine.write(f"{GPU}  {'used' if listed == 'nothing' else f'compute {child}'} 3000")


@needs_mounts
@pytest.mark.parametrize("listed", ["nothing", "child"])
def test_a_process_that_a_killed_kernel_left_over_is_named(one: Here, listed: str) -> None:
    """A refusal and the status name the forked child of a killed kernel, and how to end it."""
    with kernel(one) as child, left_over(one, child) as pid:
        use(one, pid, listed)
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
def test_a_record_says_nothing_about_another_users_process(one: Here) -> None:
    """A user who claims in a record to have started another user's process is ignored."""
    with kernel(one) as child, left_over(one, child) as pid:
        use(one, pid, "child")
        assert "left over from train.ipynb" in refused()
        (record,) = one.locks.glob("*.record-*")
        os.chown(record, 1, 1)
        assert "left over" not in refused()


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
