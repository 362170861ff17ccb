"""Does what this user, or root, asks of this process from elsewhere: release it, or end."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from reserve_gpu import proc, this_process
from reserve_gpu.cells import cells
from reserve_gpu.core import environment, process_end, use
from reserve_gpu.core.feature import Feature, Owner
from reserve_gpu.errors import shown
from reserve_gpu.features.asked.listener import Listener
from reserve_gpu.locks.directory import device_of, lock_name
from reserve_gpu.model import Answer, Device, End
from reserve_gpu.report import times
from reserve_gpu.report.words import labels

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reserve_gpu.core.held import Change


class Asked(Feature):
    """Listens as long as anything is held here in IPython."""

    def __init__(self, owner: Owner) -> None:
        super().__init__(owner)
        self._listener: Listener | None = None
        self._warnings: list[str] = []  # for the next cell

    def changed(self, change: Change) -> None:
        """Listen as long as anything is held."""
        is_wanted = bool(change.held and cells().shell)
        if self._listener and not is_wanted:
            self._listener.stop()
            self._listener = None
        elif is_wanted and not self._listener:
            self._listener = Listener(self._answer)
            self._listener.start()

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
        if request.get("notebook") not in (None, this_process.notebook()):
            return Answer.ANOTHER  # somebody has written another name into the lock file
        if request["do"] == "end":
            process_end.of_this_process().begin(lambda: True, self._warnings.append, lambda: None)
            return Answer.ENDED
        if environment.cuda_started():
            return Answer.CUDA
        with cells().quiet:
            self.owner.hide()
        has_cuda, has_child = use.of_hidden(held)
        if has_cuda or has_child:
            self.owner.become(held)
            return Answer.CUDA if has_cuda else Answer.CHILD
        self.owner.let_go(End.ASKED)
        self._warnings.append(released_by(held.devices, request["by"], time.time()))
        return Answer.RELEASED


def released_by(devices: Sequence[Device], user: str, at: float) -> str:
    """Say that a user has had devices released. at: in seconds since the epoch."""
    who = "You" if user == proc.user_name(os.geteuid()) else shown(user)
    what = f"{who} released {labels(devices)} at {times.moment(at, at)} with reserve-gpu release"
    return f"{what}. %reserve_gpu gets another one."
