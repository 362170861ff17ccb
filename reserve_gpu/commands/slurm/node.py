"""The `kernel node` command: run the kernel in the job, and relay its messages."""

from __future__ import annotations

import asyncio
import os
from contextlib import ExitStack
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager

from reserve_gpu.commands.output import Output, print_stderr
from reserve_gpu.commands.slurm import framing, sockets
from reserve_gpu.system import procfs, settings, spawn

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from typing import Any

STDIN, STDOUT, STDERR = 0, 1, 2
SILENCE_S = 20.0  # timeout for a single read from the relay, in seconds
SILENCE_LIMIT = 3  # number of consecutive timeouts after which the node exits
POLL_S = 0.1  # seconds between checks of a running kernel


class Node:
    """Runs one kernel at a time, when the relay requests it.

    A job can run several kernels one after another, because the job survives kernel restarts.
    """

    def __init__(self, out: asyncio.StreamWriter) -> None:
        """Create a node that has no kernel yet.

        Args:
            out: The stream to the relay.
        """
        self._out = out
        self._sockets: dict[str, Any] = {}
        self._kernel_task: asyncio.Task[None] | None = None

    @property
    def has_begun(self) -> bool:
        """Return whether a relay has requested a kernel."""
        return self._kernel_task is not None

    async def send(self, kind: str, *frames: bytes) -> None:
        """Send a message to the relay."""
        self._out.write(framing.line(kind, *frames))
        await self._out.drain()

    async def handle(self, kind: str, frames: list[bytes]) -> None:
        """Handle a message from the relay: start a kernel, or pass the message on to the kernel.

        Raises:
            OSError: The folder for the kernel's sockets can't be created.
        """
        if kind == "start":
            await self.end()
            # Each kernel gets a new folder. If a folder were reused after a /tmp cleaner had
            # removed it, another user could have recreated it and put a connection file there.
            folder = TemporaryDirectory(
                prefix=sockets.PREFIX, dir=sockets.socket_root(), ignore_cleanup_errors=True
            )
            self._kernel_task = asyncio.ensure_future(self._run_kernel(folder, *frames))
        elif socket := self._sockets.get(kind):
            await socket.send_multipart(frames)

    async def end(self) -> None:
        """Shut down the kernel, if there is one."""
        if self._kernel_task:
            self._kernel_task.cancel()
            await asyncio.wait([self._kernel_task])

    async def _run_kernel(
        self, folder: TemporaryDirectory[str], name: bytes, key: bytes, scheme: bytes, *words: bytes
    ) -> None:
        """Start a kernel, and relay its messages until it exits or this task is canceled.

        Args:
            folder: The folder for the kernel's sockets and connection file.
            name: The name by which the relay identifies this kernel.
            key: The key that signs the kernel's messages.
            scheme: The signature scheme.
            words: The command that starts the kernel.
        """
        with folder as path, ExitStack() as opened:
            manager = _manager(path, [word.decode() for word in words])
            manager.session.key, manager.session.signature_scheme = key, scheme.decode()
            relays = list[asyncio.Future[None]]()
            try:
                mark = f"{settings.STARTED_BY}{procfs.stamp(os.getpid())}"
                await manager.start_kernel(env={**os.environ, settings.JOB_KERNEL: mark})
                client = manager.client()
                # Channels reconnect by path, so they must be closed before the folder is removed.
                opened.callback(client.stop_channels)
                client.start_channels(hb=False)
                await client.wait_for_ready()
                for each in ("shell", "control", "stdin", "iopub"):
                    self._sockets[each] = getattr(client, f"{each}_channel").socket
                await self.send("started", name)
                relays += [asyncio.ensure_future(self._relay(each)) for each in self._sockets]
                while await manager.is_alive():  # noqa: ASYNC110 - no event signals a kernel exit
                    await asyncio.sleep(POLL_S)
                await self.send("ended", name)
            except Exception as error:  # noqa: BLE001 - the client shows every error
                await self.send("failed", f"the kernel can't be started: {error}".encode())
            finally:
                for relay in relays:
                    relay.cancel()
                self._sockets.clear()
                await manager.shutdown_kernel(now=True)

    async def _relay(self, channel: str) -> None:
        while True:
            await self.send(channel, *await self._sockets[channel].recv_multipart())


def _manager(folder: str, words: list[str]) -> AsyncKernelManager:
    """Return a manager for a kernel that listens only on sockets in a private folder."""

    class Specs(KernelSpecManager):
        def get_kernel_spec(self, kernel_name: str) -> KernelSpec:  # noqa: ARG002
            return KernelSpec(argv=words, language="python")

    return AsyncKernelManager(
        transport="ipc", ip=f"{folder}/kernel", connection_file=f"{folder}/kernel.json",
        kernel_spec_manager=Specs(),
    )  # fmt: skip


async def _serve(out: int) -> None:
    """Handle messages until the relay closes its stream or is silent for too long."""
    relay, stream = await framing.reader(STDIN), await framing.writer(out)
    job, name = (os.environ.get(f"SLURM{each}", "?") for each in ("_JOB_ID", "D_NODENAME"))
    stream.write(framing.line("job", job.encode(), name.encode()))
    try:
        node = Node(stream)
        # A single timeout proves nothing, because suspending and resuming a job also causes one.
        timeouts = 0
        while timeouts < SILENCE_LIMIT:
            try:
                text = await asyncio.wait_for(relay.readline(), SILENCE_S)
            except asyncio.TimeoutError:
                timeouts += 1
                continue
            except ValueError:  # the line exceeds the length limit
                continue
            if not text:
                break
            timeouts = 0
            try:
                await node.handle(*framing.parsed(text))
            except OSError:
                raise
            except Exception as error:  # noqa: BLE001 - drop one message, not the job
                print_stderr(f"Warning: a message for the kernel was dropped: {error!r}")
        await node.end()
        if timeouts and node.has_begun:  # srun was killed, so it can't end the job
            await (await asyncio.create_subprocess_exec(spawn.program("scancel"), job)).wait()
    except OSError as error:
        stream.write(framing.line("failed", f"{name}: {error}".encode()))
        await stream.drain()


def add_arguments(_parser: ArgumentParser) -> None:
    """Do nothing, because `kernel node` takes no arguments."""


def run(_arguments: Namespace) -> Output:
    """Run kernels for the relay until the relay exits.

    Only a job's first task runs kernels.
    """
    if os.environ.get("SLURM_PROCID", "0") != "0":
        return Output()
    # srun's stdout carries messages, so this process's other output goes to stderr.
    out = os.dup(STDOUT)
    os.dup2(STDERR, STDOUT)
    asyncio.run(_serve(out))
    return Output()
