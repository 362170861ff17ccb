"""Tests of the detection of containers, and of directories that are private to one."""

from __future__ import annotations

import pytest

from reserve_gpu.system.containers import Mount, detect_runtime, is_private

ROOT = Mount("/", "/", "ext4")
RUN, RUN_LOCK = Mount("/run", "/", "tmpfs"), Mount("/run/lock", "/", "tmpfs")
LOCKS = "/run/lock/reserve_gpu"


@pytest.mark.parametrize(
    ("environ", "files", "root", "expected"),
    [
        ({}, (), "ext4", None),
        ({"SINGULARITY_CONTAINER": "/torch.sif"}, ("/.singularity.d",), "squashfs", "apptainer"),
        ({"container": "podman"}, (), "ext4", "podman"),
        ({"container": "systemd-nspawn"}, (), "ext4", "container"),
        ({}, ("/run/.toolboxenv", "/run/.containerenv"), "overlay", "toolbox"),
        ({}, ("/.dockerenv",), "overlay", "docker"),
        ({}, ("/.dockerenv",), "ext4", None),  # a virtual machine made from an image
    ],
)
def test_runtime(
    environ: dict[str, str], files: tuple[str, ...], root: str, expected: str | None
) -> None:
    """A container is detected by its variables and files, which must match the root's type."""
    assert detect_runtime(environ, files, root) == expected


@pytest.mark.parametrize(
    ("mounts", "expected"),
    [
        ([ROOT], True),
        ([ROOT, RUN, RUN_LOCK], True),
        ([ROOT, RUN, Mount("/run/lock", "/lock", "tmpfs")], False),
        ([ROOT, Mount(LOCKS, "/", "tmpfs")], False),
        ([ROOT, Mount("/run/lock", "/", "ext4")], False),
        ([ROOT, Mount("/run/lock", "/", "ext4"), RUN_LOCK], True),
        ([ROOT, Mount("/run/lo", "/", "ext4")], True),
        ([], True),
    ],
)
def test_is_private(mounts: list[Mount], *, expected: bool) -> None:
    """A directory is shared with the host if it, or a folder above it, is mounted from there."""
    assert is_private(LOCKS, mounts) is expected
