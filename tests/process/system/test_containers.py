"""Containers are recognized, and their users are told about reservations outside."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.machine import program
from tests.support.platforms import on_a_host

if TYPE_CHECKING:
    from tests.support.machine import Machine
LOCKS = "/run/lock/reserve_gpu"


# -- in namespaces of their own --------------------------------------------------------------------

needs_mounts = pytest.mark.skipif(
    bool(os.geteuid()) or not program("unshare"), reason="needs root, for mounts"
)


def with_mounts(
    machine: Machine, script: str, *command: str, **environ: str
) -> tuple[int, str, str]:
    """Run a command in a mount namespace of its own, after a script; its exit code and output."""
    line = f'mount --make-rprivate / && {script} && exec "$@"'
    done = machine.command("unshare", "--mount", "sh", "-c", line, "sh", *command, **environ)
    return done.returncode, done.stdout, done.stderr


RUN_TRUE = (sys.executable, "-m", "reserve_gpu", "run", "--", "true")
OWN_RUN = "mount -t tmpfs none /run && mkdir -m 1777 /run/lock"
# As in images of Red Hat; /dev/shm is the host's.
CLOSED = "chmod 755 /run/lock && mkdir -m 1777 /run/shm && mount --bind /run/shm /dev/shm"


@needs_mounts
@on_a_host
@pytest.mark.parametrize(
    ("script", "environ", "expected"),
    [
        (f"{OWN_RUN} && touch /run/.containerenv", {}, "-v /run/lock/reserve_gpu:"),
        (OWN_RUN, {"APPTAINER_NAME": "x.sif"}, "--bind /run/lock/reserve_gpu"),
        (
            f"{OWN_RUN} && {CLOSED}",
            {"APPTAINER_NAME": "x.sif"},
            f"--bind {LOCKS}, and set RESERVE_GPU_LOCK_DIR={LOCKS} in it.",
        ),
        (OWN_RUN, {"TOOLBOX_PATH": "/usr/bin/toolbox"}, "RESERVE_GPU_LOCK_DIR=/run/host/run/lock"),
        (f"{OWN_RUN} && mount -o remount,ro /run", {"APPTAINER_NAME": "x.sif"}, "--bind /run/lock"),
    ],
    ids=["podman", "apptainer", "closed", "toolbox", "read-only"],
)
def test_a_container_with_the_hosts_processes(
    machine: Machine, script: str, environ: dict[str, str], expected: str
) -> None:
    """A container that shares the host's processes is told how to share its reservations."""
    code, _, told = with_mounts(machine, script, *RUN_TRUE, **environ, RESERVE_GPU_LOCK_DIR="")
    assert expected in told
    assert "Set RESERVE_GPU_LOCK_DIR to" not in told
    assert code == (78 if "remount" in script else 0)


@needs_mounts
@on_a_host
def test_a_container_with_the_hosts_directory(machine: Machine) -> None:
    """A container with the host's directory bound sees its reservations, without a warning."""
    script = f'{OWN_RUN} && mkdir "{LOCKS}" && mount --bind "{machine.locks}" {LOCKS}'
    with machine.child() as child:
        child.reserve("0")
        code, out, told = with_mounts(
            machine, script, *RUN_TRUE, container="podman", RESERVE_GPU_LOCK_DIR=""
        )
    assert (code, out) == (0, "")
    assert told.startswith("Reserving GPU1: ")


@needs_mounts
def test_a_distribution_of_wsl(machine: Machine) -> None:
    """A distribution of WSL2 has a PID namespace of its own, and is not called a container."""
    release = machine.folder / "osrelease"
    release.write_text("5.15.146.1-microsoft-standard-WSL2\n")
    mounts = f'mount --bind "{release}" /proc/sys/kernel/osrelease && {OWN_RUN}'
    namespace = ("unshare", "--pid", "--fork", "--mount-proc")
    for script, is_told in ((mounts, False), (OWN_RUN, True)):
        command = (*namespace, "sh", "-c", f'{script} && exec "$@"', "sh", *RUN_TRUE)
        done = machine.command(*command, RESERVE_GPU_LOCK_DIR="")
        assert "Reserving GPU0" in done.stderr
        assert ("container" in done.stderr) is is_told


@needs_mounts
def test_a_directory_that_is_read_only(machine: Machine) -> None:
    """In a read-only directory the status shows who has what, and a refusal says what to allow."""
    locks = machine.locks
    read_only = f'mount --bind "{locks}" "{locks}" && mount -o remount,bind,ro "{locks}"'
    module = (sys.executable, "-m", "reserve_gpu")
    with machine.child() as child:
        child.reserve("0, note='thesis'")
        code, out, _ = with_mounts(machine, read_only, *module, "status")
        assert (code, "1 of 2 GPUs is free: GPU1." in out, '"thesis"' in out) == (0, True, True)
        _, out, _ = with_mounts(machine, read_only, *module, "list")
        assert out.startswith("GPU0  ")
        code, _, told = with_mounts(machine, read_only, *RUN_TRUE)
        assert code == 78
        assert f"ReadWritePaths={locks}" in told
        assert "RESERVE_GPU_LOCK_DIR" not in told


@needs_mounts
@pytest.mark.parametrize("wish", [("--for", "4h", "--note", "thesis"), ("--memory", "1GB")])
def test_a_directory_that_is_full(machine: Machine, wish: tuple[str, ...]) -> None:
    """A user whose record can't be written is told which details others can't read."""
    fill = f'dd if=/dev/zero of="{machine.locks}/fill" bs=1k 2>/dev/null'
    machine.locks.mkdir(exist_ok=True)
    full = f'mount -t tmpfs -o size=64k,mode=1777 none "{machine.locks}" && {{ {fill} || true; }}'
    command = (sys.executable, "-m", "reserve_gpu", "run", *wish, "--", "true")
    code, _, told = with_mounts(machine, full, *command)
    assert code == 0
    assert "Warning: GPU0 is reserved, but other users can't see the reservation's end" in told
    assert "No space left on device" in told
    assert ("Other users see the whole GPU as reserved" in told) is (wish[0] == "--memory")
