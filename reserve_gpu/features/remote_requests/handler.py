"""Carry out requests of this user's other processes, or of root: release, or end this process."""

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
from reserve_gpu.model.errors import ReserveGPUError, own_command
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
    """Listens while this IPython holds a device."""

    def __init__(self, owner: Owner) -> None:
        super().__init__(owner)
        self._listener: Listener | None = None
        self._is_due = False  # to listen
        self._has_warned = False  # that it can't
        self._unreachable: list[str] = []  # for the end of the cell
        self._warnings: list[str] = []  # for the next cell

    def changed(self, change: Change) -> None:
        """Listen while a device is held."""
        is_wanted = bool(change.held and cells().shell)
        self._is_due = is_wanted and not self._listener
        if self._is_due:
            with suppress(OSError, ReserveGPUError):  # then the next step tries another folder
                self._listen(socket_directory.open_first)
        elif self._listener and not is_wanted:
            self._listener.stop()
            self._listener = None
        self._has_warned &= is_wanted

    def step(self) -> float | None:
        """Listen in another folder if the first one can't be used, outside of the mutex."""
        if self._is_due and (held := self.owner.held):
            try:
                self._listen(socket_directory.open_any)
            except (OSError, ReserveGPUError) as error:
                if not self._has_warned:
                    self._unreachable.append(unreachable(held.devices, error))
                self._is_due, self._has_warned = False, True  # due again at the next change
        return None

    def cell_ended(self, look: Callable[[], Mapping[Device, list[Process]]]) -> list[str]:  # noqa: ARG002
        """Return a warning after the cell that reserves, if this process can't listen."""
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
        """Return what was done as somebody has asked for it."""
        warnings, self._warnings = self._warnings, []
        return warnings

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Do what this user, or root, asks for from elsewhere; returns the answer."""
        return {"answer": self.owner.run(self._obey, request).name}

    def _obey(self, request: dict[str, Any]) -> Answer:
        held = self.owner.held
        if time.time() > request["until"] or request["do"] not in ("release", "end"):
            return Answer.SILENT  # it was told so by now; or a newer version asks for something
        asked = {device_of(lock_name(uuid)) for uuid in request["devices"]}
        own = {device_of(lock_name(device.uuid)) for device in held.devices} if held else set()
        if held is None or own.isdisjoint(asked):
            return Answer.GONE
        if request.get("notebook") not in (None, process_identity.notebook()):
            return Answer.ANOTHER
        labels_ = {label for each in held.devices for label in (each.label, f"GPU{each.index}")}
        if labels_.isdisjoint(request.get("labels") or labels_):
            return Answer.ANOTHER  # another user has written another number into the lock file
        if request["do"] == "end":
            shutdown.of_this_process().begin(lambda: True, self._warnings.append, lambda: None)
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
    """Say that a user has had devices released. at: in seconds since the epoch."""
    who = "You" if user == procfs.user_name(os.geteuid()) else sanitize(user)
    what = (
        f"{who} released {labels(devices)} at {durations.moment(at, at)} with reserve-gpu release"
    )
    return f"{what}. %reserve_gpu gets another one."


def unreachable(devices: Sequence[Device], error: Exception) -> str:
    """Say that other processes can't ask this one to release devices, and what that means."""
    what, directory = labels(devices), default_path()
    reason, advice = sanitize(str(error)), ""
    if isinstance(error, OSError):
        reason, advice = sanitize(error.strerror or ""), f" {files.remedy(error.errno, directory)}"
    return (
        f"{own_command()} release can't ask this kernel to release {what}: it can't create a "
        f"socket in {directory} ({reason}). With --end it ends the kernel without before_end()."
        f"{advice}"
    )


# -- the listener ----------------------------------------------------------------------------------

REQUEST_LIMIT_S = 1.0  # from the connection to the request
BACKLOG = 128  # connections
SOCKET_MODE = 0o600
ATTEMPTS = 10  # other processes of this user remove an empty folder


class Listener:
    """Answers requests to this process on a thread that waits at a socket."""

    def __init__(self, answer: Answerer) -> None:
        """Create a listener.

        Args:
            answer: Returns the answer to a request. Called on the thread of the listener.
        """
        self._answer = answer
        self._descriptor = files.NONE

    def start(self, open_folder: Callable[[], int]) -> None:
        """Start to listen.

        Args:
            open_folder: Returns the descriptor of the folder for the socket.

        Raises:
            OSError, LockError: The folder or the socket can't be created.
            NoThreadError: The process can't start a thread.
        """
        for _ in range(ATTEMPTS):
            with suppress(FileNotFoundError):
                self._start(open_folder)
                return
        self._start(open_folder)

    def _start(self, open_folder: Callable[[], int]) -> None:
        name = f"{socket_directory.sockets_of(os.getpid())}{os.urandom(8).hex()}"
        with no_fork, ExitStack() as failed:  # a fork closes the descriptors in the child
            folder = files.remember(open_folder())
            failed.callback(files.close, folder)
            socket_directory.sweep(folder)
            own = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._descriptor = files.remember(own.fileno())
            failed.callback(lambda: files.close(own.detach()))
            path = f"/proc/self/fd/{folder}/{name}"  # a socket's path must be short
            own.bind(path)
            failed.callback(os.unlink, name, dir_fd=folder)
            os.chmod(path, SOCKET_MODE)  # the umask may have taken permissions away
            own.listen(BACKLOG)
            executor.start(self._serve, own, folder, name)
            failed.pop_all()

    def stop(self) -> None:
        """Stop listening and end the thread."""
        with suppress(OSError), no_fork:
            if files.opening(self._descriptor):
                with socket.socket(fileno=os.dup(self._descriptor)) as own:
                    own.shutdown(socket.SHUT_RDWR)

    def _serve(self, own: socket.socket, folder: int, name: str) -> None:
        while True:
            try:
                connection, _ = own.accept()
            except OSError:  # stopped, or other code has closed all descriptors
                break
            with connection, suppress(Exception):  # a bad request, or a failed one
                connection.settimeout(REQUEST_LIMIT_S)
                request = untrusted.parsed(connection.recv(socket_directory.MESSAGE_LIMIT))
                by = procfs.user_name(socket_directory.peer(connection)[1])
                answer = self._answer({**request, "by": by})
                connection.sendall(json.dumps(answer).encode())
        files.close(own.detach())
        if files.opening(folder):
            with suppress(OSError):
                os.unlink(name, dir_fd=folder)
            socket_directory.remove_if_empty(folder)
            files.close(folder)
