"""Tests of drivers whose files are hidden from a process, or in an unusual place."""

from __future__ import annotations

import os
import shutil
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.machine import ROOT

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

    from tests.support.machine import Machine

needs_mounts = pytest.mark.skipif(
    shutil.which("unshare") is None or os.geteuid() != 0, reason="needs root, for mounts"
)
MOUNTS = 'mount --make-rprivate / && {} && exec "$@"'


def reserve_with_mounts(
    machine: Machine, script: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Reserve a GPU in a mount namespace of its own, after a script that mounts."""
    reserve = [sys.executable, "-m", "reserve_gpu", "run", "--", "true"]
    line = ["unshare", "-m", "sh", "-c", MOUNTS.format(script), "_", *reserve]
    return machine.command(*line, PYTHONPATH=str(ROOT), **environment)


@needs_mounts
def test_a_sandbox_that_hides_the_device_files(machine: Machine) -> None:
    """The error says that the driver is loaded, but that its device file is hidden."""
    machine.write("fail nvmlInitWithFlags * 999\ngpu\n")
    version = "mkdir /proc/driver/nvidia && touch /proc/driver/nvidia/version"
    done = reserve_with_mounts(machine, f"mount -t tmpfs tmpfs /proc/driver && {version}")
    if os.path.exists("/dev/nvidiactl"):
        pytest.skip("this machine has an NVIDIA driver")
    assert done.returncode == 69
    assert "/dev/nvidiactl is hidden" in done.stderr


@needs_mounts
def test_a_library_outside_the_loaders_path(machine: Machine) -> None:
    """The driver's library is loaded from a folder that the loader does not search."""
    libraries = machine.environ()["LD_LIBRARY_PATH"].split(":")[0]
    folder = "/run/opengl-driver/lib"
    script = f"mount -t tmpfs tmpfs /run && mkdir -p {folder} && cp {libraries}/*.so.1 {folder}"
    done = reserve_with_mounts(machine, script, LD_LIBRARY_PATH="")
    assert done.returncode == 0, done.stderr


def test_cuda_without_nvml(machine: Machine, tmp_path: Path) -> None:
    """The error in a container with CUDA but without NVML contains the missing capability."""
    libraries = machine.environ()["LD_LIBRARY_PATH"].split(":")[0]
    shutil.copy(f"{libraries}/libcuda.so.1", tmp_path)
    with machine.child(LD_LIBRARY_PATH=str(tmp_path)) as child:
        answer = child.reserve()
    assert answer.error == "DriverError"
    assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in answer.text
