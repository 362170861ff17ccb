"""The `kernel slurm` command: relay messages between a Jupyter client and a kernel in a Slurm job.

To the client, the relay looks like the kernel. When no kernel is running in the job, the relay
answers requests itself, and reports why the job is waiting or why there is no job.
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
from reserve_gpu.commands.output import Output, print_stderr
from reserve_gpu.commands.run import command
from reserve_gpu.commands.slurm import framing, sockets, srun
from reserve_gpu.model.errors import REASON_LIMIT, RequestError, command_line
from reserve_gpu.model.option import Option, add
from reserve_gpu.model.untrusted import sanitize
from reserve_gpu.system import procfs

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Iterator

CLIENT_CHANNELS = ("shell", "control", "stdin")  # channels on which a client sends messages
# pattern for error messages that Slurm prints to stderr
SLURM_ERROR = r"(?:\S*srun|slurmstepd\S*): (?:error: |fatal: |(?=unrecognized))(.*)"
NO_JOB = "Slurm could not start a job: {}. Restart the kernel to try again, or reinstall it."
ENDED = "The job has ended: {}. Restart the kernel to start another job."
CELL = "execute_request"
PARENT = 3  # offset from DELIM to the parent header in a message's frames
# first and longest pause between queries about why the job is waiting, in seconds
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 60.0
HEARTBEAT_S = 2.0  # seconds between heartbeat messages to the node
LINGER_MS = 1000  # milliseconds to wait for the last messages to be delivered
INFO = {
    "status": "ok",
    "protocol_version": "5.3",
    "implementation": "ipython",
    "implementation_version": "",
    "language_info": IPythonKernel.language_info,
    "banner": "",
}
# a Jupyter message, with the additional items `channel`, `frames` and `idents` (the sender)
Request = dict[str, Any]


class Relay:
    """Acts as the kernel for one Jupyter client."""

    def __init__(self, info: dict[str, Any], line: list[str]) -> None:
        """Create a relay that is not listening yet.

        Args:
            info: The contents of the client's connection file.
            line: The srun command that starts the job.
        """
        self._info, self._line = info, line
        key, scheme = info["key"].encode(), info["signature_scheme"]
        self._session = Session(key=key, signature_scheme=scheme, digest_history_size=0)
        self._name = str(os.getpid()).encode()  # name of this relay's kernel in the node's messages
        # Kernels usually use a REP socket for the heartbeat. But a message with several frames
        # would break a REP socket, so the relay uses a ROUTER.
        kinds = {**dict.fromkeys((*CLIENT_CHANNELS, "hb"), zmq.ROUTER), "iopub": zmq.PUB}
        context = zmq.asyncio.Context.instance()
        self._sockets = {name: context.socket(kind) for name, kind in kinds.items()}
        # unanswered requests, by channel and message ID; an ID is unique only within its channel
        self._requests: dict[tuple[str, str], Request] = {}
        self._is_running = self._had_job = False
        self._status = "The kernel has not started yet."
        self._failure = ""  # error message if there is no job; empty until a failure
        # the key, in _requests, of the request whose cell shows the status
        self._status_request: tuple[str, str] | None = None
        self._slurm_errors: list[str] = []
        self._exit_code = asyncio.get_running_loop().create_future()
        self._job: asyncio.StreamWriter | None = None
        self._gate = sockets.Gate(self._report_refusal)
        # the folder for the sockets behind the TCP ports, and the folder's descriptor
        self._folder: TemporaryDirectory[str] | None = None
        self._folder_descriptor: int | None = None

    def listen(self) -> None:
        """Listen on the addresses in the connection file.

        Raises:
            OSError: A TCP port or the folder for the sockets is not available.
            KeyError: The connection file is incomplete.
            zmq.ZMQError: A socket can't be bound.
        """
        is_tcp, base = self._info["transport"] == "tcp", self._info["ip"]
        if is_tcp:
            self._folder = TemporaryDirectory(prefix=sockets.PREFIX, dir=sockets.socket_root())
            # If a /tmp cleaner removes the folder, another user can create one with the same name.
            # So the sockets are addressed through the folder's descriptor.
            self._folder_descriptor = os.open(self._folder.name, os.O_PATH | os.O_DIRECTORY)
            base = f"/proc/self/fd/{self._folder_descriptor}/kernel"
        # With `ipc`, the client chooses the folder, so the sockets themselves must be private.
        old_umask = os.umask(0o077)
        try:
            for name, socket in self._sockets.items():
                port = self._info[f"{name}_port"]
                socket.bind(f"ipc://{base}-{port}")
                if is_tcp:
                    self._gate.listen(self._info["ip"], port, f"{base}-{port}")
        finally:
            os.umask(old_umask)

    async def serve(self, words: list[str]) -> int:
        """Start the job, serve the client until the kernel exits, and return the exit code.

        Args:
            words: The command that starts the kernel in the job.
        """
        parent = os.getppid()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._end, 0)
        self._gate.admit()
        work = [self._heartbeat(), self._watch(parent)]
        work += map(self._from_client, CLIENT_CHANNELS)
        streams, pid = srun.inherited_streams()
        job, began = None, procfs.start_time_boot(pid)
        try:
            if not pid:
                job = srun.start(self._line, os.environ)
                streams, pid = [os.dup(each) for each in srun.streams(job)], job.pid
            self._job = await framing.writer(streams[0])
            fields = (self._info["key"], self._info["signature_scheme"], *words)
            start = framing.line("start", self._name, *(each.encode() for each in fields))
            # An earlier relay that was killed might have left a line unfinished, so start with a
            # line break.
            self._job.write(b"\n" + start)
            stderr = asyncio.ensure_future(self._from_slurm(await framing.reader(streams[2])))
            work += [self._from_job(await framing.reader(streams[1]), stderr), self._poll(pid)]
        except OSError as error:
            self._fail(f"{error.filename}: {error.strerror}")
        working = asyncio.gather(*work)
        await asyncio.wait([working, self._exit_code], return_when=asyncio.FIRST_COMPLETED)
        if not self._exit_code.done():
            working.result()  # raises the task's error, because these tasks end only if one fails
        working.cancel()
        with suppress(asyncio.CancelledError):
            await working
        if self._job:
            self._job.close()
            with suppress(OSError):
                await self._job.wait_closed()
        is_orphan = os.getppid() != parent  # no provisioner is left to end the job
        if job:
            srun.end(job)
        elif is_orphan and began is not None and procfs.start_time_boot(pid) == began:
            with suppress(OSError):
                os.kill(pid, signal.SIGTERM)
        await self._close(is_orphan=is_orphan)
        return int(self._exit_code.result())

    async def _close(self, *, is_orphan: bool) -> None:
        """Close the sockets after the last messages have been delivered.

        Args:
            is_orphan: Whether the client has exited, in which case the relay must remove the
                client's sockets.
        """
        for socket in self._sockets.values():
            socket.close(LINGER_MS)
        await self._gate.finish(LINGER_MS / 1000)
        zmq.asyncio.Context.instance().destroy()
        if self._folder:
            self._folder.cleanup()
        if is_orphan and self._info["transport"] == "ipc":
            sockets.remove(self._info["ip"], [self._info[f"{name}_port"] for name in self._sockets])

    def _report_refusal(self, uid: int | None) -> None:
        """Print a warning the first time that a connection from another user is refused."""
        user = "an unknown user" if uid is None else f"another user ({procfs.user_name(uid)})"
        print_stderr(f"Warning: {user} tried to connect to this kernel and was refused.")

    # -- receiving ---------------------------------------------------------------------------------

    async def _from_client(self, channel: str) -> None:
        while True:
            frames = await self._sockets[channel].recv_multipart()
            if message := self._authentic(frames):
                with _errors_reported():
                    self._handle_client(channel, frames, message)

    def _authentic(self, frames: list[bytes]) -> Request | None:
        """Return the message in the frames, or None if it is not signed with the client's key."""
        try:
            idents, rest = self._session.feed_identities(frames)
            return {**self._session.deserialize(rest), "idents": idents}
        except Exception:  # noqa: BLE001 - invalid bytes can raise any error
            return None

    def _handle_client(self, channel: str, frames: list[bytes], message: Request) -> None:
        """Pass a client's message on to the kernel, or answer it if no kernel is running."""
        is_request = message["msg_type"].endswith("_request")  # other messages get no reply
        request = {**message, "channel": channel, "frames": frames}
        if is_request and (channel == "shell" or not self._is_running):
            self._requests[channel, message["msg_id"]] = request
        if self._is_running:
            self._send(channel, *frames)
        elif is_request:
            self._answer(request)

    async def _from_job(self, stream: asyncio.StreamReader, stderr: asyncio.Future[None]) -> None:
        """Handle the node's messages until srun exits, then report Slurm's last errors."""
        async for line in framing.each(stream):
            with _errors_reported():
                await self._handle_node(*framing.parsed(line))
        await stderr
        self._fail("; ".join(self._slurm_errors[-3:]) or "srun has ended")

    async def _handle_node(self, kind: str, frames: list[bytes]) -> None:
        """Handle a message from the node: either a kernel message or a job update."""
        if kind in self._sockets and self._is_running:
            if kind == "shell":
                parent = json.loads(frames[frames.index(DELIM) + PARENT])
                self._requests.pop((kind, parent.get("msg_id")), None)
            await self._sockets[kind].send_multipart(frames)
            return
        words = [sanitize(frame.decode(errors="replace"), REASON_LIMIT) for frame in frames]
        if kind == "job":
            self._had_job = True
            self._show_status(f"Job {words[0]} is running on {words[1]}; the kernel is starting.")
        elif kind == "started" and frames == [self._name]:
            self._start_relaying()
        elif kind == "ended" and frames == [self._name]:
            self._end(1)
        elif kind == "failed":
            self._fail(words[0])

    async def _from_slurm(self, stream: asyncio.StreamReader) -> None:
        """Print the job's stderr, and collect the error messages that Slurm prints there."""
        async for line in framing.each(stream):
            text = line.decode(errors="replace").rstrip()
            print_stderr(text)
            if match := re.match(SLURM_ERROR, text):
                self._slurm_errors.append(sanitize(match[1], REASON_LIMIT))
                self._show_status(self._slurm_errors[-1])

    async def _poll(self, pid: int) -> None:
        """Ask Slurm repeatedly why the job is waiting, and show the answer."""
        pause_s = FIRST_PAUSE_S
        while not (self._is_running or self._failure):
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            if status := await asyncio.to_thread(srun.pending_reason, self._line[0], pid):
                self._show_status(status)

    async def _heartbeat(self) -> None:
        while True:
            frames = await self._sockets["hb"].recv_multipart()
            with _errors_reported():
                await self._sockets["hb"].send_multipart(frames)

    async def _watch(self, parent: int) -> None:
        """Keep telling the node that the relay is running, and stop when the client exits."""
        while os.getppid() == parent:
            self._send("here")
            await asyncio.sleep(HEARTBEAT_S)
        self._end(0)

    # -- sending -----------------------------------------------------------------------------------

    def _send(self, kind: str, *frames: bytes) -> None:
        if self._job and not self._job.is_closing():
            self._job.write(framing.line(kind, *frames))

    def _start_relaying(self) -> None:
        """Clear the status, and pass all pending requests to the kernel, which is now running."""
        if self._status_request in self._requests:
            request = self._requests[self._status_request]
            self._publish("clear_output", {"wait": True}, request)
        self._is_running = self._had_job = True
        for request in [*self._requests.values()]:
            self._send(request["channel"], *request["frames"])

    def _answer(self, request: Request) -> None:
        """Answer a request on the kernel's behalf, or keep it until the kernel is running."""
        kind = request["msg_type"]
        if kind == "kernel_info_request":
            self._reply(request, INFO)
        elif kind == "shutdown_request":
            self._reply(request, {"status": "ok", **request["content"]})
            self._end(0)
        elif kind == "interrupt_request":
            self._refuse("KeyboardInterrupt", "The job is still waiting.")
        elif self._failure:
            self._refuse("NoJob", self._failure)
        else:
            self._show_status(self._status)

    def _show_status(self, status: str) -> None:
        """Show a status in the first waiting cell, unless the cell already shows that status."""
        cells = (key for key, each in self._requests.items() if each["msg_type"] == CELL)
        first = next(cells, None)
        is_new = (first, status) != (self._status_request, self._status)
        if first and is_new and not self._is_running:
            self._publish("status", {"execution_state": "busy"}, self._requests[first])
            self._publish("clear_output", {"wait": True}, self._requests[first])
            self._publish("stream", {"name": "stdout", "text": status}, self._requests[first])
        self._status_request, self._status = first, status

    def _fail(self, reason: str) -> None:
        """Refuse all pending and future requests, because there is no job."""
        self._is_running = False
        if self._job:
            self._job.close()
        text = (ENDED if self._had_job else NO_JOB).format(reason)
        self._failure = self._failure or text
        self._refuse("NoJob", self._failure)

    def _refuse(self, name: str, text: str) -> None:
        """Reply to all pending requests with an error.

        Args:
            name: The error's class name.
            text: The error message.
        """
        error = {"status": "error", "ename": name, "evalue": text, "traceback": [f"{name}: {text}"]}
        for request in [*self._requests.values()]:
            if request["msg_type"] == CELL:
                self._publish("error", error, request)
            self._reply(request, error)

    def _reply(self, request: Request, content: dict[str, Any]) -> None:
        del self._requests[request["channel"], request["msg_id"]]
        self._publish("status", {"execution_state": "busy"}, request)
        kind = request["msg_type"].replace("request", "reply")
        self._send_to_client(request["channel"], kind, content, request, request["idents"])
        self._publish("status", {"execution_state": "idle"}, request)

    def _publish(self, kind: str, content: dict[str, Any], request: Request) -> None:
        self._send_to_client("iopub", kind, content, request, kind.encode())

    def _send_to_client(
        self, channel: str, kind: str, content: dict[str, Any], request: Request, ident: Any
    ) -> None:
        # Session.send() is not used, because it bypasses the asyncio socket, which could then miss
        # an incoming message.
        message = self._session.msg(kind, content, request)
        self._sockets[channel].send_multipart(self._session.serialize(message, ident))

    def _end(self, code: int) -> None:
        if not self._exit_code.done():
            self._exit_code.set_result(code)


@contextmanager
def _errors_reported() -> Iterator[None]:
    """Print a warning if a message can't be handled, and continue."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - drop one message, not the kernel
        reason = sanitize(f"{type(error).__name__}: {error}", REASON_LIMIT)
        print_stderr(f"Warning: a message from the kernel or its client was dropped: {reason}.")


split = command.split_at_sign


def add_arguments(parser: ArgumentParser) -> None:
    """Add the request options and the option for the connection file."""
    add(request_options.REQUEST_KEYWORDS, parser)
    add((Option("-f --file FILE", "the connection file", required=True),), parser)


def run(arguments: Namespace) -> Output:
    """Act as the kernel that a client started.

    Raises:
        RequestError: The command line, the connection file or an address in it is invalid.
    """
    if not arguments.command:
        line = command_line("kernel install --slurm")
        raise RequestError(f"The srun command after -- is missing. Reinstall the kernel: {line}")
    try:
        with open(arguments.file, encoding="utf-8") as file:
            info = json.load(file)
    except (OSError, ValueError) as error:
        text = f"The connection file can't be read: {sanitize(str(error), REASON_LIMIT)}."
        raise RequestError(text) from error
    kernel: dict[str, Any] = get_kernel_dict(extra_arguments=["--ext", "reserve_gpu"])
    words = request_options.kernel_start(arguments) + kernel["argv"]

    async def served() -> int:
        try:
            relay = Relay(info, arguments.command)
            relay.listen()
        except (KeyError, TypeError, AttributeError) as error:
            text = f"The connection file {sanitize(arguments.file)} is incomplete or invalid."
            raise RequestError(text) from error
        except (OSError, zmq.ZMQError) as error:
            reason = sanitize(str(error), REASON_LIMIT)
            text = f"The kernel can't listen on the addresses in its connection file: {reason}."
            raise RequestError(text) from error
        return await relay.serve(words)

    return Output(code=asyncio.run(served()))
