"""Read information about processes, their users and open files, and namespaces from /proc."""

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
from reserve_gpu.model.untrusted import PIDS, sanitize
from reserve_gpu.system import accounts, settings
from reserve_gpu.system.forks import no_fork
from reserve_gpu.system.process_identity import command, environ_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from reserve_gpu.model.devices import Process
    from reserve_gpu.model.holders import Holder

CLOCK_READING_S = 0.1  # maximum seconds for reading both clocks
DESCRIPTORS = 12  # number of file descriptors that a snapshot or a reservation needs at a time
MOST_OPEN = 10_000  # maximum number of descriptors to read per user, to save time
# Matches the beginning of $RESERVE_GPU_HELD: a pid and, usually, the start time of the process. The
# start time is either a bare number or the first field of a JSON object.
HOLDER = re.compile(r'([0-9]{1,10})(?: (?:\{"began": )?([0-9]{1,20}))?(?=[ ,]|$)')
HOLDER_LIMIT = 60  # maximum length of the string that HOLDER matches, in characters
PARENT_LIMIT = 40  # maximum length of a zombie's parent's command in a message, in characters
EXITING = 0x4  # PF_EXITING in Linux's include/linux/sched.h
KILLED = 1 << 8  # SIGKILL in a bitmap of signals
STATUS_START = 1024  # number of bytes of /proc/PID/status that contain the UIDs
INITIAL_PID_NAMESPACE = 0xEFFFFFFC  # PROC_PID_INIT_INO in Linux's include/linux/proc_ns.h


def pid_namespace() -> int | None:
    """Return the inode of this process's PID namespace, or None if it can't be read."""
    with suppress(OSError):
        return os.stat("/proc/self/ns/pid").st_ino
    return None


def mount_namespace() -> int | None:
    """Return the inode of this process's mount namespace, or None if it can't be read."""
    with suppress(OSError):
        return os.stat("/proc/self/ns/mnt").st_ino
    return None


def sees_all_locks() -> bool:
    """Return whether /proc/locks lists the locks in all PID namespaces."""
    return pid_namespace() == INITIAL_PID_NAMESPACE and os.access("/proc/locks", os.R_OK)


@cache
def is_wsl() -> bool:
    """Return whether this machine is WSL2, which shares its GPUs with Windows and other VMs."""
    with suppress(OSError), open("/proc/sys/kernel/osrelease", encoding="utf-8") as release:
        return "microsoft" in release.read().lower()
    return False


def sees_all_processes() -> bool:
    """Return whether an empty process list from NVML means that no process is using the GPU.

    In a separate PID namespace, the list can be empty while processes are using the GPU, because
    drivers since 535.113 only list processes in the caller's PID namespace.
    """
    return pid_namespace() == INITIAL_PID_NAMESPACE and not is_wsl()


def control_group() -> bytes:
    """Return the directory of this process's control group (cgroup v2)."""
    with suppress(OSError), open("/proc/self/cgroup", "rb") as groups:
        for line in groups:
            if line.startswith(b"0::"):
                return b"/sys/fs/cgroup" + line[len("0::") :].rstrip(b"\n")
    return b"/sys/fs/cgroup"


def unmapped_uid() -> int | None:
    """Return the UID that stands for all unmapped users in a user namespace.

    Outside of user namespaces, the result is None.
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
    """Return the host name without importing the socket module, which loads slowly."""
    return os.uname().nodename if hasattr(os, "uname") else os.environ.get("COMPUTERNAME", "?")


def is_local_host(name: str) -> bool:
    """Return whether a host name refers to this machine."""
    host = machine_name()
    return name in {host, host.partition(".")[0], "localhost"}


def memory_mib() -> float | None:
    """Return the machine's memory in MiB (MemTotal in /proc/meminfo), or None on Windows."""
    with suppress(AttributeError):  # os.sysconf is missing on Windows
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**20
    return None


def boot_clock_ns() -> int:
    """Return the time since boot in nanoseconds. A time namespace can shift this clock."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def now() -> Instant:
    """Return the current time on the wall clock and on the boot clock.

    If the process is suspended between the readings, the wall clock seems to have been set. The
    clocks are then read again.
    """
    while True:
        before = time.clock_gettime(time.CLOCK_BOOTTIME)
        wall = time.time()
        boot = time.clock_gettime(time.CLOCK_BOOTTIME)
        if boot - before < CLOCK_READING_S:
            return Instant(wall, boot)


def uid_of(pid: int) -> int | None:
    """Return the real UID of a process, or None if it can't be read.

    The effective UID, which owns /proc/PID, is root's while a user is running `su`, so it is only a
    fallback.
    """
    with suppress(OSError):
        return _uids(pid)[0]
    with suppress(OSError):  # hidepid=1 hides everything except the owner of /proc/PID
        return os.stat(f"/proc/{pid}").st_uid or None
    return None


def all_uids() -> set[str] | None:
    """Return the real, effective and saved UIDs of all processes, or None if some are hidden.

    The mount option hidepid hides other users' processes, and a user namespace hides other users'
    UIDs.
    """
    if unmapped_uid() is not None or not os.path.exists("/proc/1"):
        return None
    uids: set[str] = set()
    for pid in _pids():
        with suppress(OSError):
            owner = os.stat(f"/proc/{pid}").st_uid
            # Root owns the /proc files of a process that can't be traced.
            uids |= {str(owner)} if owner else set(map(str, _uids(pid)))
    return uids


def user_of(pid: int) -> str | None:
    """Return the name of a process's user, or None if the user can't be read."""
    uid = uid_of(pid)
    return None if uid is None else user_name(uid)


def user_name(uid: int) -> str:
    """Return a user's name, or `uid 1234` if the user is unknown."""
    entry = accounts.find_user(uid)
    return entry.pw_name if entry else f"uid {uid}"


def with_owner(holder: Holder) -> Holder:
    """Return a copy of the holder with the owner and state that the operating system reports.

    The owner in the lock file's record is not trusted. The lookup is a separate step, because a
    directory server can take a long time to answer.
    """
    owner = user_of(holder.listed_pid) if holder.listed_pid else None
    return holder._replace(owner=owner, is_dying=is_dying(holder.listed_pid))


def with_file_owner(holder: Holder) -> Holder:
    """Return a copy of a holder that has ended, with the owner of its record's file."""
    owner = None if holder.record_owner is None else user_name(holder.record_owner)
    return holder._replace(owner=owner)


def own_processes(
    words: Sequence[str], pids: Iterable[str | int] | None = None, uid: int | None = None
) -> Iterator[tuple[int, list[str]]]:
    """Find one user's processes whose command lines start with the given arguments.

    The real, effective and saved UIDs of a process must all be the user's. Otherwise, a program
    such as `su` would match: it runs as another user, but with the arguments, files and variables
    of the user who started it.

    Args:
        words: The first arguments after the program's name.
        pids: The pids to check, or None for all.
        uid: The user's UID. Defaults to the effective UID of this process.

    Yields:
        The pid of a process, and its arguments after `words`.
    """
    user, size = os.geteuid() if uid is None else uid, 1 + len(words)
    for pid in _pids() if pids is None else pids:
        with suppress(OSError):
            if os.stat(f"/proc/{pid}").st_uid == user:
                line = _words(pid)  # compared first, because reading the UIDs is slower
                if line[1:size] == [*words] and {*_uids(pid)} == {user}:
                    yield int(pid), line[size:]


def shows_files(pid: int) -> bool:
    """Return whether this process can list another process's open files.

    It can if both processes belong to the same user. Root can list the open files of all processes,
    but usually not in a container, because root lacks CAP_SYS_PTRACE there.
    https://man7.org/linux/man-pages/man2/ptrace.2.html, "Ptrace access mode checking".
    """
    with suppress(OSError):
        os.readlink(f"/proc/{pid}/exe")
        return True
    return False


def has_locked(pid: int | str, file: os.stat_result) -> bool:
    """Return whether a process of this user has opened a file and locked it with flock(2)."""
    with suppress(OSError):  # the process has ended, or belongs to another user
        for number in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                is_file = os.path.samestat(os.stat(f"/proc/{pid}/fd/{number}"), file)
                if is_file and _has_flock(pid, number):  # an open file is not always locked
                    return True
    return False


def _has_flock(pid: int | str, number: str) -> bool:
    """Return whether a process's descriptor holds a flock(2) lock."""
    with open(f"/proc/{pid}/fdinfo/{number}", encoding="utf-8") as info:
        return "FLOCK" in info.read()


class LockedFiles:
    """Finds the files that processes have locked with flock(2), by device and inode.

    The open files of each process are only read once. Because a user can open any number of files,
    at most `MOST_OPEN` descriptors are read per user.

    Args:
        inodes: The inodes of the files to search for.
    """

    def __init__(self, inodes: Collection[int]) -> None:
        self._inodes = inodes
        # The remaining number of descriptors to read, by UID.
        self._remaining: dict[int | None, int] = {}
        self._known: dict[int, tuple[set[tuple[int, int]], bool]] = {}

    def has(self, pid: int, file: os.stat_result) -> bool | None:
        """Return whether a process has locked a file, or None if that can't be determined."""
        files, is_complete = self._files_of(pid)
        return True if (file.st_dev, file.st_ino) in files else False if is_complete else None

    def holders(self) -> dict[tuple[int, int], int]:
        """Map each locked file to the pid of one process that has locked it.

        Processes whose open files can't be read are skipped.
        """
        holders: dict[tuple[int, int], int] = {}
        for pid in map(int, _pids()):
            for file in self._files_of(pid)[0]:
                holders.setdefault(file, pid)
        return holders

    def _files_of(self, pid: int) -> tuple[set[tuple[int, int]], bool]:
        """Return the files that a process has locked, and whether the list is complete."""
        if pid not in self._known:
            files: set[tuple[int, int]] = set()
            self._known[pid] = files, shows_files(pid) and self._read(pid, files)
        return self._known[pid]

    def _read(self, pid: int, files: set[tuple[int, int]]) -> bool:
        """Add a process's locked files to a set, and return whether all descriptors were read."""
        uid = uid_of(pid)
        remaining = self._remaining.get(uid, MOST_OPEN)
        if not remaining:
            return False
        # The process might end during the loop.
        with suppress(OSError), os.scandir(f"/proc/{pid}/fd") as descriptors:
            for descriptor in islice(descriptors, remaining):
                remaining -= 1
                with suppress(OSError):
                    file = os.stat(descriptor.path)
                    is_match = file.st_ino in self._inodes
                    if is_match and _has_flock(pid, descriptor.name):
                        files.add((file.st_dev, file.st_ino))
        self._remaining[uid] = remaining
        return remaining > 0


def openers(paths: Collection[str]) -> dict[str, list[int]]:
    """For each path, return the pids of this user's other processes that have the file open.

    The links in /proc/PID/fd are read but not followed, because accessing a file on a network file
    system can hang. At most `MOST_OPEN` descriptors are read.

    Args:
        paths: The files' paths.
    """
    found: dict[str, list[int]] = {path: [] for path in paths}
    user, remaining = os.geteuid(), MOST_OPEN
    for pid in map(int, _pids()):
        with suppress(OSError):
            if pid == os.getpid() or os.stat(f"/proc/{pid}").st_uid != user:
                continue
            if {*_uids(pid)} != {user}:  # for example `su`, which another user can start
                continue
            opened = set()
            with os.scandir(f"/proc/{pid}/fd") as descriptors:
                for descriptor in islice(descriptors, remaining):
                    remaining -= 1
                    with suppress(OSError):  # the process has just closed the descriptor
                        opened.add(os.readlink(descriptor.path))
            for path in opened & found.keys():
                found[path].append(pid)
    return found


def require_descriptors() -> None:
    """Raise ReserveGPUError if this process can't open `DESCRIPTORS` more files.

    Do not call this on the main thread, because an exception from a signal handler would leave a
    file open.
    """
    with no_fork, ExitStack() as opened:  # a forked child would keep the files open
        try:
            for _ in range(DESCRIPTORS):
                opened.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        except OSError:
            raise ReserveGPUError(TOO_MANY_FILES) from None


def _stat(pid: int) -> tuple[str, int, int, bool] | None:
    """Return a process's name, parent pid, start time, and whether it is a zombie.

    If the process has ended or is hidden (hidepid), the result is None. The start time is in clock
    ticks since boot. A process only counts as a zombie once all of its other threads have ended.
    The name might contain spaces and parentheses (Linux, Documentation/filesystems/proc.rst,
    "/proc/<pid>/stat").
    """
    with suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/stat", "rb") as file:
        name, _, rest = file.read().partition(b"(")[2].rpartition(b")")
        fields = rest.split()
        is_zombie = fields[0] == b"Z" and int(fields[17]) <= 1
        return name.decode(errors="replace"), int(fields[1]), int(fields[19]), is_zombie
    return None


def _threads(pid: int) -> Iterator[tuple[str, int, int, int]]:
    """Yield each thread's state, flags and pending signals, and the number of threads.

    Signals that are pending for the whole process are not included. A thread might end meanwhile
    (proc_pid_stat(5)).
    """
    with suppress(OSError, ValueError, IndexError), os.scandir(f"/proc/{pid}/task") as threads:
        for thread in threads:
            with open(f"{thread.path}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
            yield fields[0].decode(), int(fields[6]), int(fields[28]), int(fields[17])


def _states_of_ending(pid: int, *, if_killed: bool) -> set[str]:
    """Return the states of a process's threads if none of them runs its program any more.

    Otherwise, the result is empty. Another user's process can have thousands of threads, so the
    first thread that runs the program ends the search.

    Args:
        pid: The process.
        if_killed: Whether to include threads that are exiting only after their current sleep.
    """
    states: list[str] = []
    total = 0
    for state, flags, pending, count in _threads(pid):
        is_killed = if_killed and state == "D" and pending & KILLED
        if not (flags & EXITING or is_killed):
            return set()
        states.append(state)
        total = max(total, count)
    return {*states} if len(states) == total else set()


def is_dying(pid: int | None) -> bool:
    """Return whether a process has been killed, but is stuck in the Linux kernel.

    This happens if a thread hangs in a driver
    (https://github.com/NVIDIA/open-gpu-kernel-modules/issues/1333). The process keeps its locks
    until the thread returns, which may be never, but it runs none of its code again:

    - A thread that is exiting does not return to user mode. Neither does a thread in
      uninterruptible sleep (D) if SIGKILL was pending before: it dies when it wakes up.
    - The Linux kernel sets SIGKILL for all threads of a killed process at once, whatever signal
      killed it, and such threads can't create others. Only exec(2) spares one thread. That thread
      exists before the second reading, which would find it.

    Args:
        pid: The process. If it is None or hidden (hidepid), the result is False.
    """
    return pid is not None and _has_only_dying_threads(pid) and _has_only_dying_threads(pid)


def _has_only_dying_threads(pid: int) -> bool:
    return "D" in _states_of_ending(pid, if_killed=True)


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped, for example with SIGSTOP or Ctrl-Z."""
    return next((state == "T" for state, *_ in _threads(pid)), False)


def _uids(pid: int | str) -> list[int]:
    """Return a process's real, effective and saved UIDs.

    Raises:
        OSError: The process has ended.
    """
    with open(f"/proc/{pid}/status", "rb", buffering=0) as status:
        _, _, rest = status.read(STATUS_START).partition(b"\nUid:")
        return [int(uid) for uid in rest.split(maxsplit=3)[:3]]


def _words(pid: int | str) -> list[str]:
    """Return a process's command line; empty if the process has ended or is hidden."""
    with suppress(OSError), open(f"/proc/{pid}/cmdline", "rb", buffering=0) as file:
        return os.fsdecode(file.read(COMMAND_LIMIT)).removesuffix("\0").split("\0")
    return []


def lineage(pid: int) -> list[int]:
    """Return the pids of a process and of its visible ancestors, nearest first."""
    line, stat = [pid], _stat(pid)
    # If an apparent parent started later than its child, it has only reused the real parent's pid.
    while stat and (parent := _stat(stat[1])) and parent[2] <= stat[2]:
        line.append(stat[1])
        stat = parent
    return line


def start_time(pid: int) -> float | None:
    """Return a process's start time in epoch seconds, or None if the process has ended."""
    start, (wall, boot) = start_time_boot(pid), now()
    return None if start is None else wall - boot + start


def start_time_boot(pid: int) -> float | None:
    """Return a process's start time in seconds since boot, or None if the process has ended."""
    stat = _stat(pid)
    return None if stat is None else stat[2] / os.sysconf("SC_CLK_TCK")


def stamp(pid: int) -> str:
    """Return a process's pid and its start time in clock ticks, such as `4321 98765`.

    The two numbers identify the process until the next boot. If the process has ended or is hidden,
    the result is only the pid.
    """
    stat = _stat(pid)
    return str(pid) if stat is None else f"{pid} {stat[2]}"


def children() -> list[str]:
    """Return this process's living descendants, in the form `python train.py (pid 4321)`."""
    parents = {pid: stat[1] for pid in map(int, _pids()) if (stat := _stat(pid))}
    family, generation = {os.getpid()}, {os.getpid()}
    while generation := {pid for pid, parent in parents.items() if parent in generation} - family:
        family |= generation
    names = {pid: command(_words(pid)) for pid in sorted(family - {os.getpid()})}
    # A zombie has no command line.
    return [f"{name} (pid {pid})" for pid, name in names.items() if name]


def has_descendants() -> bool:
    """Return whether this process has descendants, or leads a session with other processes."""
    this_pid = os.getpid()
    return any(is_descendant(pid, {this_pid}) for pid in map(int, _pids()) if pid != this_pid)


def _pids() -> list[str]:
    with suppress(OSError):  # Windows has no /proc
        return [name for name in os.listdir("/proc") if name.isdecimal()]
    return []


def is_descendant(pid: int, pids: Collection[int | None]) -> bool:
    """Return whether a process is one of the given processes, or descends from one of them.

    A process also counts as a descendant if one of the given processes leads its session
    (setsid(2)). For example, the background process of `!nohup ... &` in a notebook gets a
    different parent when its shell exits, but stays in the session that Jupyter created for the
    kernel.
    The check is slow.

    Args:
        pid: The process to check.
        pids: The given processes.
    """
    if not pids or pid in pids:
        return pid in pids
    with suppress(OSError):
        if os.getsid(pid) in pids:
            return True
    return any(each in pids for each in lineage(pid))


def with_memory_use(holders: Sequence[Holder], processes: Sequence[Process]) -> tuple[Holder, ...]:
    """Return a device's holders, each with the device memory that its processes are using.

    Args:
        holders: The holders of the device.
        processes: All processes that are using the device.
    """
    used = memory_by_process(
        processes, {holder.listed_pid for holder in holders if holder.listed_pid}
    )
    return tuple(holder._replace(used_mib=used.get(holder.listed_pid or 0)) for holder in holders)


def has_exited(pid: int) -> bool:
    """Return whether a process has exited, or is exiting and no longer runs its program.

    A process whose memory the driver is still freeing is exiting.
    """
    try:
        os.getpgid(pid)  # unlike /proc, this also finds processes that hidepid hides
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # some drivers report pids that can't exist
        return False
    return bool(_states_of_ending(pid, if_killed=False))


def exited_leaders(pid: int) -> set[int]:
    """Return the processes that probably started a process, and that have exited.

    These are the leaders of the process's session and process group, and the process whose
    reservation it inherited. Jupyter starts each kernel as the leader of a session, and a shell
    starts each command as the leader of a process group. Linux does not reuse a leader's pid while
    the session or the group has members.

    Args:
        pid: A process of any user. Only the owner of a process can read its variables.
    """
    leaders: set[int] = set()
    with suppress(OSError, OverflowError):
        leaders |= {os.getsid(pid), os.getpgid(pid)}
    if match := HOLDER.match(environ_of(pid).get(settings.HELD, "")[:HOLDER_LIMIT]):
        leaders.add(int(match[1]))
    return {leader for leader in leaders if 0 < leader < PIDS and has_exited(leader)}


def memory_by_process(
    processes: Sequence[Process], pids: Collection[int]
) -> dict[int, float | None]:
    """Return the device memory that each process and its descendants are using, in MiB.

    Args:
        processes: All processes that are using the device.
        pids: The processes to report. If a descendant has several ancestors in `pids`, its memory
            only counts for the nearest one.

    Returns:
        The memory by pid. It is None if the memory of the process or of a descendant is unknown.
    """
    used: dict[int, float | None] = dict.fromkeys(pids, 0.0)
    for process in processes if used else ():  # avoids the slow search for ancestors
        line = [process.pid] if process.pid in used else lineage(process.pid)
        ancestor = next((pid for pid in line if pid in used), None)
        if ancestor is not None:
            total, more = used[ancestor], process.memory_mib
            used[ancestor] = None if total is None or more is None else total + more
    return used


def ancestors() -> set[int]:
    """Return the pids of this process and its ancestors.

    An enclosing `reserve-gpu run` is included even if an intermediate process has ended, as happens
    under tmux, because the inherited variable RESERVE_GPU_HELD contains its pid.
    """
    return {reservation_pid(), *lineage(os.getpid())} - {0}


def multiprocessing_parent() -> int | None:
    """Return the pid of this process's multiprocessing parent, or None if it has none."""
    multiprocessing = sys.modules.get("multiprocessing.process")
    parent = multiprocessing.parent_process() if multiprocessing else None
    return parent.pid if parent else None


def with_identity(process: Process) -> Process:
    """Return a copy of the process with its user and command filled in if they can be read."""
    # A process that has exited or is exiting has no command line.
    if name := command(_words(process.pid)):
        return process._replace(user=user_of(process.pid), command=name)
    if (stat := _stat(process.pid)) is None:
        return process._replace(has_ended=has_exited(process.pid))
    is_exiting = not stat[3] and has_exited(process.pid)
    process = process._replace(user=user_of(process.pid), command=stat[0], has_ended=is_exiting)
    if stat[3]:
        parent = with_identity(process._replace(pid=stat[1], command="a process"))
        name = sanitize(parent.command or "", PARENT_LIMIT)
        return process._replace(zombie_of=f"{name} (pid {parent.pid})")
    return process


def reservation_pid() -> int:
    """Return the pid of the process whose reservation $RESERVE_GPU_HELD describes.

    The variable also contains the start time of that process, which distinguishes it from a later
    process with the same pid. Older versions did not store the start time.

    Returns:
        The pid, or 0 if the variable does not describe the reservation of a running process.
    """
    if not (match := HOLDER.match(os.environ.get(settings.HELD, "")[:HOLDER_LIMIT])):
        return 0
    pid, began = match.groups()
    now = stamp(int(pid))
    return int(pid) if began is None or now in (pid, f"{pid} {began}") else 0
