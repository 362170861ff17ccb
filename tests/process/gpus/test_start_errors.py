"""Why the driver does not start, and what helps: by what a process can see of it."""

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
HAS_NO_MOUNTS = shutil.which("unshare") is None or os.geteuid() != 0


# -- the whole command -----------------------------------------------------------------------------

needs_mounts = pytest.mark.skipif(HAS_NO_MOUNTS, reason="needs root, for mounts of its own")
MOUNTS = 'mount --make-rprivate / && {} && exec "$@"'


def run(machine: Machine, script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Reserve a GPU in a mount namespace of its own, after the script."""
    reserve = [sys.executable, "-m", "reserve_gpu", "run", "--", "true"]
    line = ["unshare", "-m", "sh", "-c", MOUNTS.format(script), "_", *reserve]
    return machine.command(*line, PYTHONPATH=str(ROOT), **environment)


@needs_mounts
@pytest.mark.parametrize("code", [9, 999])
def test_a_sandbox_that_hides_the_device_files(machine: Machine, code: int) -> None:
    """If /proc shows a driver and /dev does not, the message says so and advises no reboot."""
    machine.write(f"fail nvmlInitWithFlags * {code}\ngpu\n")
    version = "mkdir /proc/driver/nvidia && touch /proc/driver/nvidia/version"
    done = run(machine, f"mount -t tmpfs tmpfs /proc/driver && {version}")
    if os.path.exists("/dev/nvidiactl"):
        pytest.skip("there is an NVIDIA driver here")
    assert done.returncode == 69
    assert "/dev/nvidiactl is hidden from this process" in done.stderr
    assert "reboot" not in done.stderr


@needs_mounts
@pytest.mark.parametrize("folder", ["/run/opengl-driver/lib", "/usr/local/nvidia/lib64"])
def test_a_library_where_the_loader_does_not_look(machine: Machine, folder: str) -> None:
    """The driver's library is loaded from the folder where a system has it."""
    libraries = machine.environ()["LD_LIBRARY_PATH"].split(":")[0]
    above = "/run" if folder.startswith("/run") else "/usr/local"
    script = f"mount -t tmpfs tmpfs {above} && mkdir -p {folder} && cp {libraries}/*.so.1 {folder}"
    done = run(machine, script, LD_LIBRARY_PATH="")
    assert done.returncode == 0, done.stderr


def test_cuda_without_nvml(machine: Machine, tmp_path: Path) -> None:
    """A container without NVML is told which capability it lacks, and its GPUs are hidden."""
    libraries = machine.environ()["LD_LIBRARY_PATH"].split(":")[0]
    shutil.copy(f"{libraries}/libcuda.so.1", tmp_path)
    with machine.child(LD_LIBRARY_PATH=str(tmp_path)) as child:
        answer = child.reserve()
    assert answer.error == "DriverError"
    assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in answer.text
