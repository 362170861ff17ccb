"""What a user has on a machine, and releases, from another process."""

from __future__ import annotations

import json
import os
import pwd
import re
import signal
import socket
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from reserve_gpu.model.devices import Device, State
from reserve_gpu.model.holders import Answer, DeviceStatus, Reserved
from reserve_gpu.render import reservation_list
from reserve_gpu.render.frontends import SHELL
from reserve_gpu.reservation import remote_release
from tests.support.holders import a_holder
from tests.support.locked import held
from tests.support.machine import CHILD
from tests.support.processes import US, is_running, wait_for
from tests.support.users import DAEMON, NOBODY, as_user, child_of, for_users

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.here import Here, Two
    from tests.support.machine import Machine

from tests.support.remote_release import reserve_gpu

pytest.importorskip("ipykernel.kernelspec")

pytestmark = [pytest.mark.xdist_group("elsewhere")]

START_CUDA = "import ctypes; print(ctypes.CDLL('libcuda.so.1').cuInit(0))"
VISIBLE = "import os; print([os.environ.get('CUDA_VISIBLE_DEVICES')])"


@pytest.mark.ipython
@pytest.mark.promise
def test_release(two: Two) -> None:
    """A notebook releases its GPU when its user asks from a shell, and its next cell says so."""
    two.first.run("%reserve_gpu 1 --note thesis")
    pid = two.first.pid
    done = reserve_gpu(two.machine, "list")
    assert done.stdout.startswith("GPU1  ")
    said = rf'train\.ipynb \(pid {pid}\) for [0-9]+ s, idle: "thesis"'
    assert re.search(said, done.stdout)
    done = reserve_gpu(two.machine, "release", "train.ipynb")
    assert (done.stdout, done.returncode) == (f"Released GPU1 of train.ipynb (pid {pid}).\n", 0)
    assert held(two.machine) == []
    cell = two.first.run(VISIBLE)
    assert cell.stdout == "['']\n"
    assert "You released GPU1 at " in cell.shown
    assert " with reserve-gpu release. To get another one:\n%reserve_gpu" in cell.shown
    assert "released" not in two.first.run("1").all
    assert reserve_gpu(two.machine, "list").stdout == "You hold no GPU on this machine.\n"
    assert "CUDA_VISIBLE_DEVICES = '0'" in two.first.run("%reserve_gpu").stdout


@pytest.mark.parametrize("word", ["1", "GPU1", "train.ipynb", "train", "PID", ""])
def test_what_a_reservation_goes_by(two: Two, word: str) -> None:
    """It is named by a GPU, the notebook or the pid; the only one there is needs no name."""
    two.first.run("%reserve_gpu 1")
    if word:
        two.second.run("%reserve_gpu 0")
    word = word.replace("PID", str(two.first.pid))
    done = reserve_gpu(two.machine, "release", *filter(None, [word]))
    assert done.stdout.startswith("Released GPU1 of train.ipynb")
    assert held(two.machine) == ([0] if word else [])


def test_which_one(two: Two) -> None:
    """Of several reservations without a name each is listed with its command, none released."""
    two.first.run("%reserve_gpu 1")
    two.second.run("%reserve_gpu 0")
    done = reserve_gpu(two.machine, "release")
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    assert lines[0] == "There are 2 reservations. Which one do you mean?"
    assert lines[1::2] == [
        f"reserve-gpu release {two.second.pid}", "reserve-gpu release train.ipynb"
    ]  # fmt: skip
    assert reserve_gpu(two.machine, "release", "nonsense").stderr.startswith(
        "You don't hold 'nonsense'. You hold:\nGPU0  "
    )
    assert "Did you mean --all?" in reserve_gpu(two.machine, "release", "all").stderr
    assert held(two.machine) == [0, 1]
    done = reserve_gpu(two.machine, "release", "--all")
    assert len(done.stdout.splitlines()) == 2
    assert held(two.machine) == []


def test_a_child_that_uses_it(two: Two) -> None:
    """As long as a process that the notebook has started is on the GPU it stays reserved."""
    two.first.run("%reserve_gpu 1")
    child = two.first.run(
        "import subprocess; p = subprocess.Popen(['sleep', '100']); print(p.pid)"
    ).stdout.strip()
    two.machine.add(f"compute {child} 100")
    done = reserve_gpu(two.machine, "release")
    assert done.returncode == 75
    assert "A process that train.ipynb" in done.stdout
    assert "started is using GPU1. Leave that to the user who started it." in done.stdout
    assert held(two.machine) == [1]
    assert two.first.run(VISIBLE).stdout == "['1']\n"
    two.first.run("p.kill(); p.wait()")


def test_a_refusal_says_what_is_ones_own(two: Two) -> None:
    """Who holds GPUs in another notebook reads that first, with what releases them."""
    two.first.run("%reserve_gpu 0,1")
    cell = two.second.run("%reserve_gpu")
    line = next(line for line in cell.shown.splitlines() if line.startswith("You hold"))
    assert line == (
        f"You hold GPU0 and GPU1 in train.ipynb (pid {two.first.pid}). To release them: "
        f"!reserve-gpu release {two.first.pid}"
    )
    assert "Ask " not in cell.shown


def test_one_that_waits(two: Two) -> None:
    """A notebook that waits for one more GPU releases the one that it has."""
    two.first.run("%reserve_gpu 1")
    with two.machine.child() as other:
        other.reserve("'0'")
        message = two.first.start("%reserve_gpu 0,1 --wait 1m")
        wait_for(lambda: list(two.machine.locks.glob("queue-*")))
        assert reserve_gpu(two.machine, "release", "1").stdout.startswith("Released GPU1")
        assert held(two.machine) == [0]
    assert "CUDA_VISIBLE_DEVICES = '0,1'" in two.first.finish(message).stdout


def test_cuda_and_the_end(here: Here) -> None:
    """Once CUDA has started only the end of the process helps: before_end() first, then the end."""
    with here.kernel() as kernel:
        kernel.run("%reserve_gpu 1")
        assert kernel.run(START_CUDA).stdout == "0\n"
        pid, saved = kernel.pid, here.folder / "saved"
        kernel.run(
            "import reserve_gpu\n@reserve_gpu.before_end\n"
            f"def save(): open({str(saved)!r}, 'w').close()"
        )
        done = reserve_gpu(here, "release", str(pid))
        assert done.returncode == 75
        assert f"(pid {pid}): GPU1 will be free when it ends. Leave that to " in done.stdout
        assert held(here) == [1]
        assert is_running(pid)
        done = reserve_gpu(here, "release", str(pid), "--end")
        assert done.returncode == 0
        assert done.stdout.startswith("Ended ")
        assert saved.exists()
        assert held(here) == []


def test_a_script(here: Here) -> None:
    """A script can't be asked, which is said; --end ends it, also where it is stopped."""
    with here.child() as child:
        child.reserve("'1'")
        done = reserve_gpu(here, "release")
        assert f"(pid {child.pid}) can't release GPU1 on request, only by ending" in done.stdout
        os.kill(child.pid, signal.SIGSTOP)
        assert reserve_gpu(here, "release", "--end").stdout.startswith(f"Ended {CHILD}")
        assert held(here) == []


def test_a_forged_restart(here: Here) -> None:
    """A word in its lock file, that it is kept for a restart, keeps no process from being ended."""
    with here.child() as child:
        child.reserve("'1'")
        path = here.locks / f"{here.uuid('1')}.lock"
        path.write_text(json.dumps(json.loads(path.read_bytes()) | {"kept_until": 9e9}))
        assert reserve_gpu(here, "release", "1", "--end").stdout.startswith("Ended ")
        assert held(here) == []


def test_without_a_driver(here: Here) -> None:
    """Where the driver does not answer, what is held is listed and released all the same."""
    with here.child() as child:
        child.reserve("'1'")
        here.add("fail nvmlInitWithFlags * 999")
        assert reserve_gpu(here, "list").stdout.startswith("GPU1  ")
        assert reserve_gpu(here, "release", str(child.pid), "--end").stdout.startswith("Ended ")
        assert held(here) == []


def test_what_is_still_there(here: Here) -> None:
    """Who is left on a GPU that was released is said, and the exit code is not 0."""
    with here.child() as child:
        child.reserve("'1'")
        child.run(
            "import subprocess; p = subprocess.Popen(['sleep', '100'], start_new_session=True)"
        )
        pid = child.run("p.pid").value
        here.add(f"compute {pid} 100")
        done = reserve_gpu(here, "release", "--end")
        assert done.returncode == 75
        ended, still = done.stdout.splitlines()
        assert ended.startswith(f"Ended {CHILD}")
        assert still.startswith("GPU1 is still in use: ")
        assert f"(pid {pid})" in still
        os.kill(pid, signal.SIGKILL)


# -- who is heard ----------------------------------------------------------------------------------

LISTEN = (
    "from reserve_gpu.locks.directory import LockDirectory\n"
    "with LockDirectory(): pass\n"
    "from reserve_gpu.reservation import socket_directory\n"
    "from reserve_gpu.reservation.remote_release import ask\n"
    "from reserve_gpu.features.remote_requests.handler import Listener\n"
    "asked = []\n"
    "def answer(request):\n"
    " asked.append(request)\n"
    " return {'answer': 'RELEASED'}\n"
)


@pytest.fixture
def users() -> Iterator[Machine]:
    with for_users() as machine:
        yield machine


@pytest.mark.promise
@pytest.mark.xdist_group("users")
def test_a_stranger_is_not_heard(users: Machine) -> None:
    """Another user can't reach a process's socket; the same user and root are answered."""
    with child_of(users, NOBODY) as first, child_of(users, NOBODY) as same, users.child() as root:
        first.run(LISTEN + "Listener(answer).start(socket_directory.open_any)")
        ask = f"ask({first.pid}, {uid_of(NOBODY)}, {{'do': 'release'}})"
        (path,) = sockets_of(users, first.pid)
        with child_of(users, DAEMON) as other:
            assert other.run(LISTEN + ask).value is None
            connect = "import socket\nsocket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).connect"
            assert other.run(f"{connect}({str(path)!r})").error == "PermissionError"
        assert first.run("len(asked)").value == 0
        for friend in (same, root):
            assert friend.run(LISTEN + ask).value == {"answer": "RELEASED"}
        assert first.run("len(asked)").value == 2


@pytest.mark.xdist_group("users")
def test_root_releases_what_anybody_has(users: Machine) -> None:
    """Root ends another user's process by the GPU that it has; a third user has nothing to end."""
    with child_of(users, NOBODY) as first:
        first.reserve("'1'")
        release = [*US, "release", "1", "--end"]
        assert "You hold no GPU" in users.command(*as_user(DAEMON), *release).stderr
        missing = users.command(*US, "release", "0").stderr
        assert missing.startswith("No reservation matches '0'. There are:\nGPU1  nobody")
        assert users.command(*release).stdout.startswith("Ended ")
        assert not is_running(first.pid)


@pytest.mark.xdist_group("users")
def test_folders_of_strangers(users: Machine) -> None:
    """Who has made a user's folder first, or a link, changes nothing; it stays as it was."""
    uid = uid_of(NOBODY)
    with child_of(users, NOBODY) as first, child_of(users, DAEMON) as other:
        first.run(LISTEN)
        for number, make in enumerate(("os.mkdir({}, 0o777)", "os.symlink('/', {})")):
            name = f"asked-{uid}" + "-x" * number
            assert other.run(make.format(repr(str(users.locks / name)))).error is None
        assert first.run(LISTEN + "Listener(answer).start(socket_directory.open_any)").error is None
        with child_of(users, NOBODY) as same:
            ask = f"ask({first.pid}, {uid}, {{}})"
            assert same.run(LISTEN + ask).value == {"answer": "RELEASED"}
        assert not list((users.locks / f"asked-{uid}").iterdir())


@pytest.mark.xdist_group("users")
def test_a_strangers_answer_is_not_believed(users: Machine) -> None:
    """A process of another user that has the number now is not asked, whatever it would say."""
    with child_of(users, DAEMON) as other, users.child() as root:
        other.run(LISTEN + "Listener(answer).start(socket_directory.open_any)")
        assert root.run(LISTEN + f"ask({other.pid}, {uid_of(NOBODY)}, {{}})").value is None
        (path,) = sockets_of(users, other.pid)
        folder = users.locks / f"asked-{uid_of(NOBODY)}"
        folder.mkdir(0o700)
        os.chown(folder, uid_of(NOBODY), -1)
        path.rename(folder / path.name)  # as only root can
        assert root.run(f"ask({other.pid}, {uid_of(NOBODY)}, {{}})").value is None


def test_sockets_of_processes_that_have_ended(here: Here) -> None:
    """What a killed process leaves in the folder is removed by the next one that listens."""
    with here.child() as first, here.child() as second:
        first.run(LISTEN + "Listener(answer).start(socket_directory.open_any)")
        first.kill()
        assert sockets_of(here, first.pid)
        (path,) = sockets_of(here, first.pid)
        path.with_name("somebody's own").touch()
        second.run(LISTEN + "Listener(answer).start(socket_directory.open_any)")
        assert not sockets_of(here, first.pid)
        before = os.listdir("/proc/self/fd")
        assert remote_release.ask(second.pid, os.geteuid(), {}) == {"answer": "RELEASED"}
        assert len(os.listdir("/proc/self/fd")) == len(before)


def test_nonsense_is_no_request(here: Here) -> None:
    """Whatever is sent, the next request is answered; a listener that is stopped is gone."""
    with here.child() as child:
        child.run(LISTEN + "listener = Listener(answer); listener.start(socket_directory.open_any)")
        (path,) = sockets_of(here, child.pid)
        for sent in (b"", b"x", b"[]", b"{", b"1", b"[" * 50_000):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
                folder = os.open(path.parent, os.O_PATH)
                connection.connect(f"/proc/self/fd/{folder}/{path.name}")
                os.close(folder)
                connection.send(sent)
        ask = child.pid, os.geteuid(), {"do": "release"}
        assert remote_release.ask(*ask) == {"answer": "RELEASED"}
        assert child.run("[request['do'] for request in asked]").value == ["release"]
        child.run("listener.stop()")
        wait_for(lambda: not sockets_of(here, child.pid))
        assert remote_release.ask(*ask) is None


def uid_of(user: str) -> int:
    return pwd.getpwnam(user).pw_uid


def sockets_of(machine: Machine, pid: int) -> list[Path]:
    """Return the sockets on which a process listens."""
    with suppress(FileNotFoundError):  # the last listener removes the folder
        return list(machine.locks.glob(f"asked-*/*-{pid}-*"))
    return []


def test_a_fork_does_not_listen(here: Here) -> None:
    """A child that was forked keeps no socket of its parent's open."""
    with here.child() as child:
        child.run(LISTEN + "Listener(answer).start(socket_directory.open_any)")
        code = (
            "import time\nr, w = os.pipe()\npid = os.fork()\n"
            "if not pid:\n os.write(w, str([os.readlink(f'/proc/self/fd/{n}') for n in "
            "os.listdir('/proc/self/fd') if os.path.exists(f'/proc/self/fd/{n}')]).encode())\n"
            " os._exit(0)\n"
            "os.waitpid(pid, 0)\n"
        )
        child.run(code)
        assert "socket:" not in child.run("os.read(r, 10000).decode()").value


@pytest.mark.parametrize("answer", [Answer.CUDA, Answer.CHILD, Answer.PROGRAM, Answer.SILENT])
def test_who_sits_there_reads_how_to_end_it(answer: Answer) -> None:
    """A person is told what ends a process that can't release; a program is not."""
    each = Reserved(a_holder(pid=4321), (DeviceStatus(Device(0, "GPU-1"), State.RESERVED),))
    typed = "reserve-gpu release 4321 --end"
    assert typed in reservation_list.released(each, answer, [each], SHELL)
    program = SHELL._replace(is_for_program=True)
    assert typed not in reservation_list.released(each, answer, [each], program)
