"""Processes that share a GPU."""

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
    from tests.support.machine import Machine


@pytest.mark.promise
def test_each_holder_of_a_part_has_a_record_and_a_pid(machine: Machine) -> None:
    """Each holder is listed with its own PID and note, until it is killed."""
    machine.write("gpu")
    holders = "[(h.pid, h.note, h.confirmed) for h in reserve_gpu.status().rows[0].holders]"
    with machine.child() as first, machine.child() as second, machine.child() as third:
        for child, note in ((first, "one"), (second, "two")):
            assert child.reserve(f"memory='1GB', note={note!r}").value == "0"
        assert third.run(holders).value == [[first.pid, "one", True], [second.pid, "two", True]]
        assert f"pid {first.pid}" in third.reserve().text
        first.kill()
        assert third.run(holders).value == [[second.pid, "two", True]]
        assert f"pid {second.pid}" in third.reserve("0").text
        assert third.reserve("memory='1GB', note='three'").value == "0"
        both = [[second.pid, "two", True], [third.pid, "three", True]]  # its own first
        assert second.run(holders).value == both


OTHER_UID, HOLDER_UID = 1001, 1002
USER_NAMESPACE = ("unshare", "--user", "--map-root-user")


@needs_root
def test_many_files_in_a_user_namespace_hide_no_part(here: Here) -> None:
    """In a user namespace, all users of the host have the same UID."""
    is_missing = not program(USER_NAMESPACE[0])
    if is_missing or subprocess.run([*USER_NAMESPACE, "true"], check=False).returncode:
        pytest.skip("needs a user namespace")
    uuid = here.uuid("0")
    with LockDirectory(str(here.locks)):
        pass
    for number in range(MOST_OF_ONE_USER):
        path = here.locks / f"{uuid}.share-{number:03}-0.lock"
        path.touch()
        os.chown(path, OTHER_UID, OTHER_UID)
    path = here.locks / f"{uuid}.share-{HOLDER_UID}-0.lock"
    child = Child(here.environ(), here.folder, *USER_NAMESPACE)
    try:
        with have(path):
            os.chown(path, HOLDER_UID, HOLDER_UID)
            assert child.run("os.stat(os.environ['RESERVE_GPU_LOCK_DIR']).st_uid").value == 0
            assert child.reserve("0").error == "NoFreeDeviceError"
        assert child.reserve("0").value == "0"
    finally:
        child.kill()
