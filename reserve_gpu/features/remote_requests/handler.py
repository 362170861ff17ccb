"""Handle requests from the same user or from root to release devices or end this process."""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

from reserve_gpu.gpus import cuda_environment
from reserve_gpu.locks import files
from reserve_gpu.locks.directory import default_path, device_of, lock_name
from reserve_gpu.model import untrusted
from reserve_gpu.model.errors import ReserveGPUError, program_command
from reserve_gpu.model.holders import Answer
from reserve_gpu.model.requests import End
from reserve_gpu.model.untrusted import sanitize
from reserve_gpu.render import durations
from reserve_gpu.render.phrases import labels
from reserve_gpu.reservation import activity, socket_directory
from reserve_gpu.reservation.feature import Feature, Owner
from reserve_gpu.system import executor, process_identity, procfs, shutdown
from reserve_gpu.system.forks import no_fork
from reserve_gpu.system.jupyter_kernel import cells

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from reserve_gpu.model.devices import Device, Process
    from reserve_gpu.reservation.holding import Change

    Answerer = Callable[[dict[str, Any]], dict[str, Any]]


class RemoteRequests(Feature):
    """Listens for requests while this IPython process holds a device."""

    def __init__(self, owner: Owner) -> None:
        super().__init__(owner)
        self._listener: Listener | None = None
        self._is_due = False  # whether this process still has to start listening
        self._has_warned = False  # whether the user has been told that listening failed
        self._unreachable: list[str] = []  # warnings to show when the current cell ends
        self._warnings: list[str] = []  # warnings to show before the next cell

    def changed(self, change: Change) -> None:
        """Start listening when a device is held, and stop when no device is held."""
        is_wanted = bool(change.held and cells().shell)
        self._is_due = is_wanted and not self._listener
        if self._is_due:
            with suppress(OSError, ReserveGPUError):  # `step` tries another directory
                self._listen(socket_directory.open_first)
        elif self._listener and not is_wanted:
            self._listener.stop()
            self._listener = None
        self._has_warned &= is_wanted

    def step(self) -> float | None:
        """Listen in another directory if the default one can't be used.

        Unlike `changed`, this method is called while the mutex is not held.
        """
        if self._is_due and (held := self.owner.held):
            try:
                self._listen(socket_directory.open_any)
            except (OSError, ReserveGPUError) as error:
                if not self._has_warned:
                    self._unreachable.append(unreachable(held.devices, error))
                # When the reservation changes, this process will try again.
                self._is_due, self._has_warned = False, True
        return None

    def cell_ended(self, look: Callable[[], Mapping[Device, list[Process]]]) -> list[str]:  # noqa: ARG002
        """After a cell that reserves a device, return a warning if this process can't listen.

        Args:
            look: Not used.
        """
        if self._is_due:
            with suppress(ReserveGPUError):
                self.owner.run(self.step)
        warnings, self._unreachable = self._unreachable, []
        return warnings

    def _listen(self, open_folder: Callable[[], int]) -> None:
        listener = Listener(self._answer)
        listener.start(open_folder)
        self._listener, self._is_due = listener, False

    def cell_begins(self) -> list[str]:
        """Return notices about requests handled since the last cell."""
        warnings, self._warnings = self._warnings, []
        return warnings

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Handle a request from another process, and return the answer."""
        return {"answer": self.owner.run(self._handle, request).name}

    def _handle(self, request: dict[str, Any]) -> Answer:
        held = self.owner.held
        if time.time() > request["until"] or request["do"] not in ("release", "end"):
            return Answer.SILENT  # the request has timed out, or comes from a newer version
        requested = {device_of(lock_name(uuid)) for uuid in request["devices"]}
        names = {device_of(lock_name(device.uuid)) for device in held.devices} if held else set()
        if held is None or names.isdisjoint(requested):
            return Answer.GONE
        if request.get("notebook") not in (None, process_identity.notebook()):
            return Answer.ANOTHER
        own_labels = {label for each in held.devices for label in (each.label, f"GPU{each.index}")}
        if own_labels.isdisjoint(request.get("labels") or own_labels):
            return Answer.ANOTHER  # another user has changed the GPU's number in the lock record
        if request["do"] == "end":
            shutdown.process_end().begin(lambda: True, self._warnings.append, lambda: None)
            return Answer.ENDED
        if cuda_environment.cuda_started():
            return Answer.CUDA
        with cells().quiet:
            self.owner.hide()
        has_cuda, has_child = activity.of_hidden(held)
        if has_cuda or has_child:
            self.owner.set_holding(held)
            return Answer.CUDA if has_cuda else Answer.CHILD
        self.owner.release_and_hide(End.ASKED)
        self._warnings.append(released_by(held.devices, request["by"], time.time()))
        return Answer.RELEASED


def released_by(devices: Sequence[Device], user: str, at: float) -> str:
    """Return the notice that devices were released at a user's request.

    Args:
        devices: The devices that this process held.
        user: The user's name.
        at: The time of the release, in seconds since the epoch.
    """
    subject = "You" if user == procfs.user_name(os.geteuid()) else sanitize(user)
    moment = durations.moment(at, at)
    text = f"{subject} released {labels(devices)} at {moment} with reserve-gpu release"
    return f"{text}. To get another one:\n%reserve_gpu"


def unreachable(devices: Sequence[Device], error: Exception) -> str:
    """Return the warning that other processes can't ask this one to release devices.

    Args:
        devices: The held devices.
        error: The error that prevents this process from listening for requests.
    """
    names, directory = labels(devices), default_path()
    reason, advice = sanitize(str(error)), ""
    if isinstance(error, OSError):
        reason, advice = sanitize(error.strerror or ""), f" {files.remedy(error.errno, directory)}"
    return (
        f"{program_command()} release can't ask this kernel to release {names}, because the kernel "
        f"can't create a socket in {directory} ({reason}). With --end, it can still end the "
        f"kernel, but without calling before_end() functions.{advice}"
    )


# -- the listener ----------------------------------------------------------------------------------

REQUEST_LIMIT_S = 1.0  # maximum seconds from a client's connection to its request
BACKLOG = 128  # maximum number of connections waiting to be accepted
SOCKET_MODE = 0o600
# Maximum number of attempts to listen. The user's other processes remove empty directories, so an
# attempt can fail.
ATTEMPTS = 10


class Listener:
    """Answers requests to this process, using a thread that listens on a Unix socket."""

    def __init__(self, answer: Answerer) -> None:
        """Create a listener.

        Args:
            answer: A function that returns the answer to a request. The listener's thread calls it.
        """
        self._answer = answer
        self._descriptor = files.NONE

    def start(self, open_folder: Callable[[], int]) -> None:
        """Create the socket and start the thread.

        Args:
            open_folder: A function that returns a file descriptor for the socket's directory.

        Raises:
            OSError, LockError: The directory or the socket can't be created.
            NoThreadError: The process can't start a thread.
        """
        for _ in range(ATTEMPTS):
            with suppress(FileNotFoundError):
                self._start(open_folder)
                return
        self._start(open_folder)

    def _start(self, open_folder: Callable[[], int]) -> None:
        name = f"{socket_directory.sockets_of(os.getpid())}{os.urandom(8).hex()}"
        # Prevent forks until the descriptors are registered to be closed in forked children.
        with no_fork, ExitStack() as cleanup:
            folder = files.remember(open_folder())
            cleanup.callback(files.close, folder)
            socket_directory.sweep(folder)
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._descriptor = files.remember(listener.fileno())
            cleanup.callback(lambda: files.close(listener.detach()))
            path = f"/proc/self/fd/{folder}/{name}"  # a socket's path must be short
            listener.bind(path)
            cleanup.callback(os.unlink, name, dir_fd=folder)
            os.chmod(path, SOCKET_MODE)  # the umask might have removed permissions
            listener.listen(BACKLOG)
            executor.start(self._serve, listener, folder, name)
            cleanup.pop_all()

    def stop(self) -> None:
        """Stop listening and end the thread."""
        with suppress(OSError), no_fork:
            if files.opening_key(self._descriptor):
                with socket.socket(fileno=os.dup(self._descriptor)) as listener:
                    listener.shutdown(socket.SHUT_RDWR)

    def _serve(self, listener: socket.socket, folder: int, name: str) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # `stop` was called, or other code has closed the descriptor
                break
            with connection, suppress(Exception):  # an invalid request must not end the loop
                connection.settimeout(REQUEST_LIMIT_S)
                request = untrusted.parsed(connection.recv(socket_directory.MESSAGE_LIMIT))
                user = procfs.user_name(socket_directory.peer(connection)[1])
                answer = self._answer({**request, "by": user})
                connection.sendall(json.dumps(answer).encode())
        files.close(listener.detach())
        if files.opening_key(folder):
            with suppress(OSError):
                os.unlink(name, dir_fd=folder)
            socket_directory.remove_if_empty(folder)
            files.close(folder)
