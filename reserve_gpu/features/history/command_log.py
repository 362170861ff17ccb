"""Log device use by a command that has replaced `reserve-gpu run` through exec.

The command does not run any code from this package, so a small background process checks once a
minute whether the devices are being used. The background process holds no device lock, terminal or
pipe, and is not a child of the command. It exits once the command and its child processes have
released the locks.
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

POLL_S = 1.0  # seconds between lock checks after the command has exited


def start(logged: Recorder) -> bool:
    """Start a background process that continues to log the reservation after an exec.

    This process closes the recorder's page (the file of logged lines), even if the background
    process can't be started.

    Args:
        logged: The current reservation's recorder.

    Returns:
        Always True.

    Raises:
        OSError: The background process can't be started.
    """
    page = logged.page
    about = {
        "name": logged.entries[0].name,
        "page": (page.folder, page.descriptor, page.name),
        "since": logged.entries[0].since,
        "at": logged.at,
    }
    try:
        exec_handover.start_follower(__name__, logged.held, about, (page.folder, page.descriptor))
    finally:
        page.close()
    return True


def main(text: str) -> None:
    """Log device use until the command and its child processes have released the locks.

    Args:
        text: The data from `start`, as JSON.
    """
    about: dict[str, Any] = json.loads(text)
    process_identity.set_name(about["name"] or "")
    folder, descriptor, name = about["page"]
    files.adopt(descriptor)
    held, page = exec_handover.deserialize(about), Page(folder, descriptor, name)
    logged = Recorder(page, held, about["since"], about["at"])
    pids: Collection[int] | None = {about["pid"]}
    while pids or exec_handover.are_still_locked(about):
        pause_s = _step(logged, pids)
        if pids is None:
            time.sleep(min(pause_s, POLL_S))
        elif watchdog.ends_within(about["process"], pause_s) or not exec_handover.are_still_locked(
            about
        ):
            pids = None
    logged.end(End.EXIT)


def _step(logged: Recorder, pids: Collection[int] | None) -> float:
    try:
        return logged.step(pids)[0]
    except (OSError, ReserveGPUError):  # for example, the disk is full
        return EVERY_S
