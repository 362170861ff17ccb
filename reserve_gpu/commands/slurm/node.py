"""In the job: starts the kernel, and passes its messages to srun's streams."""

from __future__ import annotations

import asyncio
import os
from contextlib import ExitStack
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager

from reserve_gpu.commands.output import Output
from reserve_gpu.commands.run import reporter
from reserve_gpu.commands.slurm import framing, sockets
from reserve_gpu.system import procfs, settings, spawn

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from typing import Any

STDIN, STDOUT, STDERR = 0, 1, 2
QUIET_S, MOST_QUIET = 20.0, 3  # so often nothing is heard from the relay before this ends
POLL_S = 0.1


class Node:
    """Runs one kernel after another."""

    def __init__(self, out: asyncio.StreamWriter) -> None:
        self._out = out
        self._sockets: dict[str, Any] = {}
        self._life: asyncio.Task[None] | None = None

    @property
    def has_begun(self) -> bool:
        """Tell whether a relay has asked for a kernel."""
        return self._life is not None

    async def say(self, kind: str, *frames: bytes) -> None:
        """Tell the relay."""
        self._out.write(framing.line(kind, *frames))
        await self._out.drain()

    async def do(self, kind: str, frames: list[bytes]) -> None:
        """Do what the relay says. Raises OSError if a kernel's folder can't be made."""
        if kind == "start":
            await self.end()
            # Each kernel has a new folder. If a cleaner of /tmp removed the old one, another user
            # could take its name, and the kernel would obey that user's connection file.
            folder = TemporaryDirectory(
                prefix=sockets.PREFIX, dir=sockets.place(), ignore_cleanup_errors=True
            )
            self._life = asyncio.ensure_future(self._live(folder, *frames))
        elif socket := self._sockets.get(kind):
            await socket.send_multipart(frames)

    async def end(self) -> None:
        """End the kernel, if there is one."""
        if self._life:
            self._life.cancel()
            await asyncio.wait([self._life])

    async def _live(
        self, folder: TemporaryDirectory[str], name: bytes, key: bytes, scheme: bytes, *words: bytes
    ) -> None:
        """Start a kernel, and go on until it is no longer wanted. name: tells it from another."""
        with folder as path, ExitStack() as opened:
            manager = _manager(path, [word.decode() for word in words])
            manager.session.key, manager.session.signature_scheme = key, scheme.decode()
            relays = list[asyncio.Future[None]]()
            try:
                mark = f"{settings.STARTED_BY}{procfs.stamp(os.getpid())}"
                await manager.start_kernel(env={**os.environ, settings.JOB_KERNEL: mark})
                client = manager.client()
                opened.callback(client.stop_channels)  # they would reconnect by name
                client.start_channels(hb=False)
                await client.wait_for_ready()
                for each in ("shell", "control", "stdin", "iopub"):
                    self._sockets[each] = getattr(client, f"{each}_channel").socket
                await self.say("started", name)
                relays += [asyncio.ensure_future(self._relay(each)) for each in self._sockets]
                while await manager.is_alive():  # noqa: ASYNC110 - nothing tells of its end
                    await asyncio.sleep(POLL_S)
                await self.say("ended", name)
            except Exception as error:  # noqa: BLE001 - the client reads why, whatever it is
                await self.say("failed", f"the kernel could not be started: {error}".encode())
            finally:
                for relay in relays:
                    relay.cancel()
                self._sockets.clear()
                await manager.shutdown_kernel(now=True)

    async def _relay(self, channel: str) -> None:
        while True:
            await self.say(channel, *await self._sockets[channel].recv_multipart())


def _manager(folder: str, words: list[str]) -> AsyncKernelManager:
    """Return the manager of a kernel that is reached by this user's files alone."""

    class Specs(KernelSpecManager):
        def get_kernel_spec(self, kernel_name: str) -> KernelSpec:  # noqa: ARG002
            return KernelSpec(argv=words, language="python")

    return AsyncKernelManager(
        transport="ipc", ip=f"{folder}/kernel", connection_file=f"{folder}/kernel.json",
        kernel_spec_manager=Specs(),
    )  # fmt: skip


async def _serve(out: int) -> None:
    told, stream = await framing.reader(STDIN), await framing.writer(out)
    job, name = (os.environ.get(f"SLURM{each}", "?") for each in ("_JOB_ID", "D_NODENAME"))
    stream.write(framing.line("job", job.encode(), name.encode()))
    try:
        node = Node(stream)
        quiet = 0  # a count, as a job that was suspended has heard nothing for long either
        while quiet < MOST_QUIET:
            try:
                text = await asyncio.wait_for(told.readline(), QUIET_S)
            except asyncio.TimeoutError:
                quiet += 1
                continue
            except ValueError:  # no line is so long
                continue
            if not text:
                break
            quiet = 0
            try:
                await node.do(*framing.parsed(text))
            except OSError:
                raise
            except Exception as error:  # noqa: BLE001 - one message, and not the job, is lost
                reporter.say(f"Warning: a message for the kernel was dropped: {error!r}")
        await node.end()
        if quiet and node.has_begun:  # srun has been killed, and so would not end the job
            await (await asyncio.create_subprocess_exec(spawn.program("scancel"), job)).wait()
    except OSError as error:
        stream.write(framing.line("failed", f"{name}: {error}".encode()))
        await stream.drain()


def add_arguments(_parser: ArgumentParser) -> None:
    """Add nothing: it has no arguments."""


def run(_arguments: Namespace) -> Output:
    """Serve until srun's stdin ends. What else is printed here goes to srun's stderr."""
    if os.environ.get("SLURM_PROCID", "0") != "0":  # one of several tasks is the kernel
        return Output()
    out = os.dup(STDOUT)
    os.dup2(STDERR, STDOUT)
    asyncio.run(_serve(out))
    return Output()
