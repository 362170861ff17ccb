"""Containers are recognized, and their users are told about reservations outside."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest

from reserve_gpu.locks import files
from reserve_gpu.locks.lock import cause
from reserve_gpu.system.containers import Mount, detect_runtime, is_private
from tests.support.platforms import on_a_host

if TYPE_CHECKING:
    from pathlib import Path


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
