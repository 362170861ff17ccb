"""What is free is offered to the first in the queue, then to the next; and who is seen at all."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import pytest

from reserve_gpu.locks.directory import LockDirectory
from reserve_gpu.locks.holders import MOST_OF_ONE_USER
from tests.support.locked import have, needs_root
from tests.support.machine import Child, program

if TYPE_CHECKING:
    from tests.support.here import Here
STRANGERS, SHARER = 1001, 1002  # users that no user namespace here knows
APART = ("unshare", "--user", "--map-root-user")


@needs_root
def test_strangers_in_a_user_namespace(here: Here) -> None:
    """Where all users of the host are one, many files of one of them hide no sharer."""
    if not program(APART[0]) or subprocess.run([*APART, "true"], check=False).returncode:
        pytest.skip("needs a user namespace")
    uuid = here.uuid("0")
    with LockDirectory(str(here.locks)):
        pass
    for number in range(MOST_OF_ONE_USER):
        path = here.locks / f"{uuid}.share-{number:03}-0.lock"
        path.touch()
        os.chown(path, STRANGERS, STRANGERS)
    path = here.locks / f"{uuid}.share-{SHARER}-0.lock"
    child = Child(here.environ(), here.folder, *APART)
    try:
        with have(path):
            os.chown(path, SHARER, SHARER)
            assert child.run("os.stat(os.environ['RESERVE_GPU_LOCK_DIR']).st_uid").value == 0
            assert child.reserve("0").error == "NoFreeDeviceError"
        assert child.reserve("0").value == "0"
    finally:
        child.kill()
