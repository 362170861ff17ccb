"""Logs what a command uses that `reserve-gpu run` has become.

A command knows nothing of this package, so a small process of its own looks once a minute, as a
notebook does by itself. It holds no lock of a device, no terminal and no pipe, is no child of the
command, and is gone as soon as nobody has the locks any more.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from reserve_gpu.features.history.recorder import EVERY_S, Recorder
from reserve_gpu.locks import files
from reserve_gpu.log.log_writer import Page
from reserve_gpu.model.errors import ReserveGPUError
from reserve_gpu.model.requests import End
from reserve_gpu.reservation import exec_handover
from reserve_gpu.system import process_identity, watchdog

if TYPE_CHECKING:
    from collections.abc import Collection

POLL_S = 1.0  # between two looks at whether somebody has the locks, once the command has ended


def start(logged: Recorder) -> bool:
    """Leave the page to a follower of this very process; returns True. Raises OSError."""
    page = logged.page
    about = {
        "name": logged.entries[0].name,
        "page": (page.folder, page.descriptor, page.name),
        "since": logged.entries[0].since,
        "at": logged.at,
    }
    try:
        exec_handover.follow(__name__, logged.held, about, (page.folder, page.descriptor))
    finally:
        page.close()
    return True


def main(text: str) -> None:
    """Log what a command uses until nobody has the locks. text: what `start` says of it."""
    about: dict[str, Any] = json.loads(text)
    process_identity.call_it(about["name"] or "")
    folder, descriptor, name = about["page"]
    files.adopt(descriptor)
    held, page = exec_handover.held_of(about), Page(folder, descriptor, name)
    logged = Recorder(page, held, about["since"], about["at"])
    own: Collection[int] | None = {about["pid"]}
    while own or exec_handover.are_locked(about):
        pause_s = _step(logged, own)
        if own is None:
            time.sleep(min(pause_s, POLL_S))
        elif watchdog.ends_within(about["process"], pause_s) or not exec_handover.are_locked(about):
            own = None
    logged.end(End.EXIT)


def _step(logged: Recorder, own: Collection[int] | None) -> float:
    try:
        return logged.step(own)[0]
    except (OSError, ReserveGPUError):  # a full disk, say
        return EVERY_S
