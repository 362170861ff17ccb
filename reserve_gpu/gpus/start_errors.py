"""Error messages that explain why the NVIDIA driver does not start, and how to fix this.

`read_surroundings` checks the machine and the driver, and `advice` is a pure function of its
result. The advice never tells the user to do anything that would end another user's work.
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

# Paths that exist when the driver's kernel module is loaded. Some sandboxes lack /sys.
MODULE_FILES = ("/proc/driver/nvidia/version", "/sys/module/nvidia")
CONTROL, WSL_CONTROL = "/dev/nvidiactl", "/dev/dxg"
# Folders that might contain the driver's libraries. This Python's loader might not search them.
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
    "/usr/local/nvidia/lib64",  # GKE nodes
)
CUDA = "libcuda.so.1"
# In CUDA container images, folders with these names contain libraries that do not belong to the
# host's driver.
NO_DRIVER = ("compat", "stubs")
# Paths that exist only on a Jetson. The first belongs to its operating system, and the second to a
# Linux kernel module.
JETSON_FILES = ("/etc/nv_tegra_release", "/sys/module/nvgpu")

LET_THROUGH = "A sandbox, such as a coding agent's, must allow access to /dev/nvidia*"
ADVICE: dict[int | None, str] = {
    Code.LIBRARY_NOT_FOUND: "No NVIDIA driver found: libnvidia-ml.so.1 is missing. Install the "
    "driver, or start the container with GPU access (docker run --gpus all).",
    Code.DRIVER_NOT_LOADED: "The NVIDIA driver's kernel module is not loaded. Ask the "
    "administrator to load it (modprobe nvidia).",
    Code.LIB_RM_VERSION_MISMATCH: "The NVIDIA driver was updated, but its old kernel module is "
    "still loaded. Programs that use a GPU keep running, but new ones can't start. Once they have "
    "ended, the administrator can reload the module or reboot. A container must not contain its "
    "own driver library.",
    Code.OPERATING_SYSTEM: "The operating system blocks access to the NVIDIA driver. In a "
    f"container, start it with GPU access (docker run --gpus all). {LET_THROUGH}.",
    Code.NO_PERMISSION: "This user is not allowed to use the NVIDIA driver. Ask the administrator "
    "for access to /dev/nvidia*.",
    Code.FUNCTION_NOT_FOUND: "The NVIDIA driver is too old for the installed nvidia-ml-py. Update "
    "the driver, or ask the administrator to update it.",
    # https://github.com/NVIDIA/nvidia-container-toolkit/issues/48
    Code.UNKNOWN: "The NVIDIA driver does not start. Show the output of nvidia-smi to the "
    "administrator. If a container has lost its GPUs, for example after systemctl daemon-reload "
    "on its host, restart the container.",
}
DOES_NOT_START = (
    "The NVIDIA driver does not start. Show the output of nvidia-smi to the administrator."
)
NO_LINUX = "No NVIDIA driver found. Reservations need one, on Linux or WSL2."
JETSON = (
    "This Jetson's driver lacks NVML (libnvidia-ml.so.1), which reservations need. Newer "
    "versions of JetPack include it. CUDA works without NVML, but GPUs can't be reserved."
)
NO_NVML = (
    "The NVIDIA driver's CUDA library was found, but its NVML (libnvidia-ml.so.1) was not. A "
    "container needs NVIDIA_DRIVER_CAPABILITIES=compute,utility. Outside a container, install the "
    "NVML library of the driver's version (Debian: libnvidia-ml1), or add its folder to "
    "LD_LIBRARY_PATH."
)
NO_LIBRARY = (
    "The NVIDIA driver is loaded on this machine, but libnvidia-ml.so.1 was not found. Start the "
    "container with GPU access (docker run --gpus all). Outside a container, add the library's "
    "folder to LD_LIBRARY_PATH before Python starts."
)
MISSING = (
    "The NVIDIA driver is loaded on this machine, but /dev/nvidiactl is hidden from this process. "
    f"{LET_THROUGH} (or run this outside the sandbox). A container needs GPU access (docker run "
    "--gpus all). Otherwise, the administrator can create the device files (nvidia-modprobe)."
)
CLOSED = (
    "The NVIDIA driver is loaded on this machine, but this process can't open /dev/nvidiactl "
    "({}). " + LET_THROUGH + " (or run this outside the sandbox). If a container has lost its "
    "GPUs, for example after systemctl daemon-reload on its host, restart the container. "
    "Otherwise, ask the administrator for access."
)
WSL_MISSING = (
    "This process can't see the Windows GPU: /dev/dxg is hidden or missing. A sandbox, such as a "
    "coding agent's, must allow access to it. Otherwise, update the NVIDIA driver for Windows."
)
MAY_BE_HIDDEN = " In a container or a sandbox, it may be loaded but hidden."


class Surroundings(NamedTuple):
    """The machine and its NVIDIA driver, as far as this process can see them.

    Attributes:
        is_linux: Whether the operating system is Linux, including WSL2.
        is_wsl: Whether this process is running under WSL2.
        is_loaded: Whether this process can see that the driver's kernel module is loaded.
        control_error: The errno from opening the driver's control file, or 0 if it can be opened.
        has_cuda: Whether the driver's CUDA library exists.
        is_jetson: Whether this machine is a Jetson.
        is_inside: Whether this process is in a PID namespace other than the initial one.
        unloadable: The loader's error for each copy of the NVML library, or None if one was loaded.
    """

    is_linux: bool = True
    is_wsl: bool = False
    is_loaded: bool = False
    control_error: int = 0
    has_cuda: bool = False
    is_jetson: bool = False
    is_inside: bool = False
    unloadable: Sequence[str] | None = None


def explain(code: int | None, message: str, unloadable: Sequence[str] | None) -> DriverError:
    """Return an error that explains why the driver does not start, and how to fix this.

    Args:
        code: NVML's error code, or None if NVML did not answer.
        message: NVML's error message.
        unloadable: The loader's error for each copy of the NVML library, or None if one was loaded.
    """
    around = read_surroundings(unloadable)
    kind = NoDriverError if is_without_driver(code, around) else DriverError
    return kind(f"{advice(code, around)} [{message}]")


def is_without_driver(code: int | None, around: Surroundings) -> bool:
    """Return whether this process has no driver at all, so that CUDA can't use a GPU either."""
    if code == Code.LIBRARY_NOT_FOUND and around.unloadable is not None:
        return not (around.has_cuda or around.is_jetson or around.unloadable)
    return code in (Code.LIBRARY_NOT_FOUND, Code.DRIVER_NOT_LOADED)


def advice(code: int | None, around: Surroundings) -> str:
    """Return the likely cause and its fix in one line.

    Args:
        code: NVML's error code, or None if NVML did not answer.
        around: The machine and its driver, as far as this process can see them.
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
    if around.unloadable is None:  # the library was loaded, and returned the error itself
        return ADVICE[Code.LIBRARY_NOT_FOUND]
    if around.unloadable:
        reason = sanitize(around.unloadable[0], REASON_LIMIT)
        return f"This Python can't load the NVIDIA driver's library: {reason}."
    if around.is_jetson:
        return JETSON
    if around.has_cuda:
        return NO_NVML
    return NO_LIBRARY if around.is_loaded else ADVICE[Code.LIBRARY_NOT_FOUND]


def read_surroundings(unloadable: Sequence[str] | None = None) -> Surroundings:
    """Check what this process can see of the machine and its driver.

    Args:
        unloadable: The loader's error for each copy of the NVML library, or None if one was loaded.
    """
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
    """Return the folders that might contain a driver library."""
    with suppress(OSError), open("/etc/ld.so.cache", "rb") as cached:
        folders = re.findall(rb"(/[^\0]*)/" + re.escape(name.encode()) + rb"\0", cached.read())
        return [*dict.fromkeys([*map(os.fsdecode, folders), *FOLDERS])]
    return [*FOLDERS]


def _error_of(path: str) -> int:
    """Try to open a file, and return the errno, or 0 if the file can be opened.

    Calling access(2) is not enough. It succeeds under Landlock, which denies only open(2).
    """
    try:
        os.close(os.open(path, os.O_RDWR | getattr(os, "O_CLOEXEC", 0)))
    except OSError as error:
        return error.errno or errno.EIO
    return 0


def _has_cuda() -> bool:
    """Return whether the driver's libcuda.so.1 exists.

    This does not load the library, because loading it might start the driver.
    """
    configured = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    folders = [*filter(None, configured), *library_folders(CUDA)]
    return any(
        os.path.exists(os.path.join(folder, CUDA))
        for folder in folders
        if not any(name in folder.split("/") for name in NO_DRIVER)
    )
