"""Kernels on hosts with a free GPU: real servers, kernels and SSH tunnels."""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.hosts import Hosts, needs_ssh
from tests.support.machine import LIMIT_S
from tests.support.processes import wait_for

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator

    from tests.support.machine import Child

pytest.importorskip("sshpyk")

pytestmark = [
    pytest.mark.needs("hosts"),
    needs_ssh,
    pytest.mark.xdist_group("hosts"),
]

NOTEBOOK = "/home/alice/my thesis/train it's.ipynb"
# A client of Jupyter, in another process.
CLIENT = '''
import os, threading, time
from jupyter_client.manager import KernelManager

def start(name):
    """Start a kernel; return the error, or None."""
    global manager, client
    manager = KernelManager(kernel_name=name)
    try:
        manager.start_kernel()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    client = manager.blocking_client()
    client.start_channels()
    client.wait_for_ready(timeout=200)

def run(code):
    """Run a cell; return its output and the name of its error."""
    output = []
    def hear(message):
        content = message["content"]
        if message["msg_type"] in ("stream", "error"):
            output.append(content.get("text") or content["ename"])
    client.execute_interactive(code, output_hook=hear, timeout=200)
    return "".join(output)

def where():
    """Return the kernel's home, whose path contains the host, its pid, and its visible GPUs."""
    return run("import os; print(os.environ['HOME'], os.getpid(), "
               "os.environ['CUDA_VISIBLE_DEVICES'])").split()

def restart():
    manager.restart_kernel()
    client.wait_for_ready(timeout=200)

def interrupted():
    """Interrupt a running cell; return its error."""
    def hear(message):
        if message["msg_type"] == "stream":
            manager.interrupt_kernel()
    code = "import time; print('here', flush=True); time.sleep(60)"
    reply = client.execute_interactive(code, output_hook=hear, timeout=200)
    return reply["content"].get("ename")

def shut_down():
    client.stop_channels()
    manager.shutdown_kernel()
'''


class Lab:
    """Hosts with the GPU kernel, and a user's machine with kernels for the hosts."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self.machines = hosts.machines
        for machine in self.machines.values():
            done = machine.command(sys.executable, "-m", "reserve_gpu", "kernel", "install")
            assert done.returncode == 0, done.stderr

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.hosts.asking.command(sys.executable, "-m", "reserve_gpu", *words)

    def install(self, *words: str) -> str:
        """Install a kernel on the user's machine, and return its name."""
        done = self.command("kernel", "install", *words)
        assert done.returncode == 0, done.stderr
        return done.stdout.partition(" as ")[2].partition(",")[0]

    @contextmanager
    def client(self) -> Iterator[Child]:
        """Start a process that starts kernels, and kill it at the end."""
        with self.hosts.asking.child(JPY_SESSION_NAME=NOTEBOOK) as client:
            assert not client.run(CLIENT).error
            yield client

    def name_of(self, home: str) -> str:
        """Return the name of the host with this home."""
        return Path(home).parent.name

    def rows(self, name: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._status(name)["devices"]
        return found

    def waiting(self, name: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._status(name)["waiting"]
        return found

    def states(self) -> list[str]:
        return [row["state"] for name in self.machines for row in self.rows(name)]

    def _status(self, name: str) -> dict[str, Any]:
        done = self.machines[name].command(sys.executable, "-m", "reserve_gpu", "status", "--json")
        status: dict[str, Any] = json.loads(done.stdout)
        return status

    @contextmanager
    def full(self, *names: str) -> Iterator[list[Child]]:
        """Reserve all GPUs of these hosts."""
        with ExitStack() as stack:
            children = [stack.enter_context(self.machines[name].child()) for name in names]
            for child in children:
                assert not child.reserve("count=2").error
            yield children

    def end(self) -> None:
        """End all reservations on the hosts."""
        for machine in self.machines.values():
            machine.command(sys.executable, "-m", "reserve_gpu", "release", "--all", "--end")
        wait_for(lambda: {"free"} == {*self.states()})


@pytest.fixture(scope="module")
def all_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Hosts(tmp_path_factory.mktemp("kernels"), "lab1", "lab2") as hosts:
        yield Lab(hosts)


@pytest.fixture
def lab(all_hosts: Lab) -> Iterator[Lab]:
    yield all_hosts
    all_hosts.end()


def start_kernel(client: Child, kernel: str) -> list[str]:
    """Start a kernel; return the host's home, the kernel's pid and its GPUs."""
    answer = client.run(f"start({kernel!r})")
    assert (answer.value, answer.error) == (None, None), answer
    where: list[str] = client.run("where()").value
    return where


def test_kernel_from_start_to_end(lab: Lab) -> None:
    """A kernel gets the free GPU, keeps it over a restart, and frees it when it ends."""
    kernel = lab.install("--hosts", "lab1", "lab2")
    with lab.full("lab1"), lab.machines["lab2"].child() as other, lab.client() as client:
        assert other.reserve().value == "0"
        home, pid, visible = start_kernel(client, kernel)
        assert (lab.name_of(home), visible) == ("lab2", "1")
        (holder,) = lab.rows("lab2")[1]["holders"]
        assert holder["pid"] == int(pid)
        assert holder["notebook"] == os.path.basename(NOTEBOOK)
        assert holder["origin"] == os.uname().nodename
        assert (holder["idle_s"], holder["if_wanted"]) == (7200, True)
        with lab.machines["lab2"].child() as waiter:
            waiter.send("reserve_gpu.reserve(wait='60s').environ['CUDA_VISIBLE_DEVICES']")
            wait_for(lambda: bool(lab.waiting("lab2")))
            assert not client.run("restart()").error
            after = client.run("where()").value
            assert (after[0], after[2]) == (home, "1")
            assert after[1] != pid
            assert client.run("interrupted()").value == "KeyboardInterrupt"
            assert not client.run("shut_down()").error
            assert waiter.answer().value == "1"


def test_no_free_gpu(lab: Lab) -> None:
    """If no host has a free GPU, the error has the reason of each host."""
    kernel = lab.install("--hosts", "lab1", "lab2", "nowhere")
    with lab.full("lab1", "lab2"), lab.client() as client:
        text = client.run(f"start({kernel!r})").value
    first, *lines = text.splitlines()
    assert first.startswith("NoHostError: ")
    assert lines[0].startswith("lab1, lab2: None of 2 GPUs is free")
    assert lines[1].startswith("nowhere: ssh can't connect: ")


def test_too_small_gpus(lab: Lab) -> None:
    """If a host's free GPUs are too small, the error says so."""
    kernel = lab.install("--hosts", "lab1", "--min-memory", "80GiB", "--name", "large")
    with lab.client() as client:
        text = client.run(f"start({kernel!r})").value
    first, line = text.splitlines()
    assert "80.0 GiB or more" in first
    assert line.startswith("lab1: Both GPUs are free, but")


def test_wait_on_all_hosts(lab: Lab) -> None:
    """With --wait, a kernel waits in the queue of each host, and takes the first free GPU."""
    kernel = lab.install("--hosts", "lab1", "lab2", "--wait", "45s", "--name", "waits")
    with lab.full("lab1") as _, lab.full("lab2") as (second,), lab.client() as client:
        client.send(f"start({kernel!r})")
        wait_for(lambda: bool(lab.waiting("lab1") and lab.waiting("lab2")))
        second.run("reserve_gpu.release()")
        assert client.answer().value is None
        home, _, visible = client.run("where()").value
        assert (lab.name_of(home), visible) == ("lab2", "0")
        wait_for(lambda: not lab.waiting("lab1"))
        client.run("shut_down()")


def test_kernel_without_a_gpu(lab: Lab) -> None:
    """A kernel that started without a GPU is ended, and the next host is tried."""
    place = lab.machines["lab1"].home / ".local/share/jupyter/kernels/python3-gpu"
    spec = json.loads((place / "kernel.json").read_text())
    plain = {**spec, "argv": spec["argv"][spec["argv"].index("--") + 1 :]}
    (place / "kernel.json").write_text(json.dumps(plain))
    kernel = lab.install("--hosts", "lab1", "lab2", "--name", "two-hosts")
    try:
        with lab.machines["lab2"].child() as other, lab.client() as client:
            other.reserve()  # so lab1 is tried first
            home, _, _ = start_kernel(client, kernel)
            assert lab.name_of(home) == "lab2"
            client.run("shut_down()")
    finally:
        (place / "kernel.json").write_text(json.dumps(spec))


def test_restart_after_a_crash(lab: Lab) -> None:
    """After a crash and a new start, a kernel can be restarted and shut down."""
    kernel = lab.install("--hosts", "lab1")
    with lab.client() as client:
        _, pid, _ = start_kernel(client, kernel)
        os.kill(int(pid), signal.SIGKILL)
        # Like Jupyter's restarter.
        assert not client.run("manager.restart_kernel(now=True); client.wait_for_ready(60)").error
        assert not client.run("restart()").error
        assert client.run("where()").value[2] == "0"
        assert not client.run("shut_down()").error
        wait_for(lambda: {*lab.states()} == {"free"})


@contextmanager
def ssh_runs_first(lab: Lab, words: str, what: str) -> Iterator[None]:
    """Make ssh run a command first, once, if its arguments contain the words."""
    wrapper = lab.hosts.asking.folder.parent / "bin" / "ssh"
    once = lab.hosts.asking.folder / "once"
    before = wrapper.read_text()
    does = f'case "$*" in *"{words}"*) [ -e {once} ] || {{ touch {once}; {what}; }};; esac\n'
    wrapper.write_text(before.replace("\n", f"\n{does}", 1))
    try:
        yield
        assert once.exists()
    finally:
        wrapper.write_text(before)
        once.unlink(missing_ok=True)


def test_lost_answer(lab: Lab) -> None:
    """A kernel counts as alive although ssh fails once."""
    kernel = lab.install("--hosts", "lab1")
    with lab.client() as client:
        _, pid, _ = start_kernel(client, kernel)
        with ssh_runs_first(lab, "ps -p", "exit 1"):
            assert client.run("manager.is_alive()").value is True
        assert client.run("where()").value[1] == pid
        client.run("shut_down()")


def test_slow_host_is_asked_again(lab: Lab) -> None:
    """A host whose first answer is late is asked again if no other host has a GPU."""
    kernel = lab.install("--hosts", "lab1", "lab2", "--name", "two-hosts")
    with (
        lab.full("lab2"),
        lab.client() as client,
        ssh_runs_first(lab, "lab1 reserve-gpu status", f"exec sleep {LIMIT_S}"),
    ):
        home, _, _ = start_kernel(client, kernel)
        assert lab.name_of(home) == "lab1"
        client.run("shut_down()")


def test_host_without_the_kernel(lab: Lab) -> None:
    """The error shows the command that installs the kernel on a host."""
    place = lab.machines["lab1"].home / ".local/share/jupyter/kernels/python3-gpu"
    aside = place.with_name("aside")
    place.rename(aside)
    kernel = lab.install("--hosts", "lab1")
    try:
        with lab.client() as client:
            text = client.run(f"start({kernel!r})").value
    finally:
        aside.rename(place)
    assert "lab1: the kernel python3-gpu is not installed" in text
    assert "reserve-gpu kernel install" in text


def test_ssh_without_shared_connections(lab: Lab) -> None:
    """If ssh is not configured to share connections, the error shows the option."""
    kernel = lab.install("--hosts", "lab1")
    before = lab.hosts.config.read_text()
    lab.hosts.config.write_text(before.replace("ControlMaster auto", "ControlMaster no"))
    try:
        with lab.client() as client:
            text = client.run(f"start({kernel!r})").value
    finally:
        lab.hosts.config.write_text(before)
    assert "lab1: sshpyk needs an ssh connection that stays open" in text
    assert "ControlMaster auto" in text


def test_client_without_provisioners(lab: Lab, tmp_path: Path) -> None:
    """The command of the kernelspec also starts a kernel, as in VS Code."""
    kernel = lab.install("--hosts", "lab1")
    folder = lab.hosts.asking.home / ".local/share/jupyter/kernels" / kernel
    argv = json.loads((folder / "kernel.json").read_text())["argv"]
    code = f"""
from jupyter_client.connect import write_connection_file
from jupyter_client.blocking.client import BlockingKernelClient
import subprocess
file, _ = write_connection_file({str(tmp_path / "kernel.json")!r}, key=b"secret")
argv = [word.replace("{{connection_file}}", file) for word in {argv!r}]
program = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
client = BlockingKernelClient(connection_file=file)
client.load_connection_file()
client.start_channels()
until = time.monotonic() + 60
while True:
    try:
        client.wait_for_ready(timeout=60)
        break
    except RuntimeError:  # the kernel does not listen yet
        assert time.monotonic() < until
        time.sleep(0.2)
where()
"""
    with lab.client() as client:
        answer = client.run(code)
        assert not answer.error, answer
        home, _, visible = answer.value
        assert (lab.name_of(home), visible) == ("lab1", "0")
        assert lab.rows("lab1")[0]["state"] == "reserved"
        client.run("program.terminate(); program.wait(60)")
        wait_for(lambda: {*lab.states()} == {"free"})
