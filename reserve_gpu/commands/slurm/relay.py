"""Beside the client: a kernel for it, which is the one in the job once that runs.

Before that, and after, this answers itself: it says why the job waits, or why there is none.
https://jupyter-client.readthedocs.io/en/stable/messaging.html
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from contextlib import contextmanager, suppress
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import zmq
import zmq.asyncio
from ipykernel.ipkernel import IPythonKernel
from ipykernel.kernelspec import get_kernel_dict
from jupyter_client.session import DELIM, Session

from reserve_gpu import request_options
from reserve_gpu.commands.output import Output
from reserve_gpu.commands.run import command, reporter
from reserve_gpu.commands.slurm import framing, sockets, srun
from reserve_gpu.model.errors import REASON_LIMIT, RequestError, own_line
from reserve_gpu.model.option import Option, add
from reserve_gpu.model.untrusted import sanitize
from reserve_gpu.system import procfs

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Iterator

ASKED = ("shell", "control", "stdin")  # the channels on which a client sends
SAYS = r"(?:\S*srun|slurmstepd\S*): (?:error: |fatal: |(?=unrecognized))(.*)"
NO_JOB = "Slurm starts no job: {}. Restart the kernel to try again, or install it anew."
ENDED = "The job has ended: {}. Restart the kernel for another one."
CELL = "execute_request"
PARENT = 3  # the place behind DELIM of the header that a message answers
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 60.0  # between two questions why the job waits
BEAT_S = 2.0  # between two looks whether the client is there
LAST_MS = 1000  # for what is sent last to arrive
INFO = {
    "status": "ok",
    "protocol_version": "5.3",
    "implementation": "ipython",
    "implementation_version": "",
    "language_info": IPythonKernel.language_info,
    "banner": "",
}
# A request: Jupyter's message, and besides its `channel`, its `frames`, and by whom: `idents`.
Request = dict[str, Any]


class Relay:
    """The kernel of a client. info: its connection file. line: starts the job; line[0] is srun."""

    def __init__(self, info: dict[str, Any], line: list[str]) -> None:
        self._info, self._line = info, line
        key, scheme = info["key"].encode(), info["signature_scheme"]
        self._session = Session(key=key, signature_scheme=scheme, digest_history_size=0)
        self._name = str(os.getpid()).encode()  # of the kernel in the job, for its node
        # A heartbeat's REP socket would fail after a message of several frames.
        kinds = {**dict.fromkeys((*ASKED, "hb"), zmq.ROUTER), "iopub": zmq.PUB}
        context = zmq.asyncio.Context.instance()
        self._sockets = {name: context.socket(kind) for name, kind in kinds.items()}
        # Without a reply. Their ids are unique on a channel alone: two sockets of a client count.
        self._requests: dict[tuple[str, str], Request] = {}
        self._is_running = self._had_job = False
        self._news, self._why = "The kernel has not started yet.", ""  # why: there is no job
        self._shows: tuple[str, str] | None = None  # the request whose cell shows the news
        self._said: list[str] = []  # by Slurm
        self._over = asyncio.get_running_loop().create_future()
        self._job: asyncio.StreamWriter | None = None
        self._gate = sockets.Gate(self._refused)
        # For the sockets behind TCP ports, and its descriptor.
        self._folder: TemporaryDirectory[str] | None = None
        self._entry: int | None = None

    def listen(self) -> None:
        """Listen where the client expects it. Raises OSError, KeyError, and zmq.ZMQError."""
        is_tcp, base = self._info["transport"] == "tcp", self._info["ip"]
        if is_tcp:
            self._folder = TemporaryDirectory(prefix=sockets.PREFIX, dir=sockets.place())
            # If a cleaner of /tmp removes the folder, another user may take its name, but not its
            # descriptor.
            self._entry = os.open(self._folder.name, os.O_PATH | os.O_DIRECTORY)
            base = f"/proc/self/fd/{self._entry}/kernel"
        before = os.umask(0o077)  # for a client's own folder
        try:
            for name, socket in self._sockets.items():
                port = self._info[f"{name}_port"]
                socket.bind(f"ipc://{base}-{port}")
                if is_tcp:
                    self._gate.listen(self._info["ip"], port, f"{base}-{port}")
        finally:
            os.umask(before)

    async def serve(self, words: list[str]) -> int:
        """Serve until the kernel ends; returns its exit code. words: start it in the job."""
        parent = os.getppid()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._end, 0)
        self._gate.admit()
        work = [self._heartbeat(), self._watch(parent)]
        work += map(self._from_client, ASKED)
        streams, pid = srun.handed()
        job, began = None, procfs.began_boot(pid)
        try:
            if not pid:
                job = srun.start(self._line, os.environ)
                streams, pid = [os.dup(each) for each in srun.streams(job)], job.pid
            self._job = await framing.writer(streams[0])
            asked = (self._info["key"], self._info["signature_scheme"], *words)
            # Before it, the end of the line that a relay which was killed has left.
            start = framing.line("start", self._name, *(each.encode() for each in asked))
            self._job.write(b"\n" + start)
            said = asyncio.ensure_future(self._from_slurm(await framing.reader(streams[2])))
            work += [self._from_job(await framing.reader(streams[1]), said), self._ask(pid)]
        except OSError as error:
            self._fail(f"{error.filename}: {error.strerror}")
        working = asyncio.gather(*work)
        await asyncio.wait([working, self._over], return_when=asyncio.FIRST_COMPLETED)
        if not self._over.done():
            working.result()  # which raises: only a failure ends all of it
        working.cancel()
        with suppress(asyncio.CancelledError):
            await working
        if self._job:
            self._job.close()
            with suppress(OSError):
                await self._job.wait_closed()
        is_left = os.getppid() != parent  # without the client, only the relay ends the job
        if job:
            srun.end(job)
        elif is_left and began is not None and procfs.began_boot(pid) == began:
            with suppress(OSError):
                os.kill(pid, signal.SIGTERM)
        await self._close(is_left=is_left)
        return int(self._over.result())

    async def _close(self, *, is_left: bool) -> None:
        """Close the sockets once what was sent last has arrived. is_left: the client has gone."""
        for socket in self._sockets.values():
            socket.close(LAST_MS)
        await self._gate.finish(LAST_MS / 1000)
        zmq.asyncio.Context.instance().destroy()
        if self._folder:
            self._folder.cleanup()
        if is_left and self._info["transport"] == "ipc":
            sockets.remove(self._info["ip"], [self._info[f"{name}_port"] for name in self._sockets])

    def _refused(self, uid: int | None) -> None:
        """Report the first connection of another user."""
        user = "An unknown user" if uid is None else f"Another user ({procfs.user_name(uid)})"
        reporter.say(f"{user} tried to connect to this kernel, and was refused.")

    # -- what comes --------------------------------------------------------------------------------

    async def _from_client(self, channel: str) -> None:
        while True:
            frames = await self._sockets[channel].recv_multipart()
            if message := self._authentic(frames):
                with _going_on():
                    self._take(channel, frames, message)

    def _authentic(self, frames: list[bytes]) -> Request | None:
        """Return the message in the frames, None if the sender does not have the client's key."""
        try:
            idents, rest = self._session.feed_identities(frames)
            return {**self._session.deserialize(rest), "idents": idents}
        except Exception:  # noqa: BLE001 - unsigned bytes raise many types of error
            return None

    def _take(self, channel: str, frames: list[bytes], message: Request) -> None:
        """Pass a client's message on to the kernel, or answer it."""
        is_request = message["msg_type"].endswith("_request")  # others get no reply
        request = {**message, "channel": channel, "frames": frames}
        if is_request and (channel == "shell" or not self._is_running):
            self._requests[channel, message["msg_id"]] = request
        if self._is_running:
            self._send(channel, *frames)
        elif is_request:
            self._answer(request)

    async def _from_job(self, stream: asyncio.StreamReader, said: asyncio.Future[None]) -> None:
        async for line in framing.each(stream):
            with _going_on():
                await self._do(*framing.parsed(line))
        await said
        self._fail("; ".join(self._said[-3:]) or "srun has ended")

    async def _do(self, kind: str, frames: list[bytes]) -> None:
        """Handle one line of the node, which may be a message of the kernel."""
        if kind in self._sockets and self._is_running:
            if kind == "shell":
                parent = json.loads(frames[frames.index(DELIM) + PARENT])
                self._requests.pop((kind, parent.get("msg_id")), None)
            await self._sockets[kind].send_multipart(frames)
            return
        words = [sanitize(frame.decode(errors="replace"), REASON_LIMIT) for frame in frames]
        if kind == "job":
            self._had_job = True
            self._tell(f"Job {words[0]} has started on {words[1]}; the kernel starts there.")
        elif kind == "started" and frames == [self._name]:
            self._run()
        elif kind == "ended" and frames == [self._name]:
            self._end(1)
        elif kind == "failed":
            self._fail(words[0])

    async def _from_slurm(self, stream: asyncio.StreamReader) -> None:
        """Pass on what is printed in the job, and keep what Slurm says of its end."""
        async for line in framing.each(stream):
            text = line.decode(errors="replace").rstrip()
            reporter.say(text)
            if said := re.match(SAYS, text):
                self._said.append(sanitize(said[1], REASON_LIMIT))
                self._tell(self._said[-1])

    async def _ask(self, pid: int) -> None:
        """Ask Slurm now and then why the job waits."""
        pause_s = FIRST_PAUSE_S
        while not (self._is_running or self._why):
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            if news := await asyncio.to_thread(srun.waits, self._line[0], pid):
                self._tell(news)

    async def _heartbeat(self) -> None:
        while True:
            frames = await self._sockets["hb"].recv_multipart()
            with _going_on():
                await self._sockets["hb"].send_multipart(frames)

    async def _watch(self, parent: int) -> None:
        """Tell the node that this is there, and end when the client has gone."""
        while os.getppid() == parent:
            self._send("here")
            await asyncio.sleep(BEAT_S)
        self._end(0)

    # -- what goes ---------------------------------------------------------------------------------

    def _send(self, kind: str, *frames: bytes) -> None:
        if self._job and not self._job.is_closing():
            self._job.write(framing.line(kind, *frames))

    def _run(self) -> None:
        """Hand over to the kernel in the job."""
        if self._shows in self._requests:
            self._publish("clear_output", {"wait": True}, self._requests[self._shows])
        self._is_running = self._had_job = True
        for request in [*self._requests.values()]:
            self._send(request["channel"], *request["frames"])

    def _answer(self, request: Request) -> None:
        """Answer in place of the kernel, or later."""
        kind = request["msg_type"]
        if kind == "kernel_info_request":
            self._reply(request, INFO)
        elif kind == "shutdown_request":
            self._reply(request, {"status": "ok", **request["content"]})
            self._end(0)
        elif kind == "interrupt_request":
            self._refuse("KeyboardInterrupt", "The job goes on.")
        elif self._why:
            self._refuse("NoJob", self._why)
        else:
            self._tell(self._news)

    def _tell(self, news: str) -> None:
        """Show how it stands in the first cell that waits."""
        first = next(
            (each for each, asked in self._requests.items() if asked["msg_type"] == CELL), None
        )
        is_new = (first, news) != (self._shows, self._news)
        if first and is_new and not self._is_running:
            self._publish("status", {"execution_state": "busy"}, self._requests[first])
            self._publish("clear_output", {"wait": True}, self._requests[first])
            self._publish("stream", {"name": "stdout", "text": news}, self._requests[first])
        self._shows, self._news = first, news

    def _fail(self, why: str) -> None:
        """Say that there is no job any more."""
        self._is_running = False
        if self._job:
            self._job.close()
        self._why = self._why or (ENDED if self._had_job else NO_JOB).format(why)
        self._refuse("NoJob", self._why)

    def _refuse(self, name: str, why: str) -> None:
        """Refuse all that waits for a reply."""
        error = {"status": "error", "ename": name, "evalue": why, "traceback": [f"{name}: {why}"]}
        for request in [*self._requests.values()]:
            if request["msg_type"] == CELL:
                self._publish("error", error, request)
            self._reply(request, error)

    def _reply(self, request: Request, content: dict[str, Any]) -> None:
        del self._requests[request["channel"], request["msg_id"]]
        self._publish("status", {"execution_state": "busy"}, request)
        kind = request["msg_type"].replace("request", "reply")
        self._say(request["channel"], kind, content, request, request["idents"])
        self._publish("status", {"execution_state": "idle"}, request)

    def _publish(self, kind: str, content: dict[str, Any], request: Request) -> None:
        self._say("iopub", kind, content, request, kind.encode())

    def _say(
        self, channel: str, kind: str, content: dict[str, Any], request: Request, ident: Any
    ) -> None:
        # Session.send() would use the socket beside asyncio, which could miss what comes then.
        message = self._session.msg(kind, content, request)
        self._sockets[channel].send_multipart(self._session.serialize(message, ident))

    def _end(self, code: int) -> None:
        if not self._over.done():
            self._over.set_result(code)


@contextmanager
def _going_on() -> Iterator[None]:
    """Go on after a message that can't be used, whatever is wrong with it."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - one message, and not the kernel, is lost
        reason = sanitize(f"{type(error).__name__}: {error}", REASON_LIMIT)
        reporter.say(f"Warning: a message of the kernel or its client was dropped: {reason}")


split = command.split_at_sign


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of the request, and the connection file."""
    add(request_options.REQUEST_KEYWORDS, parser)
    add((Option("-f --file FILE", "the connection file", required=True),), parser)


def run(arguments: Namespace) -> Output:
    """Be the kernel that a client has started. Raises RequestError for what no client gives."""
    if not arguments.command:
        line = own_line("kernel install --slurm")
        raise RequestError(f"The srun after -- is missing. Install the kernel again: {line}")
    try:
        with open(arguments.file, encoding="utf-8") as file:
            info = json.load(file)
    except (OSError, ValueError) as error:
        text = f"The connection file can't be read: {sanitize(str(error), REASON_LIMIT)}"
        raise RequestError(text) from error
    kernel: dict[str, Any] = get_kernel_dict(extra_arguments=["--ext", "reserve_gpu"])
    words = request_options.kernel_start(arguments) + kernel["argv"]

    async def served() -> int:
        try:
            relay = Relay(info, arguments.command)
            relay.listen()
        except (OSError, KeyError, TypeError, AttributeError, zmq.ZMQError) as error:
            reason = sanitize(str(error), REASON_LIMIT)
            text = f"The kernel can't listen where its client expects it: {reason}"
            raise RequestError(text) from error
        return await relay.serve(words)

    return Output(code=asyncio.run(served()))
