"""Tests of reservations in containers, and in lock directories that can't be written to."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.machine import program
from tests.support.platforms import on_a_host

if TYPE_CHECKING:
    import subprocess

    from tests.support.machine import Machine

LOCKS = "/run/lock/reserve_gpu"
MODULE = (sys.executable, "-m", "reserve_gpu")
RUN_TRUE = (*MODULE, "run", "--", "true")

pytestmark = pytest.mark.skipif(
    bool(os.geteuid()) or not program("unshare"), reason="needs root, for mounts"
)


def with_mounts(
    machine: Machine, script: str, *command: str, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run a command in a mount namespace of its own, after a script that mounts."""
    line = f'mount --make-rprivate / && {script} && exec "$@"'
    return machine.command("unshare", "--mount", "sh", "-c", line, "sh", *command, **environ)


PRIVATE_RUN = "mount -t tmpfs none /run && mkdir -m 1777 /run/lock"
# As in Red Hat's images, users can't write to /run/lock, so the lock directory is in /dev/shm.
NO_RUN_LOCK = "chmod 755 /run/lock && mkdir -m 1777 /run/shm && mount --bind /run/shm /dev/shm"


@on_a_host
def test_a_container_with_the_hosts_processes(machine: Machine) -> None:
    """A user in a container that shares the host's processes reads how to share its locks."""
    script, environ = f"{PRIVATE_RUN} && {NO_RUN_LOCK}", {"APPTAINER_NAME": "x.sif"}
    done = with_mounts(machine, script, *RUN_TRUE, **environ, RESERVE_GPU_LOCK_DIR="")
    assert f"--bind {LOCKS}, and set RESERVE_GPU_LOCK_DIR={LOCKS}" in done.stderr
    assert done.returncode == 0


@on_a_host
def test_a_container_with_the_hosts_directory(machine: Machine) -> None:
    """A container with the host's lock directory respects its reservations, without a warning."""
    script = f'{PRIVATE_RUN} && mkdir "{LOCKS}" && mount --bind "{machine.locks}" {LOCKS}'
    with machine.child() as child:
        child.reserve("0")
        done = with_mounts(machine, script, *RUN_TRUE, container="podman", RESERVE_GPU_LOCK_DIR="")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.startswith("Reserving GPU1: ")


def test_a_wsl_distribution_is_not_a_container(machine: Machine) -> None:
    """A WSL2 distribution has a PID namespace of its own, but gets no warning about containers."""
    release = machine.folder / "osrelease"
    release.write_text("5.15.146.1-microsoft-standard-WSL2\n")
    mounts = f'mount --bind "{release}" /proc/sys/kernel/osrelease && {PRIVATE_RUN}'
    namespace = ("unshare", "--pid", "--fork", "--mount-proc")
    for script, is_container in ((mounts, False), (PRIVATE_RUN, True)):
        command = (*namespace, "sh", "-c", f'{script} && exec "$@"', "sh", *RUN_TRUE)
        done = machine.command(*command, RESERVE_GPU_LOCK_DIR="")
        assert "Reserving GPU0" in done.stderr
        assert ("container" in done.stderr) is is_container


def test_a_read_only_directory(machine: Machine) -> None:
    """In a read-only lock directory, the status works, and a reservation is refused."""
    locks = machine.locks
    script = f'mount --bind "{locks}" "{locks}" && mount -o remount,bind,ro "{locks}"'
    with machine.child() as child:
        child.reserve("0, note='thesis'")
        status = with_mounts(machine, script, *MODULE, "status")
        assert status.returncode == 0
        assert "thesis" in status.stdout
        assert with_mounts(machine, script, *MODULE, "list").stdout.startswith("GPU0  ")
        refused = with_mounts(machine, script, *RUN_TRUE)
        assert refused.returncode == 78
        assert f"ReadWritePaths={locks}" in refused.stderr


@pytest.mark.parametrize("options", [("--for", "4h", "--note", "thesis"), ("--memory", "1GB")])
def test_a_full_directory(machine: Machine, options: tuple[str, ...]) -> None:
    """A user whose record can't be written is warned that other users can't read the details."""
    fill = f'dd if=/dev/zero of="{machine.locks}/fill" bs=1k 2>/dev/null'
    machine.locks.mkdir(exist_ok=True)
    full = f'mount -t tmpfs -o size=64k,mode=1777 none "{machine.locks}" && {{ {fill} || true; }}'
    done = with_mounts(machine, full, *MODULE, "run", *options, "--", "true")
    assert done.returncode == 0
    assert "No space left on device" in done.stderr
    assert ("the whole GPU" in done.stderr) is (options[0] == "--memory")
