"""Explain why the driver does not start for this process, and how to fix it.

The surroundings of the process are read once, as a value, and the advice is a pure function of it.
Following the advice never ends the work of other users.
"""

import errno
import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from reserve_gpu.gpus.codes import Code
from reserve_gpu.model.errors import REASON_LIMIT, DriverError, NoDriverError
from reserve_gpu.model.untrusted import sanitize
from reserve_gpu.system import procfs

# Each is there while the kernel module is loaded; /sys is missing from some sandboxes.
MODULE_FILES = ("/proc/driver/nvidia/version", "/sys/module/nvidia")
CONTROL, WSL_CONTROL = "/dev/nvidiactl", "/dev/dxg"
# Folders of the driver's libraries that the loader of this Python may not search.
FOLDERS = (
    "/usr/lib/wsl/lib",
    "/run/opengl-driver/lib",  # NixOS
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu/nvidia/current",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu/nvidia",
    "/usr/lib/aarch64-linux-gnu/tegra",  # Jetson
    "/usr/lib64",
    "/usr/lib64/nvidia",
    "/usr/lib",
    "/usr/lib/nvidia",
    "/usr/local/nvidia/lib64",  # nodes of GKE
)
CUDA = "libcuda.so.1"
# CUDA's images have libraries in folders of these names that don't belong to the host's driver.
NO_DRIVER = ("compat", "stubs")
# Files of a Jetson: of its system, and of the kernel it runs.
JETSON_FILES = ("/etc/nv_tegra_release", "/sys/module/nvgpu")

LET_THROUGH = "A sandbox, as of a coding agent, has to let through /dev/nvidia*"
ADVICE: dict[int | None, str] = {
    Code.LIBRARY_NOT_FOUND: "No NVIDIA driver here: libnvidia-ml.so.1 was not found. Install the "
    "driver, or start the container with GPU access (docker run --gpus all).",
    Code.DRIVER_NOT_LOADED: "The NVIDIA driver's kernel module is not loaded. Ask the "
    "administrator to load it (modprobe nvidia).",
    Code.LIB_RM_VERSION_MISMATCH: "The NVIDIA driver was updated while its old kernel module is "
    "running. Programs that use a GPU go on, but no new one can start. When they have ended, the "
    "administrator can reload the module or reboot. A container must not bring a driver library "
    "of its own.",
    Code.OPERATING_SYSTEM: "The operating system blocks access to the NVIDIA driver. In a "
    f"container, start it with GPU access (docker run --gpus all). {LET_THROUGH}.",
    Code.NO_PERMISSION: "This user may not use the NVIDIA driver. Ask the administrator for access "
    "to /dev/nvidia*.",
    Code.FUNCTION_NOT_FOUND: "Update the driver, or ask the administrator to: it is too old for "
    "the installed nvidia-ml-py.",
    # https://github.com/NVIDIA/nvidia-container-toolkit/issues/48
    Code.UNKNOWN: "The NVIDIA driver does not start. Show the administrator what nvidia-smi says. "
    "A container that has lost its GPUs, as after systemctl daemon-reload on its host, has to be "
    "restarted.",
}
DOES_NOT_START = "The NVIDIA driver does not start. Show the administrator what nvidia-smi says."
NO_LINUX = "No NVIDIA driver here. Reservations need one, on Linux or WSL2."
JETSON = (
    "The driver of this Jetson has no NVML (libnvidia-ml.so.1), by which GPUs are reserved. Newer "
    "versions of JetPack have it. CUDA works without it, and without a reservation."
)
NO_NVML = (
    "CUDA's part of the NVIDIA driver is here, but its NVML (libnvidia-ml.so.1) was not found. A "
    "container needs NVIDIA_DRIVER_CAPABILITIES=compute,utility. Elsewhere install NVML in the "
    "driver's version (Debian: libnvidia-ml1), or add its folder to LD_LIBRARY_PATH."
)
NO_LIBRARY = (
    "The NVIDIA driver is loaded on this machine, but libnvidia-ml.so.1 was not found here. Start "
    "the container with GPU access (docker run --gpus all). Outside of one, add the library's "
    "folder to LD_LIBRARY_PATH before Python starts."
)
MISSING = (
    "The NVIDIA driver is loaded on this machine, but /dev/nvidiactl is hidden from this process. "
    f"{LET_THROUGH} (or run this outside of it), and a container needs GPU access (docker run "
    "--gpus all). Without either, the administrator can create the files (nvidia-modprobe)."
)
CLOSED = (
    "The NVIDIA driver is loaded on this machine, but this process may not open /dev/nvidiactl "
    "({}). " + LET_THROUGH + " (or run this outside of it). A container that has lost its GPUs, as "
    "after systemctl daemon-reload on its host, has to be restarted. Without either, ask the "
    "administrator for access."
)
WSL_MISSING = (
    "This process can't see the GPU of Windows: /dev/dxg is hidden or missing. A sandbox, as of a "
    "coding agent, has to let it through. Otherwise update the NVIDIA driver of Windows."
)
MAY_BE_HIDDEN = " In a container or a sandbox it may be loaded, but hidden."


class Surroundings(NamedTuple):
    """The parts of an NVIDIA driver that this process can see.

    Attributes:
        is_linux: Whether this is Linux, WSL2 included.
        is_wsl: Whether this is WSL2.
        is_loaded: Whether the kernel module is seen to be loaded.
        control_error: The error number of opening the driver's control file, 0 if it opens.
        has_cuda: Whether CUDA's library of the driver is found.
        is_jetson: Whether this is a Jetson.
        is_inside: Whether this process has a PID namespace of its own.
        unloadable: One loader error for each copy of NVML's library; None if a copy is loaded.
    """

    is_linux: bool = True
    is_wsl: bool = False
    is_loaded: bool = False
    control_error: int = 0
    has_cuda: bool = False
    is_jetson: bool = False
    is_inside: bool = False
    unloadable: Sequence[str] | None = None


def explain(code: int | None, said: str, unloadable: Sequence[str] | None) -> DriverError:
    """Return the error of a driver that does not start, with the fix.

    Args:
        code: NVML's error code, None if it did not answer.
        said: The error in words.
        unloadable: As in `Surroundings`.
    """
    around = look_around(unloadable)
    kind = NoDriverError if is_without_driver(code, around) else DriverError
    return kind(f"{advice(code, around)} [{said}]")


def is_without_driver(code: int | None, around: Surroundings) -> bool:
    """Return whether this process has no driver at all, so that CUDA can use no GPU either."""
    if code == Code.LIBRARY_NOT_FOUND and around.unloadable is not None:
        return not (around.has_cuda or around.is_jetson or around.unloadable)
    return code in (Code.LIBRARY_NOT_FOUND, Code.DRIVER_NOT_LOADED)


def advice(code: int | None, around: Surroundings) -> str:
    """Return one line with the cause and the fix.

    Args:
        code: NVML's error code, None if it did not answer.
        around: The surroundings of this process.
    """
    if not around.is_linux:
        return NO_LINUX if is_without_driver(code, around) else ADVICE.get(code, DOES_NOT_START)
    if code == Code.LIBRARY_NOT_FOUND:
        return _without_library(around)
    if code in (None, Code.LIB_RM_VERSION_MISMATCH, Code.FUNCTION_NOT_FOUND):
        return ADVICE.get(code, DOES_NOT_START)
    if around.is_wsl and around.control_error:
        return WSL_MISSING
    if around.is_loaded and around.control_error in (errno.ENOENT, errno.ENOTDIR):
        return MISSING
    if around.is_loaded and around.control_error:
        return CLOSED.format(os.strerror(around.control_error))
    if code == Code.DRIVER_NOT_LOADED and around.is_loaded:
        return DOES_NOT_START
    hidden = MAY_BE_HIDDEN if code == Code.DRIVER_NOT_LOADED and around.is_inside else ""
    return ADVICE.get(code, DOES_NOT_START) + hidden


def _without_library(around: Surroundings) -> str:
    if around.unloadable is None:  # the library itself gave this answer
        return ADVICE[Code.LIBRARY_NOT_FOUND]
    if around.unloadable:
        why = sanitize(around.unloadable[0], REASON_LIMIT)
        return f"The NVIDIA driver's library can't be loaded by this Python: {why}."
    if around.is_jetson:
        return JETSON
    if around.has_cuda:
        return NO_NVML
    return NO_LIBRARY if around.is_loaded else ADVICE[Code.LIBRARY_NOT_FOUND]


def look_around(unloadable: Sequence[str] | None = None) -> Surroundings:
    """Return the surroundings of this process."""
    is_wsl = procfs.is_wsl()
    return Surroundings(
        is_linux=sys.platform == "linux",
        is_wsl=is_wsl,
        is_loaded=any(map(os.path.exists, MODULE_FILES)),
        control_error=_error_of(WSL_CONTROL if is_wsl else CONTROL),
        has_cuda=_has_cuda(),
        is_jetson=any(map(os.path.exists, JETSON_FILES)),
        is_inside=procfs.pid_namespace() not in (None, procfs.INITIAL_PID_NAMESPACE),
        unloadable=unloadable,
    )


def library_folders(name: str) -> list[str]:
    """Return the folders in which a library of the driver may be."""
    with suppress(OSError), open("/etc/ld.so.cache", "rb") as cached:
        found = re.findall(rb"(/[^\0]*)/" + re.escape(name.encode()) + rb"\0", cached.read())
        return [*dict.fromkeys([*map(os.fsdecode, found), *FOLDERS])]
    return [*FOLDERS]


def _error_of(path: str) -> int:
    """Return the error number of opening a file, 0 if it opens.

    Landlock denies only the opening of a file, so no other test would do.
    """
    try:
        os.close(os.open(path, os.O_RDWR | getattr(os, "O_CLOEXEC", 0)))
    except OSError as error:
        return error.errno or errno.EIO
    return 0


def _has_cuda() -> bool:
    """Return whether the driver's libcuda.so.1 is there; it is not loaded, as that may start it."""
    own = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    folders = [*filter(None, own), *library_folders(CUDA)]
    return any(
        os.path.exists(os.path.join(folder, CUDA))
        for folder in folders
        if not any(name in folder.split("/") for name in NO_DRIVER)
    )
