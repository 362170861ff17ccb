"""Containers are recognized, and their users are told about reservations outside."""

from __future__ import annotations

import errno
import os
import sys
from typing import TYPE_CHECKING

import pytest

from reserve_gpu.locks import files
from reserve_gpu.locks.lock import cause
from reserve_gpu.system.containers import Mount, detect_runtime, is_private
from tests.machine import program
from tests.test_machines import on_a_host

if TYPE_CHECKING:
    from pathlib import Path

    from tests.here import Here
    from tests.machine import Machine

ROOT = Mount("/", "/", "ext4")
RUN, RUN_LOCK = Mount("/run", "/", "tmpfs"), Mount("/run/lock", "/", "tmpfs")
LOCKS = "/run/lock/reserve_gpu"


@pytest.mark.parametrize(
    ("environ", "paths", "root", "expected"),
    [
        ({}, (), "ext4", None),
        ({"APPTAINER_NAME": "torch.sif"}, (), "ext4", "apptainer"),
        ({"SINGULARITY_CONTAINER": "/torch.sif"}, ("/.singularity.d",), "squashfs", "apptainer"),
        ({"container": "podman"}, (), "ext4", "podman"),
        ({"container": "systemd-nspawn"}, (), "ext4", "container"),
        ({"DISTROBOX_ENTER_PATH": "/usr/bin/distrobox-enter"}, (), "overlay", "distrobox"),
        ({"TOOLBOX_PATH": "/usr/bin/toolbox", "container": "oci"}, (), "overlay", "toolbox"),
        ({}, ("/run/.containerenv",), "overlay", "podman"),
        ({}, ("/run/.toolboxenv", "/run/.containerenv"), "overlay", "toolbox"),
        ({}, ("/.dockerenv",), "overlay", "docker"),
        ({}, ("/.dockerenv",), "ext4", None),  # of a virtual machine made of an image
        ({"container": "", "APPTAINER_NAME": ""}, (), "ext4", None),
    ],
)
def test_kind(
    environ: dict[str, str], paths: tuple[str, ...], root: str, expected: str | None
) -> None:
    """A container is recognized by its variables and files, and by a root that fits them."""
    assert detect_runtime(environ, paths, root) == expected


@pytest.mark.parametrize(
    ("mounts", "expected"),
    [
        ([ROOT], True),
        ([ROOT, RUN], True),
        ([ROOT, RUN, RUN_LOCK], True),
        ([ROOT, RUN, Mount("/run/lock", "/lock", "tmpfs")], False),
        ([ROOT, RUN, Mount(LOCKS, "/lock/reserve_gpu", "tmpfs")], False),
        ([ROOT, Mount("/run/lock", "/", "ext4")], False),
        ([Mount("/", "/@", "btrfs")], True),
        ([ROOT, Mount("/run/lo", "/", "ext4")], True),
        ([], True),
    ],
)
def test_is_own(mounts: list[Mount], expected: bool) -> None:  # noqa: FBT001 - a column
    """A directory is shared with the host if it, or a folder above it, was bound there."""
    assert is_private(LOCKS, mounts) is expected


# -- errors of the lock directory ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.ENOSYS, "does not support flock"),
        (errno.ENOLCK, "does not support flock"),
        (errno.EOPNOTSUPP, "does not support flock"),
        (errno.EACCES, "AppArmor or SELinux"),
        (errno.EPERM, "AppArmor or SELinux"),
        (errno.EIO, "Tell the administrator"),
        (errno.ESTALE, "network file system"),
    ],
)
def test_a_lock_that_fails(number: int, expected: str) -> None:
    """Each error of flock has its own cause; only three mean a file system without it."""
    text = cause(number, LOCKS)
    assert expected in text
    assert ("does not support flock" in text) is (expected == "does not support flock")


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.EROFS, "ReadWritePaths=/"),
        (errno.EACCES, "to the sandbox's writable paths"),
        (errno.ENOSPC, "Free some space"),
        (errno.EDQUOT, "Free some space"),
        (errno.EIO, "Tell the administrator"),
        (errno.ESTALE, "a local file system"),
        (errno.ENFILE, "whole machine"),
        (errno.ENOENT, "Set RESERVE_GPU_LOCK_DIR"),
    ],
)
@on_a_host
def test_a_directory_that_fails(number: int, expected: str, tmp_path: Path) -> None:
    """What to do about the lock directory follows from the error."""
    assert expected in files.remedy(number, str(tmp_path))


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
@pytest.mark.process
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
@pytest.mark.process
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
@pytest.mark.process
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
@pytest.mark.process
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
@pytest.mark.process
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


def test_a_directory_that_has_room_again(here: Here) -> None:
    """A reservation whose record is written has no such warning."""
    assert "can't read" not in here.shell().run("%reserve_gpu --note thesis").stderr
