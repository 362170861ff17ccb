"""Recognize containers, and whether a directory belongs to one alone."""

import os
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple

from reserve_gpu.system import procfs, settings

UNKNOWN = "container"  # made by an unknown program
# Variables that a container sets for its processes, by the program that makes it.
VARIABLES = {
    "APPTAINER_CONTAINER": "apptainer",
    "APPTAINER_NAME": "apptainer",
    "SINGULARITY_CONTAINER": "apptainer",  # Apptainer's former name
    "SINGULARITY_NAME": "apptainer",
    "DISTROBOX_ENTER_PATH": "distrobox",
    "TOOLBOX_PATH": "toolbox",
    "FLATPAK_ID": "flatpak",
}
# Files that are there as long as a container runs.
FILES = {
    "/run/.toolboxenv": "toolbox",
    "/run/.containerenv": "podman",
    "/run/host/container-manager": UNKNOWN,  # https://systemd.io/CONTAINER_INTERFACE/
}
# Files that also stay in a virtual machine, or a WSL distribution, made of a container's files. So
# they count only if the root is of a kind that such a machine does not have.
FILES_OF_IMAGES = {
    "/.singularity.d": "apptainer",
    "/.dockerenv": "docker",
    "/.flatpak-info": "flatpak",
}
ROOTS_OF_IMAGES = (
    *("overlay", "squashfs", "tmpfs", "fuse.fuse-overlayfs", "fuse.overlayfs"),
    *("fuse.squashfuse", "fuse.squashfuse_ll"),
)
# Its value names the program that made the container. https://systemd.io/CONTAINER_INTERFACE/
CONTAINER = "container"
KINDS = ("docker", "podman", "distrobox", "toolbox", "apptainer", "flatpak")
# Types of file systems that belong to one container alone.
OWN_FILE_SYSTEMS = ("tmpfs", "ramfs", "overlay")

HOSTS_DIRECTORY = "/run/lock/reserve_gpu"  # the host's lock directory if it sets no other one
# How each of them gets the host's lock directory.
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
    """One line of /proc/self/mountinfo.

    Attributes:
        point: The path of the mount point.
        root: The folder of its file system that is mounted there, `/` for all of it.
        file_system: The type of the file system.
    """

    point: str
    root: str
    file_system: str


def container() -> str | None:
    """Return the program that made this container, `container` if it is unknown, None outside.

    A PID namespace alone is a container too, but not under WSL2, where each distribution has one
    (https://github.com/intel/gprofiler/issues/143). Apptainer, distrobox, toolbox and `docker run
    --pid=host` share the host's processes.
    """
    return _container(_mounts())


def _container(mounts: Iterable[Mount]) -> str | None:
    has_own_pids = procfs.pid_namespace() not in (None, procfs.INITIAL_PID_NAMESPACE)
    files = [path for path in (*FILES, *FILES_OF_IMAGES) if os.path.lexists(path)]
    found = kind(os.environ, files, nearest_mount("/", mounts).file_system)
    return found or (UNKNOWN if has_own_pids and not procfs.is_wsl() else None)


def how_to_bind(path: str) -> str:
    """Return the instruction that gives this container the host's lock directory.

    Args:
        path: The lock directory in this container. If it was set, the host has set it, too.
    """
    hosts = path if os.environ.get(settings.LOCK_DIRECTORY) else HOSTS_DIRECTORY
    how = BIND.get(container() or "", BIND_ANY).format(hosts)
    is_chosen = path == hosts or settings.LOCK_DIRECTORY in how
    return how if is_chosen else f"{how}, and set {settings.LOCK_DIRECTORY}={hosts} in it"


def kind(environ: Mapping[str, str], files: Collection[str], root: str) -> str | None:
    """Return the program that made a container, None without a sign of one.

    Args:
        environ: The environment of a process in it.
        files: Those of the files above that exist there.
        root: The type of the file system at `/`.
    """
    signs = [name for variable, name in VARIABLES.items() if environ.get(variable)]
    signs += [name for path, name in FILES.items() if path in files]
    if root in ROOTS_OF_IMAGES:
        signs += [name for path, name in FILES_OF_IMAGES.items() if path in files]
    if said := environ.get(CONTAINER):
        signs.append(said if said in KINDS else UNKNOWN)
    return signs[0] if signs else None


def is_any_private(paths: Iterable[str]) -> bool:
    """Return whether this is a container, and one of the directories is not its host's.

    Args:
        paths: Absolute paths.
    """
    mounts = _mounts()
    if _container(mounts) is None:
        return False
    return any(_is_private(os.path.realpath(path), mounts) for path in paths)


def _is_private(path: str, mounts: Iterable[Mount]) -> bool:
    if not is_own(path, mounts):
        return False
    if procfs.pid_namespace() == procfs.INITIAL_PID_NAMESPACE:
        with suppress(OSError):  # only root may read it
            return not os.path.samefile(path, f"/proc/1/root{path}")
    return True


def is_own(path: str, mounts: Iterable[Mount]) -> bool:
    """Return whether a directory belongs to a file system of this container alone.

    Its root and its temporary file systems belong to a container alone. A directory that was bound
    into it is a mount point, or part of a mounted folder of another file system.

    Args:
        path: An absolute path without links.
        mounts: All mounts of the container, in the order in which they were made.
    """
    nearest = nearest_mount(path, mounts)
    if nearest.point in ("", "/"):
        return True
    is_folder = nearest.root != "/"
    return nearest.point != path and not is_folder and nearest.file_system in OWN_FILE_SYSTEMS


def nearest_mount(path: str, mounts: Iterable[Mount]) -> Mount:
    """Return the mount in which a path lies, the last one of several at the same place."""
    nearest = Mount("", "/", "")
    for mount in mounts:
        is_above = f"{path.rstrip('/')}/".startswith(f"{mount.point.rstrip('/')}/")
        if is_above and len(mount.point) >= len(nearest.point):
            nearest = mount
    return nearest


def _mounts() -> list[Mount]:
    """Return the mounts. Documentation/filesystems/proc.rst, "/proc/<pid>/mountinfo"."""
    found: list[Mount] = []
    with suppress(OSError), open("/proc/self/mountinfo", encoding="utf-8") as lines:
        for line in lines:
            fields, _, rest = line.partition(" - ")
            with suppress(ValueError, IndexError):
                root, point = fields.split()[3:5]
                if "\\" in line:
                    root, point = _unescaped(root), _unescaped(point)
                found.append(Mount(point, root, rest.split()[0]))
    return found


def _unescaped(path: str) -> str:
    """Return a path without the kernel's octal escapes of white space and backslashes."""
    for letter in " \t\n\\":
        path = path.replace(f"\\{ord(letter):03o}", letter)
    return path
