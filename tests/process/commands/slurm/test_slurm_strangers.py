"""Other users connect to a kernel in a job; a script replaces srun, and runs the node here."""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.machine import LIMIT_S, Kernel
from tests.support.processes import US, is_running, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jupyter_client.manager import KernelManager

    from tests.support.machine import Machine

from tests.support.slurm_strangers import PlainKernel, srun_of

pytest.importorskip("ipykernel.kernelspec")
zmq = pytest.importorskip("zmq")

CHANNELS = ("shell", "control", "stdin", "hb", "iopub")
NOBODY = ("setpriv", "--reuid=nobody", "--regid=65534", "--clear-groups")
DELIM = b"<IDS|MSG>"
IN_JOB = 'exec ${TEST_JOB:+env SLURM_JOB_ID=$TEST_JOB} "$@"\n'
PID = "import os; print(os.getpid())"
# What a job may print where the node's part writes: a prolog, half a line, values of other shapes.
PRINTED = [
    *("loading modules", "", "5", "null", "[]", "{}", '"ab"', '["job"]', '["failed"]'),
    *('["shell"]', '["shell", "x"]', '["iopub", 5]', '["started"]', '[["job"]]', "[" * 100_000),
]


def hostile(signed_by: Any) -> list[list[bytes]]:
    """Return messages that no client sends. signed_by: Jupyter's session with the kernel's key."""
    signed = [
        signed_by.serialize(signed_by.msg("execute_request", {"code": "print(1)"})),
        signed_by.serialize({**signed_by.msg("x_request"), "content": None}),
    ]
    values = [
        [b"5"] * 4,
        [b"[]"] * 4,
        [b"{}"] * 4,
        [b'{"msg_id": [], "msg_type": 5}', *[b"{}"] * 3],
    ]
    values += [[b'{"msg_id": {}, "msg_type": "x_request"}', *[b"{}"] * 3], [b"[" * 10_000] * 4]
    # By one who has the key: a client with mistakes.
    signed += [[DELIM, signed_by.sign(parts), *parts] for parts in values]
    unsigned = [
        *([b""], [b"", b""], [b"", b"", b""], [b"x"] * 2, [b"x"] * 1000, [bytes(1 << 24)]),
        *([DELIM], [DELIM, b""], [DELIM] * 7, [DELIM, b"", b"{}"], [b"", DELIM, b"\xff"]),
        [DELIM, b"0" * 64, b'{"msg_id": "1", "msg_type": "execute_request"}', *[b"{}"] * 3],
        [DELIM, "\u0661".encode() * 64, *[b"\xff\xfe"] * 4],
    ]
    return [*unsigned, *signed[1:], [*signed[0][:1], b"0" * 64, *signed[0][2:]]]


@pytest.fixture
def kernel(machine: Machine) -> Iterator[PlainKernel]:
    with closing(PlainKernel(machine)) as made:
        yield made


def test_no_message_ends_a_kernel(kernel: PlainKernel) -> None:
    """Whatever arrives at a channel of a kernel in a job, its cells run on in the same process."""
    before = kernel.run(PID).stdout
    with zmq.Context() as context:
        for channel in CHANNELS:
            kind = zmq.SUB if channel == "iopub" else zmq.DEALER
            with context.socket(kind) as stranger:
                stranger.connect(f"tcp://127.0.0.1:{kernel.port(channel)}")
                if channel == "iopub":
                    stranger.subscribe(b"x" * 100_000)
                    continue
                for frames in hostile(kernel.client.session):
                    stranger.send_multipart(frames)
                stranger.linger = -1
        with context.socket(zmq.REQ) as heart:
            heart.connect(f"tcp://127.0.0.1:{kernel.port('hb')}")
            heart.send(b"ping")
            assert heart.poll(1000 * LIMIT_S)
            assert heart.recv() == b"ping"
    assert kernel.run(PID).stdout == before
    assert kernel.process.poll() is None


@pytest.mark.full
def test_malformed_bytes_do_not_end_a_kernel(kernel: PlainKernel) -> None:
    """Connections with other bytes, or none, and many of them at once, leave a kernel as it is."""
    before = kernel.run(PID).stdout
    sockets = []
    for channel in CHANNELS:
        for data in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" + bytes(9), os.urandom(1 << 16)):
            made = socket.create_connection(("127.0.0.1", kernel.port(channel)))
            made.sendall(data)
            sockets.append(made)
        for _ in range(50):
            socket.create_connection(("127.0.0.1", kernel.port(channel))).close()
    assert kernel.run(PID).stdout == before
    for made in sockets:
        made.close()
    assert kernel.run(PID).stdout == before


# Connects to each port, and says what it is sent: nothing, where it is refused.
KNOCK = """
import socket, sys
for port in sys.argv[1:]:
    with socket.create_connection(("127.0.0.1", int(port)), 60) as made:
        try:
            print(len(made.recv(1)))
        except ConnectionError:
            print(0)
"""


def as_nobody(machine: Machine, *argv: str) -> str:
    """Run a command as another user; returns its output."""
    if os.geteuid():
        pytest.skip("needs root, to become another user")
    try:
        done = subprocess.run(
            [*NOBODY, *argv],
            env=machine.environ(),
            cwd="/",
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no other user can run this Python: {error}")
    return done.stdout


def test_another_user_reaches_no_port(machine: Machine, kernel: PlainKernel) -> None:
    """A kernel with TCP ports tells another user's process nothing, and this user's goes on."""
    ports = [str(kernel.port(channel)) for channel in CHANNELS]
    assert as_nobody(machine, sys.executable, "-c", KNOCK, *ports).split() == ["0"] * 5
    own = subprocess.run(
        [sys.executable, "-c", KNOCK, *ports], capture_output=True, text=True, check=True
    )
    assert own.stdout.split() == ["1"] * 5
    assert kernel.run("print(6 * 7)").stdout == "42\n"


# Connects to each port again and again, until its stdin ends; prints a line once it has begun.
FLOOD = """
import select, socket, sys
ports, said = sys.argv[1:], False
while not select.select([sys.stdin], [], [], 0)[0]:
    batch = [socket.socket() for _ in range(60) for _ in ports]
    for made, port in zip(batch, ports * 60):
        made.setblocking(False)
        made.connect_ex(("127.0.0.1", int(port)))
    for made in batch:
        made.close()
    if not said:
        said = print("flooding", flush=True) is None
"""


def test_a_flood_delays_no_message(machine: Machine, kernel: PlainKernel) -> None:
    """While another user floods its ports, a kernel runs cells and accepts its client."""
    as_nobody(machine, sys.executable, "-c", "")
    before = kernel.run(PID).stdout
    argv = [*NOBODY, sys.executable, "-c", FLOOD, str(kernel.port("shell")), str(kernel.port("hb"))]
    pipe = subprocess.PIPE
    with (
        subprocess.Popen(argv, stdin=pipe, stdout=pipe, env=machine.environ(), cwd="/") as flood,
        zmq.Context() as context,
        context.socket(zmq.REQ) as heart,
    ):
        assert flood.stdin
        assert flood.stdout
        try:
            assert flood.stdout.readline() == b"flooding\n"
            heart.linger = 0
            heart.connect(f"tcp://127.0.0.1:{kernel.port('hb')}")
            heart.send(b"ping")
            assert heart.poll(1000 * LIMIT_S)
            assert kernel.run(PID).stdout == before
        finally:
            flood.stdin.close()


@pytest.mark.parametrize("find", ["ask", "look_up"])
@pytest.mark.parametrize("host", ["127.0.0.1", "::ffff:127.0.0.1"])
def test_the_owner_of_a_connection(find: str, host: str) -> None:
    """A connection belongs to the user of its other end until that is closed."""
    from reserve_gpu.commands.slurm import socket_owners

    finder = getattr(socket_owners, find)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        assert finder(listening.getsockname(), ("0.0.0.0", 0)).state  # noqa: S104
        made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        with made:
            made.connect((host, listening.getsockname()[1]))
            accepted, client = listening.accept()
            server = accepted.getsockname()
            assert socket_owners.owner(finder, client, server) == os.geteuid()
            assert socket_owners.owner(finder, client, ("127.0.0.1", 1)) is None
        assert socket_owners.owner(finder, client, server) is None
        accepted.close()


def test_the_relay_keeps_its_folder(machine: Machine) -> None:
    """A client's connection reaches the relay even if another folder has that folder's name."""
    with (
        tempfile.TemporaryDirectory() as temporary,  # the path of a socket has to be short
        closing(PlainKernel(machine, TMPDIR=temporary)) as made,
    ):
        (path,) = Path(temporary).glob(f"*/kernel-{made.port('hb')}")
        path.parent.rename(Path(temporary, "moved"))
        path.parent.mkdir()
        with socket.socket(socket.AF_UNIX) as squat, zmq.Context() as context:
            squat.bind(str(path))
            squat.listen()
            with context.socket(zmq.REQ) as heart:
                heart.linger = 0
                heart.connect(f"tcp://127.0.0.1:{made.port('hb')}")
                heart.send(b"ping")
                assert heart.poll(1000 * LIMIT_S)


@pytest.mark.full
def test_other_lines_of_a_job_are_skipped(machine: Machine) -> None:
    """Lines of the job among those of its kernel are passed over, whatever they look like."""
    with closing(PlainKernel(machine, PRINTED)) as made:
        assert made.run("print(6 * 7)").stdout == "42\n"


def test_a_port_that_is_taken(machine: Machine) -> None:
    """If another process has the client's port, the kernel ends with one line that says so."""
    from jupyter_client.connect import write_connection_file

    with socket.create_server(("127.0.0.1", 0)) as taken:
        path, _ = write_connection_file(
            str(machine.folder / "file.json"), shell_port=taken.getsockname()[1]
        )
        done = machine.command(*US, "kernel", "slurm", "-f", path, "--", srun_of(machine))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(
        "The kernel can't listen on the addresses in its connection file: "
    )
    assert done.stderr.count("\n") == 1


# -- without a port --------------------------------------------------------------------------------


class JupyterKernel(Kernel):
    """A kernel that Jupyter's manager starts by our provisioner, as in JupyterLab."""

    def __init__(self, machine: Machine) -> None:
        self.manager = provisioned(machine)
        self._begin(machine.environ(), machine.folder)


def provisioned(machine: Machine) -> KernelManager:
    from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
    from jupyter_client.manager import KernelManager

    argv = [*US, "kernel", "slurm", "-f", "{connection_file}", "--", srun_of(machine)]
    spec = KernelSpec(argv=argv, language="python", interrupt_mode="message")
    spec.metadata = {"kernel_provisioner": {"provisioner_name": "reserve-gpu-slurm"}}

    class Specs(KernelSpecManager):
        def get_kernel_spec(self, kernel_name: str) -> KernelSpec:  # noqa: ARG002
            return spec

    path = str(machine.folder / "lab.json")
    return KernelManager(connection_file=path, kernel_spec_manager=Specs())


def test_no_port_is_opened(machine: Machine) -> None:
    """With our provisioner a client and its kernel talk by files in a folder of this user alone.

    A restart keeps the folder, and a shutdown removes it.
    """
    with closing(JupyterKernel(machine)) as made:
        assert made.run("print(6 * 7)").stdout == "42\n"
        told = json.loads(Path(made.manager.connection_file).read_text())
        assert told["transport"] == "ipc"
        folder = Path(told["ip"]).parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert len([*folder.iterdir()]) == 5
        made.restart()
        assert made.run("print(6 * 7)").stdout == "42\n"
        assert json.loads(Path(made.manager.connection_file).read_text()) == told
    assert not folder.exists()


def test_a_restarted_kernel_has_a_new_folder(machine: Machine) -> None:
    """A kernel that restarts after a crash does not use a folder with its earlier name."""
    folder = "import ipykernel.connect as it, os; print(os.path.dirname(it.get_connection_file()))"
    with closing(JupyterKernel(machine)) as made:
        before = Path(made.run(folder).stdout.strip())
        made.start("import os; os._exit(3)")
        wait_for(lambda: not made.manager.is_alive(), 0.05)
        shutil.rmtree(before, ignore_errors=True)
        before.mkdir(0o777)
        try:
            made.restart()
            assert made.run("print(6 * 7)").stdout == "42\n"
            assert not [*before.iterdir()]
        finally:
            shutil.rmtree(before)


START = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[4])!r})
from pathlib import Path
from tests.support.slurm_strangers import JupyterKernel
from tests.support.machine import Machine
kernel = JupyterKernel(Machine(Path.cwd()))
"""


@pytest.mark.full
def test_a_killed_client_leaves_no_folder(machine: Machine) -> None:
    """If the client is killed with -9, the relay removes the folder of its sockets."""
    with machine.child() as client:
        started = client.run(START)
        assert started.error is None, started
        folder = Path(client.run("kernel.manager.ip").value).parent
        relay = client.run("int(kernel.manager.provisioner.pid)").value
        assert folder.is_dir()
        client.kill()
    wait_for(lambda: not is_running(relay), 0.05)
    assert not folder.exists()


@pytest.mark.parametrize("squat", ["a folder", "a link", "an open folder", "a file"])
def test_a_folder_of_another_user_is_refused(tmp_path: Path, squat: str) -> None:
    """A folder that was removed is made again, and refused if another user was faster."""
    from reserve_gpu.commands.slurm import sockets

    folder, other = tmp_path / "folder", tmp_path / "other"
    sockets.require_private(str(folder))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    sockets.require_private(str(folder))
    folder.rmdir()
    if squat == "a link":
        other.mkdir(0o700)
        folder.symlink_to(other)
    elif squat == "a file":
        folder.touch(0o700)
    else:
        folder.mkdir(0o700)
    if squat == "an open folder":
        folder.chmod(0o755)
    if squat == "a folder":
        if os.geteuid():
            pytest.skip("needs root, to be another user")
        os.chown(folder, 65534, 65534)
    with pytest.raises(PermissionError):
        sockets.require_private(str(folder))


def test_a_temporary_folder_with_a_long_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If TMPDIR is too long for the path of a socket, the folder is in /tmp."""
    from reserve_gpu.commands.slurm import sockets

    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    assert sockets.socket_root() == "/tmp"
    monkeypatch.setattr(tempfile, "tempdir", "/var/tmp")
    assert sockets.socket_root() == "/var/tmp"
