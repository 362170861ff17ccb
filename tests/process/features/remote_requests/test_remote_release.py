"""Releases on request of another process."""

from __future__ import annotations

import json
import os
import signal
import socket
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from reserve_gpu.reservation import remote_release
from tests.support.locked import held
from tests.support.machine import CHILD
from tests.support.processes import US, is_running, wait_for
from tests.support.remote_release import LISTEN, RELEASED, is_heard, release, uid_of
from tests.support.users import DAEMON, NOBODY, child_of
from tests.support.waiters import stopped

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.here import Here, Two
    from tests.support.machine import Machine

pytest.importorskip("ipykernel.kernelspec")

pytestmark = [pytest.mark.xdist_group("elsewhere")]

START_CUDA = "import ctypes; print(ctypes.CDLL('libcuda.so.1').cuInit(0))"
PRINT_VISIBLE = "import os; print([os.environ.get('CUDA_VISIBLE_DEVICES')])"


@pytest.mark.ipython
@pytest.mark.promise
def test_notebook_releases_its_gpu_on_request(two: Two) -> None:
    """A notebook releases its GPU when its user requests this, and shows it in the next cell."""
    two.first.run("%reserve_gpu 1 --note thesis")
    pid = two.first.pid
    shown = two.machine.command(*US, "list").stdout
    assert shown.startswith(f"GPU1  {shown.split()[1]} train.ipynb (pid {pid}) ")
    assert "thesis" in shown
    done = release(two.machine, "train.ipynb")
    assert (done.stdout, done.returncode) == (f"Released GPU1 of train.ipynb (pid {pid}).\n", 0)
    assert held(two.machine) == []
    cell = two.first.run(PRINT_VISIBLE)
    assert cell.stdout == "['']\n"
    assert "You released GPU1" in cell.shown
    assert "released" not in two.first.run("1").all
    assert json.loads(two.machine.command(*US, "list", "--json").stdout)["reservations"] == []
    assert "CUDA_VISIBLE_DEVICES = '0'" in two.first.run("%reserve_gpu").stdout


@pytest.mark.parametrize("name", ["1", "train", "PID", ""])
def test_reservation_is_named_by_gpu_notebook_or_pid(two: Two, name: str) -> None:
    """The only reservation needs no name."""
    two.first.run("%reserve_gpu 1")
    if name:
        two.second.run("%reserve_gpu 0")
    name = name.replace("PID", str(two.first.pid))
    assert release(two.machine, *filter(None, [name])).returncode == 0
    assert held(two.machine) == ([0] if name else [])


def test_ambiguous_request_releases_nothing(two: Two) -> None:
    """Each of several reservations is listed with its command, and `--all` releases them."""
    two.first.run("%reserve_gpu 1")
    two.second.run("%reserve_gpu 0")
    done = release(two.machine)
    assert done.returncode == 2
    assert done.stderr.splitlines()[1::2] == [
        f"reserve-gpu release {two.second.pid}", "reserve-gpu release train.ipynb"
    ]  # fmt: skip
    for name in ("nonsense", "all"):
        assert release(two.machine, name).returncode == 2
    assert held(two.machine) == [0, 1]
    done = release(two.machine, "--all")
    assert len(done.stdout.splitlines()) == 2
    assert held(two.machine) == []


def test_device_of_a_child_process_is_not_released(two: Two) -> None:
    two.first.run("%reserve_gpu 1")
    child = two.first.run(
        "import subprocess; p = subprocess.Popen(['sleep', '100']); print(p.pid)"
    ).stdout.strip()
    two.machine.add(f"compute {child} 100")
    assert release(two.machine).returncode == 75
    assert held(two.machine) == [1]
    assert two.first.run(PRINT_VISIBLE).stdout == "['1']\n"
    two.first.run("p.kill(); p.wait()")


@pytest.mark.full
def test_stopped_kernel_does_not_respond(here: Here) -> None:
    with here.kernel() as kernel:
        kernel.run("%reserve_gpu 1")
        with stopped(here, kernel.pid):
            assert "does not respond" in release(here).stdout
            assert held(here) == [1]


def test_kernel_with_cuda_must_be_ended(here: Here) -> None:
    """Once CUDA has started, `--end` calls before_end() functions and ends the kernel."""
    with here.kernel() as kernel:
        kernel.run("%reserve_gpu 1")
        assert kernel.run(START_CUDA).stdout == "0\n"
        pid, saved = kernel.pid, here.folder / "saved"
        kernel.run(
            "import reserve_gpu\n@reserve_gpu.before_end\n"
            f"def save(): open({str(saved)!r}, 'w').close()"
        )
        done = release(here, str(pid))
        assert done.returncode == 75
        assert "CUDA" in done.stdout
        assert held(here) == [1]
        assert is_running(pid)
        assert release(here, str(pid), "--end").returncode == 0
        assert saved.exists()
        assert held(here) == []


def test_script_must_be_ended(here: Here) -> None:
    """A script can't receive requests, but `--end` ends it, even while it is stopped."""
    with here.child() as child:
        child.reserve("'1'")
        assert f"(pid {child.pid})" in release(here).stdout
        assert held(here) == [1]
        os.kill(child.pid, signal.SIGSTOP)
        done = release(here, "--end")
        assert done.stdout.startswith(f"Ended {CHILD}")
        assert "before_end()" in done.stderr
        assert held(here) == []


def test_script_is_released_without_a_driver(here: Here) -> None:
    with here.child() as child:
        child.reserve("'1'")
        here.add("fail nvmlInitWithFlags * 999")
        assert here.command(*US, "list").stdout.startswith("GPU1  ")
        assert release(here, str(child.pid), "--end").returncode == 0
        assert held(here) == []


def test_remaining_process_is_reported(here: Here) -> None:
    """The exit code is not 0 if another process still uses the GPU after the release."""
    with here.child() as child:
        child.reserve("'1'")
        child.run(
            "import subprocess; p = subprocess.Popen(['sleep', '100'], start_new_session=True)"
        )
        pid = child.run("p.pid").value
        here.add(f"compute {pid} 100")
        done = release(here, "--end")
        assert done.returncode == 75
        ended, still = done.stdout.splitlines()
        assert ended.startswith(f"Ended {CHILD}")
        assert f"(pid {pid})" in still
        os.kill(pid, signal.SIGKILL)


# -- sockets ---------------------------------------------------------------------------------------


def sockets_of(machine: Machine, pid: int) -> list[Path]:
    """Return the sockets on which a process listens."""
    with suppress(FileNotFoundError):  # the last listener removes the folder
        return list(machine.locks.glob(f"asked-*/*-{pid}-*"))
    return []


@pytest.mark.promise
@pytest.mark.xdist_group("users")
def test_only_the_same_user_and_root_are_answered(users: Machine) -> None:
    with child_of(users, NOBODY) as first, child_of(users, NOBODY) as same, users.child() as root:
        first.run(LISTEN)
        (path,) = sockets_of(users, first.pid)
        with child_of(users, DAEMON) as other:
            assert not is_heard(other, first, NOBODY)
            connect = "import socket\nsocket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).connect"
            assert other.run(f"{connect}({str(path)!r})").error == "PermissionError"
        assert first.run("len(requests)").value == 0
        for friend in (same, root):
            assert is_heard(friend, first, NOBODY)
        assert first.run("len(requests)").value == 2


@pytest.mark.xdist_group("users")
def test_root_ends_the_process_of_any_user(users: Machine) -> None:
    with child_of(users, NOBODY) as first:
        first.reserve("'1'")
        assert release(users, "1", "--end", user=DAEMON).returncode == 2
        missing = users.command(*US, "release", "0")
        assert missing.returncode == 2
        assert "\nGPU1  nobody" in missing.stderr
        assert is_running(first.pid)
        assert release(users, "1", "--end").returncode == 0
        assert not is_running(first.pid)


@pytest.mark.xdist_group("users")
def test_answer_of_another_user_is_ignored(users: Machine) -> None:
    """A process of another user that has the holder's former pid is not asked."""
    with child_of(users, DAEMON) as other, users.child() as root:
        other.run(LISTEN)
        assert not is_heard(root, other, NOBODY)
        (path,) = sockets_of(users, other.pid)
        folder = users.locks / f"asked-{uid_of(NOBODY)}"
        folder.mkdir(0o700)
        os.chown(folder, uid_of(NOBODY), -1)
        path.rename(folder / path.name)  # only root can do this
        assert not is_heard(root, other, NOBODY)


def test_sockets_of_ended_processes_are_removed(here: Here) -> None:
    """The next process that listens removes the sockets of killed ones, but no other files."""
    with here.child() as first, here.child() as second:
        first.run(LISTEN)
        first.kill()
        (path,) = sockets_of(here, first.pid)
        other = path.with_name("another file")
        other.touch()
        second.run(LISTEN)
        assert not sockets_of(here, first.pid)
        assert other.exists()
        before = os.listdir("/proc/self/fd")
        assert remote_release.ask(second.pid, os.geteuid(), {}) == RELEASED
        assert len(os.listdir("/proc/self/fd")) == len(before)


def test_invalid_requests_are_ignored(here: Here) -> None:
    with here.child() as child:
        child.run(LISTEN)
        (path,) = sockets_of(here, child.pid)
        for sent in (b"", b"x", b"[]", b"{", b"1", b"[" * 50_000):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
                folder = os.open(path.parent, os.O_PATH)
                connection.connect(f"/proc/self/fd/{folder}/{path.name}")
                os.close(folder)
                connection.send(sent)
        ask = child.pid, os.geteuid(), {"do": "release"}
        assert remote_release.ask(*ask) == RELEASED
        assert child.run("[request['do'] for request in requests]").value == ["release"]
        child.run("listener.stop()")
        wait_for(lambda: not sockets_of(here, child.pid))
        assert remote_release.ask(*ask) is None


def test_forked_child_does_not_listen(here: Here) -> None:
    with here.child() as child:
        child.run(LISTEN)
        child.run(
            "import time\nr, w = os.pipe()\npid = os.fork()\n"
            "if not pid:\n os.write(w, str([os.readlink(f'/proc/self/fd/{n}') for n in "
            "os.listdir('/proc/self/fd') if os.path.exists(f'/proc/self/fd/{n}')]).encode())\n"
            " os._exit(0)\n"
            "os.waitpid(pid, 0)\n"
        )
        assert "socket:" not in child.run("os.read(r, 10000).decode()").value
