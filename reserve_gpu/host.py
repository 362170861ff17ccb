"""Ask the system about this process, its notebook and its Python, other processes and users.

The only module that imports `psutil`, and only when another process has to be described.
"""

from __future__ import annotations

import json
import os
import stat
import sys
import time
from contextlib import suppress
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

from reserve_gpu import calls, foreign
from reserve_gpu.errors import TOO_MANY_FILES, ReserveGPUError, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from reserve_gpu.model import Holder, Process

with suppress(ImportError):  # Windows, where there is no /proc to learn of users from
    import pwd

T = TypeVar("T")

# What this process held before exec made it another program: its pid, then a description
# (reservation/handover.py). A process with another pid has only inherited the variable.
HELD = "RESERVE_GPU_HELD"
# What people may set.
LOCK_DIRECTORY = "RESERVE_GPU_LOCK_DIR"
IDLE_MEMORY = "RESERVE_GPU_IDLE_MEMORY"
CONTEXT_MEMORY = "RESERVE_GPU_CONTEXT_MEMORY"
RESTART = "RESERVE_GPU_RESTART"
TELL_WAITERS = "RESERVE_GPU_TELL_WAITERS"  # "0": no
CONFIG = "RESERVE_GPU_CONFIG"
HISTORY = "RESERVE_GPU_HISTORY"
# Of a kernel that was started by ssh: what `started` returns, as JSON in hexadecimal digits, which
# no shell changes.
STARTED = "RESERVE_GPU_STARTED"
CONFIG_FILE = "/etc/reserve_gpu.toml"
HISTORY_DIRECTORY = "/var/lib/reserve_gpu/history"

NAME_LIMIT = 200  # characters of a command, or of what a process is called in its place
RAY = b"ray::"  # what Ray has in front of the titles of its processes
KERNEL_MODULE = "ipykernel_launcher"  # what Jupyter starts a kernel with: python -m ...
COMMAND_LIMIT = 10_000  # characters: two paths of the greatest length, and some words
INITIAL_PID_NAMESPACE = 0xEFFFFFFC  # PROC_PID_INIT_INO of the kernel's include/linux/proc_ns.h

_name: str | None = None  # what this process is called in place of its own command


def survive_reload(name: str, make: Callable[[], T]) -> T:
    """Return this process's value of that name, which is made once and survives a reload.

    %autoreload empties a module whose file has changed, while the locks in it stay locked. A module
    without a file is never reloaded.
    """
    store = sys.modules.setdefault("reserve_gpu.kept", ModuleType("reserve_gpu.kept"))
    value: T = vars(store).setdefault(name, make())
    return value


def pid_namespace() -> int | None:
    """Return the inode of this process's PID namespace, None where there are none."""
    with suppress(OSError):
        return os.stat("/proc/self/ns/pid").st_ino
    return None


def sees_all_locks() -> bool:
    """Tell whether the kernel's list shows the locks of all PID namespaces."""
    return pid_namespace() == INITIAL_PID_NAMESPACE and os.access("/proc/locks", os.R_OK)


def sees_all_processes() -> bool:
    """Tell whether an empty list of NVML's means that there are no processes.

    Not in a PID namespace: drivers from 535.113 on leave out what is outside of it. Not under WSL2:
    Windows and other virtual machines use the GPU too.
    Raises ReserveGPUError where this process can open no file.
    """
    try:
        with open("/proc/sys/kernel/osrelease", encoding="utf-8") as release:
            is_wsl = "microsoft" in release.read().lower()
    except OSError:
        if not has_descriptor():
            raise ReserveGPUError(TOO_MANY_FILES) from None
        return False
    return pid_namespace() == INITIAL_PID_NAMESPACE and not is_wsl


def control_group() -> bytes:
    """Return the directory of this process's control group, of version 2."""
    with suppress(OSError), open("/proc/self/cgroup", "rb") as groups:
        for line in groups:
            if line.startswith(b"0::"):
                return b"/sys/fs/cgroup" + line[len("0::") :].rstrip(b"\n")
    return b"/sys/fs/cgroup"


def is_private(path: str) -> bool:
    """Tell whether this is a container, and the directory is its own and not a mounted one.

    A container's own mounts are its root, and temporary file systems such as /dev/shm.
    """
    if pid_namespace() in (None, INITIAL_PID_NAMESPACE):
        return False
    path = os.path.realpath(path)
    mount_point, file_system = "", ""
    with suppress(OSError, ValueError, IndexError), open("/proc/self/mountinfo") as mounts:
        for line in mounts:  # Documentation/filesystems/proc.rst, "/proc/<pid>/mountinfo"
            fields, rest = (part.split() for part in line.split(" - ", 1))
            is_above = f"{path}/".startswith(f"{fields[4].rstrip('/')}/")
            if is_above and len(fields[4]) >= len(mount_point):
                mount_point, file_system = fields[4], rest[0]
    if mount_point == path:
        return False
    return mount_point in ("", "/") or file_system in ("tmpfs", "overlay")


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


def boot_clock_ns() -> int:
    """Return the nanoseconds since the boot: one clock for all users and containers."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def user_file() -> str:
    """Return the path of the user's own configuration file."""
    folder = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return os.path.join(folder, "reserve_gpu.toml")


def state_directory() -> str:
    """Return where what is to last is kept for this user, in the home."""
    folder = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return os.path.join(folder, "reserve_gpu")


def history_directory() -> str:
    """Return the directory with the histories of all users."""
    return os.environ.get(HISTORY) or HISTORY_DIRECTORY


def may_keep_history() -> bool:
    """Tell whether there is anything that may say that a history is kept.

    Asked at each reservation, and mostly there is nothing: so no module is imported for it.
    """
    places = history_directory(), state_directory(), user_file()
    return config_file() is not None or any(map(os.path.lexists, places))


def config_file() -> str | None:
    """Return the path of the administrator's file, None where there is none, or nothing in it.

    Asked at each reservation, and mostly there is none: so it takes one look.
    """
    named = os.environ.get(CONFIG)
    file = named or CONFIG_FILE
    try:
        status = os.stat(file)
    except FileNotFoundError:
        return named or None
    except OSError:  # who reads it says why
        return file
    return file if status.st_size or not stat.S_ISREG(status.st_mode) else None


def uid_of(pid: int) -> int | None:
    """Return the user that runs a process, as a number; None if it can't be seen from here."""
    with suppress(OSError):
        return os.stat(f"/proc/{pid}").st_uid
    return None


def user_of(pid: int) -> str | None:
    """Return the user that runs a process, None if it can't be seen from here."""
    uid = uid_of(pid)
    return None if uid is None else user_name(uid)


def user_name(uid: int) -> str:
    """Return a user's name, `uid 1234` where the system has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, NameError):  # Windows has no such names
        return f"uid {uid}"


def with_user(holder: Holder) -> Holder:
    """Return the holder with its user: the system's word goes before the record's.

    Asked late, as looking up a user can take long where users come from a server.
    """
    return holder._replace(owner=user_of(holder.listed_pid) if holder.listed_pid else None)


def own_processes(
    program: str, pids: Iterable[str | int] | None = None, uid: int | None = None
) -> Iterator[tuple[int, list[str]]]:
    """Yield the processes of this user in which Python runs that file, with their arguments.

    pids: which to look at, None for all. uid: of another user, for root.
    """
    for pid in filter(str.isdecimal, map(str, os.listdir("/proc") if pids is None else pids)):
        with suppress(OSError):
            if os.stat(f"/proc/{pid}").st_uid == (os.geteuid() if uid is None else uid):
                with open(f"/proc/{pid}/cmdline", "rb") as file:
                    words = [os.fsdecode(word) for word in file.read(COMMAND_LIMIT).split(b"\0")]
                if program in words[1:]:
                    yield int(pid), words[words.index(program, 1) + 1 : -1]


def has_locked(pid: int | str, file: os.stat_result) -> bool:
    """Tell whether a process of this user has that very file open, and locked by that opening."""
    with suppress(OSError):  # it has ended, or is another user's
        for number in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                if os.path.samestat(os.stat(f"/proc/{pid}/fd/{number}"), file):
                    with open(f"/proc/{pid}/fdinfo/{number}", encoding="utf-8") as info:
                        if "FLOCK" in info.read():  # it has not only looked
                            return True
    return False


def connection_file(words: Sequence[str] = ()) -> str | None:
    """Return the path of this kernel's connection file, None if this is no kernel of Jupyter's.

    Of a kernel that was started by ssh it is the name that it has been given: over a restart its
    connection file is removed.
    words: the command that this process becomes, if that is a kernel.
    """
    path = _connection_file(words)
    return path and (started().get("id") or path)


def _connection_file(words: Sequence[str]) -> str | None:
    for place, word in enumerate(words):
        if word == "-f" and words[place + 1 :]:
            return os.path.abspath(words[place + 1])
        if word.startswith(("-f=", "--f=", "--IPKernelApp.connection_file=")):
            return os.path.abspath(word.partition("=")[2])
    module = sys.modules.get("ipykernel.kernelapp")
    app = module and module.IPKernelApp
    if not (app and app.initialized()):
        return None
    path = getattr(app.instance(), "abs_connection_file", None)
    return os.path.abspath(path) if path else None


def lineage(pid: int) -> list[int]:
    """Return the process and its ancestors, as far as they live and can be seen."""
    psutil = calls.imported("psutil")
    try:
        return [pid, *(parent.pid for parent in psutil.Process(pid).parents())]
    except (psutil.Error, OSError, ValueError):
        return [pid]


def has_descriptor() -> bool:
    """Tell whether this process can open one more file."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        return False
    return True


def began(pid: int) -> float | None:
    """Return when a process began, in seconds since the epoch; None if it is not there.

    Documentation/filesystems/proc.rst, "/proc/<pid>/stat": in ticks since the boot.
    """
    with suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/stat", "rb") as stat_file:
        ticks = int(stat_file.read().rpartition(b")")[2].split()[19])
        boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        return boot + ticks / os.sysconf("SC_CLK_TCK")
    return None


def children() -> list[str]:
    """Return the processes below this one that live, as `python train.py (pid 4321)`."""
    psutil = calls.imported("psutil")
    try:
        below = psutil.Process().children(recursive=True)
        return [f"{command(each.cmdline()) or each.name()} (pid {each.pid})" for each in below]
    except (psutil.Error, OSError, ValueError):  # one has ended meanwhile
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
    pids = [holder.listed_pid for holder in holders]
    used = uses(processes, {pid for pid in pids if pid})
    return tuple(
        holder._replace(used_mib=used[pid] if pid else None)
        for holder, pid in zip(holders, pids, strict=True)
    )


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
    psutil = calls.imported("psutil")
    try:
        described = psutil.Process(process.pid)
        name = command(described.cmdline()) or described.name()
    except (psutil.Error, OSError, ValueError):
        return process
    return process._replace(user=user_of(process.pid), command=name)


def held_by() -> int:
    """Return the process whose reservation $RESERVE_GPU_HELD describes, 0 if there is none."""
    pid = os.environ.get(HELD, "")[:20].partition(" ")[0]
    return int(pid) if pid.isascii() and pid.isdecimal() else 0


def title() -> str | None:
    """Return what this process is called in place of its command, None if nothing is set."""
    return _name or _engine()


def own_command() -> str | None:
    """Return the command that this process runs, in short; of a Ray worker what Ray calls it."""
    words = sys.orig_argv
    with suppress(OSError), open("/proc/self/cmdline", "rb") as file:
        if (title := file.read(NAME_LIMIT).rstrip(b"\0 ")).startswith(RAY):
            words = [title.decode(errors="replace")]
    return command(words, working_directory())


def call_it(name: str) -> None:
    """Let others read that name of this process in place of its own command."""
    global _name
    _name = shown(name, NAME_LIMIT)


def command(words: Sequence[str], directory: str | None = None) -> str | None:
    """Shorten a command: base names of the program and its script, and the arguments.

    `python train.py --epochs 3`; `ipython` where Python only runs a program; `kernel in ~/thesis`,
    as the arguments of a Jupyter kernel tell nobody anything. None without words.
    directory: in which it runs, where that is known.
    """
    if KERNEL_MODULE in words:
        return shown(f"kernel in {_below_home(directory)}" if directory else "kernel", NAME_LIMIT)
    # What is no path is a title that the process has given itself, as `ray::train /data`.
    short = [word if " " in word else os.path.basename(word) for word in words[:1]] + [*words[1:]]
    for place, word in enumerate(words[1:], 1):
        if word == "-c":
            break
        if not word.startswith("-"):
            short[place] = os.path.basename(word)
            is_program = short[0].startswith("python") and place == 1 and "." not in short[1]
            short = short[1:] if is_program else short
            break
    return shown(" ".join(" ".join(short).split()), NAME_LIMIT) or None


def shell() -> str:
    """Return the user's shell: that of $SHELL, else that of the login."""
    if shell := os.environ.get("SHELL"):
        return shell
    try:
        return pwd.getpwuid(os.getuid()).pw_shell or "/bin/sh"
    except KeyError:
        return "/bin/sh"


def notebook_path() -> str | None:
    """Return the path of this kernel's notebook, None if it is not known (yet).

    VS Code sets a variable in the user's namespace after the kernel has started; jupyter_server
    sets an environment variable. So it is asked for when it is needed, and not kept.
    """
    main = sys.modules.get("__main__")
    path = getattr(main, "__vsc_ipynb_file__", None) or os.environ.get("JPY_SESSION_NAME")
    return str(path) if path else None


def notebook() -> str | None:
    """Return the name of this kernel's notebook, None if it is not known (yet)."""
    path = notebook_path()
    return os.path.basename(path) if path else None


def started() -> dict[str, str]:
    """Return what the machine that has started this kernel by ssh has said of it; mostly nothing.

    `id` names the kernel over its restarts, `notebook` is its path, `machine` the user's, `wishes`
    the options, divided by NUL, and `pid` is the kernel's, once that is known: a process with
    another pid has inherited the variable.
    """
    text = os.environ.get(STARTED)
    if not text:
        return {}
    with suppress(ValueError):
        fields = foreign.parsed(bytes.fromhex(text))
        if isinstance(fields, dict) and fields.get("pid") in (None, str(os.getpid())):
            return {name: value for name, value in fields.items() if isinstance(value, str)}
    return {}


def as_started(fields: Mapping[str, str]) -> str:
    """Return the variable that says so of a kernel."""
    return json.dumps(dict(fields)).encode().hex()


def origin() -> str | None:
    """Return the machine from which this kernel was started, where that is another one."""
    return started().get("machine")


def _engine() -> str | None:
    """Return the number and cluster of this engine of ipyparallel's, None if it is none."""
    module = sys.modules.get("ipyparallel.engine.app")
    app = module and module.IPEngine
    if not (app and app.initialized()):
        return None
    engine = app.instance()
    cluster = f" of cluster {engine.cluster_id}" if engine.cluster_id else ""
    return shown(f"engine {'?' if engine.id is None else engine.id}{cluster}", NAME_LIMIT)


def working_directory() -> str | None:
    """Return the working directory, None if it is gone."""
    with suppress(OSError):
        return os.getcwd()
    return None


def _below_home(path: str) -> str:
    """Shorten a path in this user's home to `~/thesis`."""
    home = os.path.expanduser("~")
    return f"~{path[len(home) :]}" if f"{path}/".startswith(f"{home}/") else path


def install_command(package: str, instead_of: str = "") -> str:
    """Return the command that installs a package for this Python, whatever made its environment.

    instead_of: packages to uninstall before.

    pipx (https://pipx.pypa.io/stable/reference/cli/) and uv (https://docs.astral.sh/uv/pip/) make
    environments without pip. In one of `uv tool`, `uv tool install --with` would drop what was
    added by an earlier --with, which may be this package.
    """
    from importlib.util import find_spec
    from shlex import quote

    python = quote(sys.executable or "python3")
    if os.path.exists(os.path.join(sys.prefix, "pipx_metadata.json")):
        name = quote(os.path.basename(sys.prefix))
        install, uninstall = f"pipx inject {name}", f"pipx runpip {name} uninstall -y"
    elif find_spec("pip") is None and _is_made_by_uv():
        install, uninstall = (
            f"uv pip {verb} --python {python}" for verb in ("install", "uninstall")
        )
    else:
        install, uninstall = f"{python} -m pip install", f"{python} -m pip uninstall -y"
    before = f"{uninstall} {instead_of} && " if instead_of else ""
    return shown(f"{before}{install} {package}", COMMAND_LIMIT)


def _is_made_by_uv() -> bool:
    path = os.path.join(sys.prefix, "pyvenv.cfg")
    with suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
        return any(line.partition("=")[0].strip() == "uv" for line in file)
    return False
