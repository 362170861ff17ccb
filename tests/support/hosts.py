"""Several simulated machines, each with its own SSH server on a loopback address."""

from __future__ import annotations

import os
import pwd
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.support.engines import host
from tests.support.machine import LIMIT_S, Machine, program

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from typing_extensions import Self

SSH = program("ssh")
SCP = program("scp")
SSHD = program("sshd")
KEYGEN = program("ssh-keygen")
SFTP = shutil.which("sftp-server", path="/usr/lib/openssh:/usr/libexec/openssh:/usr/lib/ssh")
USER = pwd.getpwuid(os.getuid()).pw_name
SEPARATION = Path("/run/sshd")  # required by a server that root starts

needs_ssh = pytest.mark.skipif(
    not (SSH and SSHD and KEYGEN), reason="needs OpenSSH's client and server"
)

# Variables of the machine's environment in an SSH session, as names or prefixes.
SENT = (
    *("HOME", "IPYTHONDIR", "LANG", "LD_", "NO_COLOR", "PATH", "PYTHONPATH"),
    *("RESERVE_GPU_", "STAND_IN_", "TERM", "TMPDIR"),
)

SERVER = """\
ListenAddress {address}:{port}
HostKey {key}
AuthorizedKeysFile {key}.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
MaxStartups 200
MaxSessions 200
SetEnv {environ}
Subsystem sftp {sftp}
ForceCommand cd; eval "${{SSH_ORIGINAL_COMMAND:-exec $SHELL}}"
"""  # a session starts in its machine's home, not in that of the password database
CLIENT = """\
Host {name}
    Hostname {address}
    Port {port}
    User {user}
    IdentityFile {key}
    IdentitiesOnly yes
    UserKnownHostsFile {known}
    StrictHostKeyChecking yes
    LogLevel ERROR
    ControlMaster auto
    ControlPath {sockets}/%n
    ControlPersist 60
"""


class Asking(Machine):
    """The client machine, whose `ssh` has a configuration with the hosts.

    OpenSSH does not look for a user's configuration in HOME, but in the password database's home.
    """

    def __init__(self, folder: Path, programs: Path) -> None:
        folder.mkdir()
        super().__init__(folder)
        self._programs = programs

    def environ(self, **extra: str) -> dict[str, str]:
        environ = super().environ(**extra)
        return environ | {"PATH": f"{self._programs}{os.pathsep}{environ['PATH']}"}


class Hosts:
    """Several machines, each with an sshd on a loopback address, as a context manager.

    Args:
        folder: The folder for all files.
        names: The names of the hosts.
        gpus: The number of GPUs per host, which have different UUIDs on each host.
        paths: The PATH of some hosts; by default, it contains this package's program.
    """

    def __init__(
        self, folder: Path, *names: str, gpus: int = 2, paths: Mapping[str, str] | None = None
    ) -> None:
        self._paths = dict(paths or {})
        self.machines: dict[str, Machine] = {
            name: host(folder / name, number, gpus) for number, name in enumerate(names)
        }
        self.addresses = {name: f"127.0.0.{number}" for number, name in enumerate(names, 2)}
        self.ports = {name: free_port(address) for name, address in self.addresses.items()}
        self._programs = folder / "bin"
        self.asking = Asking(folder / "asking", self._programs)
        self.config = self.asking.home / ".ssh" / "config"  # where asyncssh looks for it
        self.key = folder / "key"  # of all servers and of the client
        self._servers: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        self._sockets = tempfile.mkdtemp(
            prefix="ssh"
        )  # short, because a socket's path has at most 104 characters
        generate = [str(KEYGEN), "-q", "-t", "ed25519", "-N", "", "-f", str(self.key)]
        subprocess.run(generate, check=True)
        self._write_client()
        if os.getuid() == 0:
            SEPARATION.mkdir(exist_ok=True)
        try:
            for name in self.machines:
                self.start(name)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def environ(self, **extra: str) -> dict[str, str]:
        """Return the environment of a process on the client machine."""
        return self.asking.environ(**extra)

    def run(self, name: str, command: str) -> subprocess.CompletedProcess[str]:
        """Run a command on a host and return its result."""
        return subprocess.run(
            ["ssh", name, command], env=self.environ(), text=True, capture_output=True,
            timeout=LIMIT_S, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def start(self, name: str) -> None:
        """Start the server of a host, and wait until it listens."""
        folder = self.machines[name].folder
        config = folder / "sshd_config"
        address, port = self.addresses[name], self.ports[name]
        config.write_text(
            SERVER.format(
                address=address, port=port, key=self.key, environ=self._sent(name), sftp=SFTP
            )
        )
        with (folder / "sshd.log").open("ab") as log:
            self._servers[name] = server = subprocess.Popen(
                [*named(name), str(SSHD), "-D", "-e", "-f", str(config)],
                stdin=subprocess.DEVNULL,
                stderr=log,
            )
        deadline = time.monotonic() + LIMIT_S
        while not listens(address, port):
            told = (folder / "sshd.log").read_text()
            assert server.poll() is None, f"the server of {name} ended: {told}"
            assert time.monotonic() < deadline, told
            time.sleep(0.01)

    def freeze(self, name: str) -> None:
        """Stop all processes of a host, which then accepts connections without answering."""
        for process in self.processes(name):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGSTOP)

    def kill(self, name: str) -> None:
        """Kill all processes of a host and its server, and wait until they have ended."""
        while processes := list(self.processes(name)):
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            self._servers[name].poll()
            time.sleep(0.01)

    def close(self) -> None:
        """Close the persistent connections, and kill the hosts."""
        for name in self._servers:
            if os.path.exists(f"{self._sockets}/{name}"):
                leave = [str(SSH), "-F", str(self.config), "-O", "exit", name]
                subprocess.run(leave, check=False, stderr=subprocess.DEVNULL, timeout=LIMIT_S)
            self.kill(name)
        shutil.rmtree(self._sockets)

    def _write_client(self) -> None:
        """Create the SSH configuration and programs of the client."""
        self.config.parent.mkdir()
        known = self.config.with_name("known_hosts")
        key = self.key.with_suffix(".pub").read_text()
        for name, address in self.addresses.items():
            port = self.ports[name]
            with self.config.open("a") as config, known.open("a") as keys:
                config.write(
                    CLIENT.format(
                        name=name, address=address, port=port, user=USER, key=self.key,
                        known=known, sockets=self._sockets,
                    )
                )  # fmt: skip
                keys.write(f"[{address}]:{port} {key}")
        self._programs.mkdir()
        for path in (SSH, SCP):
            wrapper = self._programs / os.path.basename(str(path))
            words = shlex.join(["exec", str(path), "-F", str(self.config)])
            wrapper.write_text(f'#!/bin/sh\n{words} "$@"\n')
            wrapper.chmod(0o755)

    def _sent(self, name: str) -> str:
        """Return the environment of a host's sessions, in the format of SetEnv."""
        environ = self.machines[name].environ()
        usual = f"{os.path.dirname(sys.executable)}{os.pathsep}{environ['PATH']}"
        environ["PATH"] = self._paths.get(name, usual)
        return " ".join(f'"{k}={v}"' for k, v in environ.items() if k.startswith(SENT))

    def processes(self, name: str) -> Iterator[psutil.Process]:
        """Yield the processes of a host: its server, the children, and processes they left."""
        server = self._servers[name]
        if server.poll() is None:
            root = psutil.Process(server.pid)
            yield from (root, *root.children(recursive=True))
        scenario = str(self.machines[name].scenario)
        for process in psutil.process_iter():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # such as a zombie
                if process.environ().get("STAND_IN_SCENARIO") == scenario:
                    yield process


def named(name: str) -> list[str]:
    """Return the prefix of a command that runs with this host name, if this user is root."""
    words = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', name]
    return words if os.getuid() == 0 else []


def free_port(address: str) -> int:
    """Return a free TCP port of an address."""
    with socket.socket() as free:
        free.bind((address, 0))
        port: int = free.getsockname()[1]
        return port


def listens(address: str, port: int) -> bool:
    """Return whether a process listens on a port."""
    with socket.socket() as client:
        return client.connect_ex((address, port)) == 0
