"""Detect containers, and directories that are private to a container."""

import os
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple

from reserve_gpu.system import procfs, settings

UNKNOWN = "container"  # name for an unknown container runtime
# Environment variables, and the container runtimes that set them.
VARIABLES = {
    "APPTAINER_CONTAINER": "apptainer",
    "APPTAINER_NAME": "apptainer",
    "SINGULARITY_CONTAINER": "apptainer",  # Apptainer was formerly named Singularity
    "SINGULARITY_NAME": "apptainer",
    "DISTROBOX_ENTER_PATH": "distrobox",
    "TOOLBOX_PATH": "toolbox",
    "FLATPAK_ID": "flatpak",
}
# Files that exist only in a running container, and the runtimes that create them.
FILES = {
    "/run/.toolboxenv": "toolbox",
    "/run/.containerenv": "podman",
    "/run/host/container-manager": UNKNOWN,  # https://systemd.io/CONTAINER_INTERFACE/
}
# Files in container images, and the runtimes that use these images. A virtual machine or WSL
# distribution that was created from an image also contains these files. So they only count if the
# root file system has a type that such machines do not use.
FILES_OF_IMAGES = {
    "/.singularity.d": "apptainer",
    "/.dockerenv": "docker",
    "/.flatpak-info": "flatpak",
}
ROOTS_OF_IMAGES = (
    *("overlay", "squashfs", "tmpfs", "fuse.fuse-overlayfs", "fuse.overlayfs"),
    *("fuse.squashfuse", "fuse.squashfuse_ll"),
)
# The environment variable that names the container runtime: https://systemd.io/CONTAINER_INTERFACE/
CONTAINER = "container"
KINDS = ("docker", "podman", "distrobox", "toolbox", "apptainer", "flatpak")
# File system types that are private to one container.
OWN_FILE_SYSTEMS = ("tmpfs", "ramfs", "overlay")

HOSTS_DIRECTORY = "/run/lock/reserve_gpu"  # the host's default lock directory
# Instructions for making the host's lock directory visible in a container, by runtime.
VOLUME = "-v {0}:{0}"
BIND = {
    "apptainer": "start it with --bind {0}",
    "docker": f"start it with {VOLUME}",
    "podman": f"start it with {VOLUME}",
    "distrobox": "create it with --volume {0}:{0}",
    "toolbox": "set RESERVE_GPU_LOCK_DIR=/run/host{0}",
}
BIND_ANY = "mount the host's {0} into all containers, and set RESERVE_GPU_LOCK_DIR to it"


class Mount(NamedTuple):
    """A mount that is listed in /proc/self/mountinfo.

    Attributes:
        point: The path of the mount point.
        root: The path of the mounted folder within its file system; `/` for the entire file system.
        file_system: The file system type.
    """

    point: str
    root: str
    file_system: str


def container() -> str | None:
    """Return the name of this container's runtime.

    A process in its own PID namespace counts as being in a container even if nothing else indicates
    a container. WSL2 is an exception, because each WSL2 distribution has its own PID namespace
    (https://github.com/intel/gprofiler/issues/143). Conversely, Apptainer, distrobox, toolbox and
    `docker run --pid=host` use the host's PID namespace, so their containers are only detected by
    other signs.

    Returns:
        The runtime's name, `container` if the runtime is unknown, or None outside of a container.
    """
    return _container(_mounts())


def _container(mounts: Iterable[Mount]) -> str | None:
    has_own_pids = procfs.pid_namespace() not in (None, procfs.INITIAL_PID_NAMESPACE)
    files = [path for path in (*FILES, *FILES_OF_IMAGES) if os.path.lexists(path)]
    runtime = detect_runtime(os.environ, files, nearest_mount("/", mounts).file_system)
    return runtime or (UNKNOWN if has_own_pids and not procfs.is_wsl() else None)


def bind_instruction(path: str) -> str:
    """Return an instruction for making the host's lock directory visible in this container.

    Args:
        path: The lock directory in this container. If RESERVE_GPU_LOCK_DIR is set, the host is
            assumed to use the same directory.
    """
    host_directory = path if os.environ.get(settings.LOCK_DIRECTORY) else HOSTS_DIRECTORY
    instruction = BIND.get(container() or "", BIND_ANY).format(host_directory)
    is_complete = path == host_directory or settings.LOCK_DIRECTORY in instruction
    variable = f"{settings.LOCK_DIRECTORY}={host_directory}"
    return instruction if is_complete else f"{instruction}, and set {variable} in it"


def detect_runtime(environ: Mapping[str, str], files: Collection[str], root: str) -> str | None:
    """Return a process's container runtime, or None if nothing indicates a container.

    Args:
        environ: The environment variables of the process.
        files: The paths in `FILES` and `FILES_OF_IMAGES` that exist for the process.
        root: The type of the root file system.
    """
    signs = [name for variable, name in VARIABLES.items() if environ.get(variable)]
    signs += [name for path, name in FILES.items() if path in files]
    if root in ROOTS_OF_IMAGES:
        signs += [name for path, name in FILES_OF_IMAGES.items() if path in files]
    if name := environ.get(CONTAINER):
        signs.append(name if name in KINDS else UNKNOWN)
    return signs[0] if signs else None


def is_any_private(paths: Iterable[str]) -> bool:
    """Return whether this is a container and any of the directories is private to it.

    Args:
        paths: The absolute paths of the directories.
    """
    mounts = _mounts()
    if _container(mounts) is None:
        return False
    return any(_is_private(os.path.realpath(path), mounts) for path in paths)


def _is_private(path: str, mounts: Iterable[Mount]) -> bool:
    if not is_private(path, mounts):
        return False
    if procfs.pid_namespace() == procfs.INITIAL_PID_NAMESPACE:
        with suppress(OSError):  # only root can read /proc/1/root
            return not os.path.samefile(path, f"/proc/1/root{path}")
    return True


def is_private(path: str, mounts: Iterable[Mount]) -> bool:
    """Return whether a directory is on a file system that is private to this container.

    A container's root file system and its temporary file systems are private. A directory that is
    shared with the host is either a mount point itself or inside a mounted host directory.

    Args:
        path: The directory's absolute path, without symbolic links.
        mounts: All mounts of the container, in the order in which they were mounted.
    """
    nearest = nearest_mount(path, mounts)
    if nearest.point in ("", "/"):
        return True
    is_folder = nearest.root != "/"
    return nearest.point != path and not is_folder and nearest.file_system in OWN_FILE_SYSTEMS


def nearest_mount(path: str, mounts: Iterable[Mount]) -> Mount:
    """Return the innermost mount that contains a path.

    If several mounts have the same mount point, the result is the last of them.
    """
    nearest = Mount("", "/", "")
    for mount in mounts:
        is_above = f"{path.rstrip('/')}/".startswith(f"{mount.point.rstrip('/')}/")
        if is_above and len(mount.point) >= len(nearest.point):
            nearest = mount
    return nearest


def _mounts() -> list[Mount]:
    # The format is documented in Linux, Documentation/filesystems/proc.rst,
    # "/proc/<pid>/mountinfo".
    mounts: list[Mount] = []
    with suppress(OSError), open("/proc/self/mountinfo", encoding="utf-8") as lines:
        for line in lines:
            fields, _, rest = line.partition(" - ")
            with suppress(ValueError, IndexError):
                root, point = fields.split()[3:5]
                if "\\" in line:
                    root, point = _unescape(root), _unescape(point)
                mounts.append(Mount(point, root, rest.split()[0]))
    return mounts


def _unescape(path: str) -> str:
    """Decode the octal escapes that Linux uses for white space and backslashes in a path."""
    for letter in " \t\n\\":
        path = path.replace(f"\\{ord(letter):03o}", letter)
    return path
