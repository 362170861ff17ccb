"""The connections of a kernel in a Slurm job, which other users of the machine may try to use."""

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

from tests.support.machine import LIMIT_S, ROOT
from tests.support.processes import is_running, wait_for
from tests.support.slurm_kernels import ProvisionedKernel, TcpKernel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.machine import Machine

pytest.importorskip("ipykernel.kernelspec")
zmq = pytest.importorskip("zmq")

CHANNELS = ("shell", "control", "stdin", "hb", "iopub")
NOBODY = ("setpriv", "--reuid=nobody", "--regid=65534", "--clear-groups")
DELIM = b"<IDS|MSG>"
PRINT_PID = "import os; print(os.getpid())"
PRINT_42 = "print(6 * 7)"


@pytest.fixture
def kernel(machine: Machine) -> Iterator[TcpKernel]:
    """Start a kernel with TCP ports."""
    with closing(TcpKernel(machine)) as kernel:
        yield kernel


def check_heartbeat(kernel: TcpKernel) -> None:
    """Check that the kernel answers on its heartbeat channel."""
    with zmq.Context() as context, context.socket(zmq.REQ) as heart:
        heart.linger = 0
        heart.connect(f"tcp://127.0.0.1:{kernel.port('hb')}")
        heart.send(b"ping")
        assert heart.poll(1000 * LIMIT_S)
        assert heart.recv() == b"ping"


def invalid_messages(session: Any) -> list[list[bytes]]:
    """Return messages that no client sends.

    Args:
        session: Jupyter's session with the kernel's key.
    """
    signed = [
        session.serialize(session.msg("execute_request", {"code": "print(1)"})),
        session.serialize({**session.msg("x_request"), "content": None}),
    ]
    values = [
        [b"5"] * 4,
        [b"[]"] * 4,
        [b"{}"] * 4,
        [b'{"msg_id": [], "msg_type": 5}', *[b"{}"] * 3],
        [b'{"msg_id": {}, "msg_type": "x_request"}', *[b"{}"] * 3],
        [b"[" * 10_000] * 4,
    ]
    # These have valid signatures, as the messages of a faulty client.
    signed += [[DELIM, session.sign(parts), *parts] for parts in values]
    unsigned = [
        *([b""], [b"", b""], [b"", b"", b""], [b"x"] * 2, [b"x"] * 1000, [bytes(1 << 24)]),
        *([DELIM], [DELIM, b""], [DELIM] * 7, [DELIM, b"", b"{}"], [b"", DELIM, b"\xff"]),
        [DELIM, b"0" * 64, b'{"msg_id": "1", "msg_type": "execute_request"}', *[b"{}"] * 3],
        [DELIM, "\u0661".encode() * 64, *[b"\xff\xfe"] * 4],
    ]
    return [*unsigned, *signed[1:], [*signed[0][:1], b"0" * 64, *signed[0][2:]]]


def test_invalid_message_does_not_end_a_kernel(kernel: TcpKernel) -> None:
    """After invalid messages on each channel, cells run in the same process."""
    before = kernel.run(PRINT_PID).stdout
    with zmq.Context() as context:
        for channel in CHANNELS:
            kind = zmq.SUB if channel == "iopub" else zmq.DEALER
            with context.socket(kind) as client:
                client.connect(f"tcp://127.0.0.1:{kernel.port(channel)}")
                if channel == "iopub":
                    client.subscribe(b"x" * 100_000)
                    continue
                for frames in invalid_messages(kernel.client.session):
                    client.send_multipart(frames)
                client.linger = -1
    check_heartbeat(kernel)
    assert kernel.run(PRINT_PID).stdout == before
    assert kernel.process.poll() is None


# Connects to each port, and prints the number of bytes that arrive: 0 if it is refused.
CONNECT = """
import socket, sys
for port in sys.argv[1:]:
    with socket.create_connection(("127.0.0.1", int(port)), 60) as connection:
        try:
            print(len(connection.recv(1)))
        except ConnectionError:
            print(0)
"""


def run_as_nobody(machine: Machine, *argv: str) -> str:
    """Run a command as another user, and return its output."""
    if os.geteuid():
        pytest.skip("needs root, to become another user")
    try:
        done = subprocess.run(
            [*NOBODY, *argv], env=machine.environ(), cwd="/", capture_output=True, text=True,
            check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no other user can run this Python: {error}")
    return done.stdout


def test_other_user_is_refused_on_each_port(machine: Machine, kernel: TcpKernel) -> None:
    """A kernel with TCP ports sends nothing to another user's process."""
    ports = [str(kernel.port(channel)) for channel in CHANNELS]
    command = (sys.executable, "-c", CONNECT, *ports)
    assert run_as_nobody(machine, *command).split() == ["0"] * 5
    own = subprocess.run(command, capture_output=True, text=True, check=True)
    assert own.stdout.split() == ["1"] * 5
    assert kernel.run(PRINT_42).stdout == "42\n"


def test_relay_keeps_its_folder(machine: Machine) -> None:
    """A connection reaches the relay even if another folder has the name of its folder."""
    with (
        tempfile.TemporaryDirectory() as temporary,  # the path of a socket has to be short
        closing(TcpKernel(machine, TMPDIR=temporary)) as kernel,
    ):
        (path,) = Path(temporary).glob(f"*/kernel-{kernel.port('hb')}")
        path.parent.rename(Path(temporary, "moved"))
        path.parent.mkdir()
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(str(path))
            other.listen()
            check_heartbeat(kernel)


# -- without a port --------------------------------------------------------------------------------


def test_provisioner_opens_no_port(machine: Machine) -> None:
    """With the provisioner, the sockets are files in a private folder.

    A restart keeps the folder, and a shutdown removes it.
    """
    with closing(ProvisionedKernel(machine)) as kernel:
        assert kernel.run(PRINT_42).stdout == "42\n"
        connection = json.loads(Path(kernel.manager.connection_file).read_text())
        assert connection["transport"] == "ipc"
        folder = Path(connection["ip"]).parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert len([*folder.iterdir()]) == 5
        kernel.restart()
        assert kernel.run(PRINT_42).stdout == "42\n"
        assert json.loads(Path(kernel.manager.connection_file).read_text()) == connection
    assert not folder.exists()


def test_restarted_kernel_has_a_new_folder(machine: Machine) -> None:
    """A kernel that restarts after a crash does not use a folder with its earlier name."""
    folder = "import ipykernel.connect as it, os; print(os.path.dirname(it.get_connection_file()))"
    with closing(ProvisionedKernel(machine)) as kernel:
        before = Path(kernel.run(folder).stdout.strip())
        kernel.start("import os; os._exit(3)")
        wait_for(lambda: not kernel.manager.is_alive(), 0.05)
        shutil.rmtree(before, ignore_errors=True)
        before.mkdir(0o777)
        try:
            kernel.restart()
            assert kernel.run(PRINT_42).stdout == "42\n"
            assert not [*before.iterdir()]
        finally:
            shutil.rmtree(before)


START_KERNEL = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from tests.support.machine import Machine
from tests.support.slurm_kernels import ProvisionedKernel
kernel = ProvisionedKernel(Machine(Path.cwd()))
"""


@pytest.mark.full
def test_killed_client_leaves_no_folder(machine: Machine) -> None:
    """If the client is killed with SIGKILL, the relay removes the folder of its sockets."""
    with machine.child() as client:
        started = client.run(START_KERNEL)
        assert started.error is None, started
        folder = Path(client.run("kernel.manager.ip").value).parent
        relay = client.run("int(kernel.manager.provisioner.pid)").value
        assert folder.is_dir()
        client.kill()
    wait_for(lambda: not is_running(relay), 0.05)
    assert not folder.exists()
