"""Ask the system about processes, their users and what they use, and about namespaces."""

from __future__ import annotations

import os
import re
import sys
import time
from contextlib import ExitStack, suppress
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING

from reserve_gpu.model.clocks import Instant
from reserve_gpu.model.errors import COMMAND_LIMIT, TOO_MANY_FILES, ReserveGPUError
from reserve_gpu.system import accounts, settings
from reserve_gpu.system.forks import no_fork
from reserve_gpu.system.process_identity import command

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from reserve_gpu.model.devices import Process
    from reserve_gpu.model.holders import Holder

DESCRIPTORS = 12  # so many a look at the GPUs, or a reservation, opens at once
MOST_OPEN = 10_000  # descriptors of one user's processes that are read; each takes time
# The begin of $RESERVE_GPU_HELD: a pid, and its start time alone or as the first field of JSON.
HOLDER = re.compile(r'([0-9]{1,10})(?: (?:\{"began": )?([0-9]{1,20}))?(?=[ ,]|$)')
HOLDER_LIMIT = 60
INITIAL_PID_NAMESPACE = 0xEFFFFFFC  # PROC_PID_INIT_INO of the kernel's include/linux/proc_ns.h


def pid_namespace() -> int | None:
    """Return the inode of this process's PID namespace, None where there are none."""
    with suppress(OSError):
        return os.stat("/proc/self/ns/pid").st_ino
    return None


def mount_namespace() -> int | None:
    """Return the inode of this process's mount namespace, None if it can't be read."""
    with suppress(OSError):
        return os.stat("/proc/self/ns/mnt").st_ino
    return None


def sees_all_locks() -> bool:
    """Tell whether the kernel's list shows the locks of all PID namespaces."""
    return pid_namespace() == INITIAL_PID_NAMESPACE and os.access("/proc/locks", os.R_OK)


@cache
def is_wsl() -> bool:
    """Tell whether this is WSL2, beside which Windows and other virtual machines use the GPU."""
    with suppress(OSError), open("/proc/sys/kernel/osrelease", encoding="utf-8") as release:
        return "microsoft" in release.read().lower()
    return False


def sees_all_processes() -> bool:
    """Tell whether an empty list of NVML's means that there are no processes.

    Not in a PID namespace: drivers from 535.113 on leave out what is outside of it.
    """
    return pid_namespace() == INITIAL_PID_NAMESPACE and not is_wsl()


def control_group() -> bytes:
    """Return the directory of this process's control group, of version 2."""
    with suppress(OSError), open("/proc/self/cgroup", "rb") as groups:
        for line in groups:
            if line.startswith(b"0::"):
                return b"/sys/fs/cgroup" + line[len("0::") :].rstrip(b"\n")
    return b"/sys/fs/cgroup"


def unmapped_uid() -> int | None:
    """Return the UID that stands for all unknown users of a user namespace, else None.

    https://man7.org/linux/man-pages/man7/user_namespaces.7.html
    """
    with suppress(OSError, ValueError):
        with open("/proc/self/uid_map", encoding="utf-8") as uid_map:
            if uid_map.read().split() == ["0", "0", "4294967295"]:
                return None
        with open("/proc/sys/kernel/overflowuid", encoding="utf-8") as overflow:
            return int(overflow.read())
    return None


def machine_name() -> str:
    """Return the name of the machine; the module socket, which knows it too, loads slowly."""
    return os.uname().nodename if hasattr(os, "uname") else os.environ.get("COMPUTERNAME", "?")


def is_here(name: str) -> bool:
    """Tell whether that is a name of this machine."""
    own = machine_name()
    return name in {own, own.partition(".")[0], "localhost"}


def memory_mib() -> float | None:
    """Return the memory of the machine, as MemTotal of /proc/meminfo; None where that is hidden."""
    with suppress(AttributeError):  # on Windows
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**20
    return None


def boot_clock_ns() -> int:
    """Return the nanoseconds since the boot. Only a time namespace has another clock."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def now() -> Instant:
    """Return this instant by both clocks."""
    return Instant(time.time(), time.clock_gettime(time.CLOCK_BOOTTIME))


def uid_of(pid: int) -> int | None:
    """Return the UID of the user that started a process; None if it can't be seen from here.

    That is the real UID. The effective one, which owns /proc/PID, is root's while a user runs `su`.
    """
    with suppress(OSError):
        return _uids(pid)[0]
    with suppress(OSError):  # hidepid=1 hides all but the owner
        return os.stat(f"/proc/{pid}").st_uid or None
    return None


def all_uids() -> set[str] | None:
    """Return the real, effective and saved UIDs of all processes; None if some can't be seen.

    /proc may hide other users' processes (hidepid), and a user namespace their UIDs.
    """
    if unmapped_uid() is not None or not os.path.exists("/proc/1"):
        return None
    uids: set[str] = set()
    for pid in _pids():
        with suppress(OSError):
            owner = os.stat(f"/proc/{pid}").st_uid
            # The files of a process that can't be traced belong to root.
            uids |= {str(owner)} if owner else set(map(str, _uids(pid)))
    return uids


def user_of(pid: int) -> str | None:
    """Return the user that runs a process, None if it can't be seen from here."""
    uid = uid_of(pid)
    return None if uid is None else user_name(uid)


def user_name(uid: int) -> str:
    """Return a user's name, `uid 1234` if the system has none."""
    entry = accounts.find_user(uid)
    return entry.pw_name if entry else f"uid {uid}"


def with_user(holder: Holder) -> Holder:
    """Return the holder with its user: the system's word goes before the record's.

    Asked late, as looking up a user can take long where users come from a server.
    """
    return holder._replace(owner=user_of(holder.listed_pid) if holder.listed_pid else None)


def own_processes(
    words: Sequence[str], pids: Iterable[str | int] | None = None, uid: int | None = None
) -> Iterator[tuple[int, list[str]]]:
    """Yield the processes of this user that run with these words, with the words that follow.

    words: the first ones after the program's own name. pids: which to look at, None for all.
    uid: of another user, for root.
    A program such as `su` runs as another user, with words, files and variables of whoever started
    it: real, effective and saved UID are that user's.
    """
    own, size = os.geteuid() if uid is None else uid, 1 + len(words)
    for pid in _pids() if pids is None else pids:
        with suppress(OSError):
            if os.stat(f"/proc/{pid}").st_uid == own and {*_uids(pid)} == {own}:
                line = _words(pid)
                if line[1:size] == [*words]:
                    yield int(pid), line[size:]


def shows_files(pid: int) -> bool:
    """Tell whether it can be seen what a process has open: not another user's.

    Root sees that too, but not in a container, where it mostly has no CAP_SYS_PTRACE:
    https://man7.org/linux/man-pages/man2/ptrace.2.html, "Ptrace access mode checking".
    """
    with suppress(OSError):
        os.readlink(f"/proc/{pid}/exe")
        return True
    return False


def has_locked(pid: int | str, file: os.stat_result) -> bool:
    """Tell whether a process of this user has that very file open, and locked by that opening."""
    with suppress(OSError):  # it has ended, or is another user's
        for number in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                is_file = os.path.samestat(os.stat(f"/proc/{pid}/fd/{number}"), file)
                if is_file and _has_flock(pid, number):  # it has not only looked
                    return True
    return False


def _has_flock(pid: int | str, number: str) -> bool:
    """Return whether a descriptor of a process has its file locked with flock(2)."""
    with open(f"/proc/{pid}/fdinfo/{number}", encoding="utf-8") as info:
        return "FLOCK" in info.read()


class LockedFiles:
    """The files that processes have locked with flock(2), by device and inode.

    Each process is read once. A user can open any number of files, so only `MOST_OPEN` descriptors
    of each user's processes are read.

    Args:
        inodes: The inodes of the files that matter.
    """

    def __init__(self, inodes: Collection[int]) -> None:
        self._inodes = inodes
        self._left: dict[int | None, int] = {}  # descriptors that may still be read, by user
        self._known: dict[int, tuple[set[tuple[int, int]], bool]] = {}

    def has(self, pid: int, file: os.stat_result) -> bool | None:
        """Return whether a process has a file locked; None if this user can't see that."""
        found, is_all = self._files_of(pid)
        return True if (file.st_dev, file.st_ino) in found else False if is_all else None

    def holders(self) -> dict[tuple[int, int], int]:
        """Return a process for each locked file, of the processes whose files this user can see."""
        holders: dict[tuple[int, int], int] = {}
        for pid in map(int, _pids()):
            for file in self._files_of(pid)[0]:
                holders.setdefault(file, pid)
        return holders

    def _files_of(self, pid: int) -> tuple[set[tuple[int, int]], bool]:
        """Return the files that a process has locked, and whether those are all."""
        if pid not in self._known:
            found: set[tuple[int, int]] = set()
            self._known[pid] = found, shows_files(pid) and self._read(pid, found)
        return self._known[pid]

    def _read(self, pid: int, found: set[tuple[int, int]]) -> bool:
        uid = uid_of(pid)
        left = self._left.get(uid, MOST_OPEN)
        if not left:
            return False
        with suppress(OSError), os.scandir(f"/proc/{pid}/fd") as descriptors:  # it may have ended
            for descriptor in islice(descriptors, left):
                left -= 1
                with suppress(OSError):
                    file = os.stat(descriptor.path)
                    is_wanted = file.st_ino in self._inodes
                    if is_wanted and _has_flock(pid, descriptor.name):
                        found.add((file.st_dev, file.st_ino))
        self._left[uid] = left
        return left > 0


def require_descriptors() -> None:
    """Raise ReserveGPUError where this process can't open some more files.

    Not on a thread where signal handlers run: one that raises would leave a file open.
    """
    with no_fork, ExitStack() as opened:  # else a child would keep them
        try:
            for _ in range(DESCRIPTORS):
                opened.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        except OSError:
            raise ReserveGPUError(TOO_MANY_FILES) from None


def _stat(pid: int) -> tuple[str, int, int, bool] | None:
    """Return a process's name, its parent, when it began, and whether it is a zombie.

    It began so many ticks after the boot. A zombie has no threads left that could be killed.
    None if it has ended, or is hidden (hidepid). Documentation/filesystems/proc.rst,
    "/proc/<pid>/stat": the name may have blanks and brackets.
    """
    with suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/stat", "rb") as file:
        name, _, rest = file.read().partition(b"(")[2].rpartition(b")")
        fields = rest.split()
        is_zombie = fields[0] == b"Z" and int(fields[17]) <= 1
        return name.decode(errors="replace"), int(fields[1]), int(fields[19]), is_zombie
    return None


def _uids(pid: int | str) -> list[int]:
    """Return the real, effective and saved UID of a process. Raises OSError."""
    with open(f"/proc/{pid}/status", "rb") as status:
        line = next((line for line in status if line.startswith(b"Uid:")), b"")
        return [int(uid) for uid in line.split()[1:4]]


def _words(pid: int | str) -> list[str]:
    """Return the words of a process's command; none if it has ended, or is hidden."""
    with suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return os.fsdecode(file.read(COMMAND_LIMIT)).removesuffix("\0").split("\0")
    return []


def lineage(pid: int) -> list[int]:
    """Return the process and its ancestors, as far as they live and can be seen."""
    line, stat = [pid], _stat(pid)
    while stat and (above := _stat(stat[1])) and above[2] <= stat[2]:  # else it is a later one
        line.append(stat[1])
        stat = above
    return line


def began(pid: int) -> float | None:
    """Return when a process began, in seconds since the epoch; None if it is not there."""
    at, (wall, boot) = began_boot(pid), now()
    return None if at is None else wall - boot + at


def began_boot(pid: int) -> float | None:
    """Return the start time of a process, by the boot clock; None if it has ended."""
    stat = _stat(pid)
    return None if stat is None else stat[2] / os.sysconf("SC_CLK_TCK")


def stamp(pid: int) -> str:
    """Return a pid and its start time in clock ticks: together they name one process of a boot.

    The pid alone if the process has ended, or is hidden.
    """
    stat = _stat(pid)
    return str(pid) if stat is None else f"{pid} {stat[2]}"


def children() -> list[str]:
    """Return the processes below this one that live, as `python train.py (pid 4321)`."""
    parents = {pid: stat[1] for pid in map(int, _pids()) if (stat := _stat(pid))}
    below, more = {os.getpid()}, {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in more} - below:
        below |= more
    names = {pid: command(_words(pid)) for pid in sorted(below - {os.getpid()})}
    return [f"{name} (pid {pid})" for pid, name in names.items() if name]  # None of a zombie


def has_descendants() -> bool:
    """Return whether any other process descends from this one, or belongs to its session."""
    own = os.getpid()
    return any(is_below(pid, {own}) for pid in map(int, _pids()) if pid != own)


def _pids() -> list[str]:
    with suppress(OSError):  # as on Windows
        return [name for name in os.listdir("/proc") if name.isdecimal()]
    return []


def is_below(pid: int, pids: Collection[int | None]) -> bool:
    """Tell whether the process is one of these or descends from one, which is slow to find out.

    What `nohup ... &` has started in a notebook has another parent once its shell has ended, but
    still the session (setsid(2)) that Jupyter gives each kernel.
    """
    if not pids or pid in pids:
        return pid in pids
    with suppress(OSError):
        if os.getsid(pid) in pids:
            return True
    return any(above in pids for above in lineage(pid))


def with_uses(holders: Sequence[Holder], processes: Sequence[Process]) -> tuple[Holder, ...]:
    """Return the holders, each with what its processes use of a device, as far as is known.

    processes: all on the device.
    """
    used = uses(processes, {holder.listed_pid for holder in holders if holder.listed_pid})
    return tuple(holder._replace(used_mib=used.get(holder.listed_pid or 0)) for holder in holders)


def uses(processes: Sequence[Process], pids: Collection[int]) -> dict[int, float | None]:
    """Return what each process and its descendants use of a device, in MiB.

    processes: all on the device; each is its nearest ancestor's. None where it can't be known.
    """
    used: dict[int, float | None] = dict.fromkeys(pids, 0.0)
    for process in processes if used else ():  # whose each is is slow to find out
        line = [process.pid] if process.pid in used else lineage(process.pid)
        owner = next((pid for pid in line if pid in used), None)
        if owner is not None:
            before, more = used[owner], process.memory_mib
            used[owner] = None if before is None or more is None else before + more
    return used


def ancestors() -> set[int]:
    """Return the pids of this process and of its ancestors.

    A `reserve-gpu run` is one of them even if the processes between have ended, as under tmux: its
    variable is inherited, and names it.
    """
    return {held_by(), *lineage(os.getpid())} - {0}


def multiprocessing_parent() -> int | None:
    """Return the process that started this one with multiprocessing, None if none did."""
    multiprocessing = sys.modules.get("multiprocessing.process")
    parent = multiprocessing.parent_process() if multiprocessing else None
    return parent.pid if parent else None


def identified(process: Process) -> Process:
    """Return the process with its user and command, as far as they can be seen from here."""
    if (stat := _stat(process.pid)) is None:
        return process
    name = command(_words(process.pid)) or stat[0]
    process = process._replace(user=user_of(process.pid), command=name)
    if stat[3]:
        parent = identified(process._replace(pid=stat[1], command="a process"))
        return process._replace(zombie_of=f"{parent.command} (pid {parent.pid})")
    return process


def held_by() -> int:
    """Return the process whose reservation $RESERVE_GPU_HELD describes, 0 if there is none.

    Its start time tells it from a later process with the same pid. Older versions wrote none.
    """
    if not (found := HOLDER.match(os.environ.get(settings.HELD, "")[:HOLDER_LIMIT])):
        return 0
    pid, began = found.groups()
    now = stamp(int(pid))
    return int(pid) if began is None or now in (pid, f"{pid} {began}") else 0
