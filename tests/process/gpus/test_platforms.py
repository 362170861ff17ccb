"""Tests of the platforms in docs/machines.md: containers, services, Slurm, MIG, WSL2 and others."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

import reserve_gpu
from reserve_gpu.locks.directory import LockDirectory
from reserve_gpu.model.errors import LockError
from tests import driver
from tests.support.forker import Forker
from tests.support.machine import LIMIT_S, Child, Machine
from tests.support.processes import interrupted
from tests.support.reserving import got, of_gpu, refused, variables

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.here import Here

from tests.support.platforms import CONTAINER, behind, on_a_host, pid_outside

VARIABLES = "{k: v for k, v in os.environ.items() if k[:5] == 'CUDA_'}"

WARNINGS = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter('always')
    reserve_gpu.reserve({})
[str(w.message) for w in caught]
"""
OWN_MOUNTS = ("unshare", "--mount")


def variables_in(child: Child) -> Any:
    """Return the CUDA variables of a child."""
    return child.run(VARIABLES).value


@pytest.fixture(scope="module")
def forker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forker]:
    """Start a process in whose forks CUDA can be started."""
    with Forker(tmp_path_factory.mktemp("forker")) as forker:
        yield forker


def held(forker: Forker) -> list[str]:
    """Return the labels of the held devices, and check that CUDA sees exactly these, in order."""
    reservation = reserve_gpu.current()
    assert reservation
    uuids = [device.uuid[4:] for device in reservation.devices]
    assert forker.cuda(os.environ) == uuids
    return [device.label for device in reservation.devices]


# The UUIDs, without `GPU-` or `MIG-`, of the devices that CUDA sees with a child's variables.
CUDA_SEES = """
import subprocess
subprocess.run([sys.executable, '-c', '''
import ctypes, uuid
cuda, count, raw = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), (ctypes.c_ubyte * 16)()
cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count))
for ordinal in range(count.value):
    cuda.cuDeviceGetUuid_v2(raw, ordinal)
    print(uuid.UUID(bytes=bytes(raw)))
'''], stdout=subprocess.PIPE, text=True, check=True).stdout.split()
"""


# -- containers ------------------------------------------------------------------------------------


@pytest.mark.promise
def test_in_a_container_memory_decides(machine: Machine) -> None:
    """In a container, where other processes are hidden, a GPU whose memory is in use is busy."""
    machine.use("container")
    with behind(machine, *CONTAINER) as child:
        text = child.reserve("count=2").text
        assert of_gpu(text).startswith("busy: 8.8 GiB ")
        assert "fuser" not in text  # it does not see the processes either
        assert child.reserve().value == "2"


def test_a_listed_pid_is_not_looked_up_in_a_container(machine: Machine) -> None:
    """A pid that the driver lists is not taken for a process of this container."""
    machine.use("container")
    with behind(machine, *CONTAINER) as child:
        assert child.pid == 1  # like the listed process outside
        busy = of_gpu(child.reserve("count=2").text, "1")
        (named,) = (t for t in child.run(WARNINGS.format("1")).value if "GPU1" in t)
    for line in (busy, named):
        assert "pid 1" in line
        assert "python" not in line
        assert "root" not in line


def test_a_container_without_a_reading(machine: Machine) -> None:
    """Without readings of memory and processes, a GPU is not chosen, but can be named."""
    machine.write("gpu\nfail nvmlDeviceGetMemoryInfo * 4\nfail nvmlDeviceGetMemoryInfo_v2 * 4")
    with behind(machine, *CONTAINER, CUDA_DEVICE_MEMORY="7") as child:
        refused = child.reserve()
        assert refused.error == "NoFreeDeviceError"
        assert of_gpu(refused.text).startswith("unknown: ")
        assert any("unknown" in text for text in child.run(WARNINGS.format("0")).value)
        uuid = child.run("reserve_gpu.current().devices[0].uuid").value
        assert child.run(CUDA_SEES).value == [uuid[4:]]
        assert "CUDA_DEVICE_MEMORY" not in variables_in(child)


@pytest.mark.promise
def test_a_holder_in_a_container_is_seen_from_outside(machine: Machine) -> None:
    """A holder in a container is named by its pid outside, not by the one inside."""
    with behind(machine, *CONTAINER) as holder, machine.child() as other:
        assert holder.reserve("0").value == "0"
        refused = other.reserve("0")
        assert refused.error == "NoFreeDeviceError"
        assert f"(pid {pid_outside(holder)})" in refused.text
        assert "(pid 1)" not in refused.text
        assert other.reserve().value == "1"


def test_a_holder_in_another_container(machine: Machine) -> None:
    """A holder in another container is not taken for the local process with the same pid."""
    with (
        behind(machine, *CONTAINER) as one,
        behind(machine, *CONTAINER) as two,
        machine.child() as outside,
    ):
        assert one.pid == two.pid == 1
        one.reserve("0")
        outside.reserve("1")
        refused = two.reserve()
        assert refused.error == "NoFreeDeviceError"
        for pid in (1, outside.pid):
            assert f"(pid {pid} in another container" in refused.text
        one.run("reserve_gpu.release()")
        assert two.reserve().value == "0"


# How the lock directory is mounted in a container, its path, and whether it is private.
MOUNTS = {
    "root": ("", "shared/locks", True),
    "tmpfs": ('mount -t tmpfs none "$L/.."', "shared/locks", True),
    "bind mount": ('mount --bind "$L" "$L"', "shared/locks", False),
    "bind mount above a link": ('mount --bind "$L/.." "$L/.."', "link/locks", False),
}


@pytest.mark.parametrize(("script", "path", "is_private"), MOUNTS.values(), ids=MOUNTS)
def test_a_private_lock_directory(
    machine: Machine, script: str, path: str, *, is_private: bool
) -> None:
    """A user in a container is warned once if the container's lock directory is private."""
    machine.locks = machine.folder / "shared" / "locks"
    machine.locks.mkdir(parents=True)
    (machine.folder / "link").symlink_to("shared")
    directory = str(machine.folder / path)
    with behind(machine, *CONTAINER, script=script, RESERVE_GPU_LOCK_DIR=directory) as child:
        told = child.run(WARNINGS.format("")).value
        assert len(told) == is_private
        assert all(directory in text for text in told)
        assert child.run(WARNINGS.format("")).value == []


# -- inherited limits of Slurm, Ray and Kubernetes -------------------------------------------------


BUS = "PCI_BUS_ID"
C, D = (f"GPU-51000000-0000-4000-8000-00000000000{end}" for end in "cd")  # of slurm.txt

# Scenario, inherited CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER, arguments of `reserve`,
# and the labels of the reserved devices, or the error.
LIMITS: list[tuple[str, str, str, dict[str, Any], str]] = [
    ("slurm", "2,3", BUS, {}, "GPU2"),  # Slurm without cgroups
    ("slurm", "0", "", {}, "RequestError"),  # in CUDA's default order, the A100s are first
    ("slurm", "0,1", BUS, {}, "NoFreeDeviceError"),  # both are busy
    ("slurm", D, "", {}, "GPU3"),  # Ray or Kubernetes, by UUID
    ("slurm", D[:-3], "", {}, "NoVisibleDeviceError"),  # the start of all four UUIDs
    ("slurm", f"{C},junk,{D}", "", {}, "GPU2"),
    ("slurm", f"2,{C}", BUS, {}, "NoVisibleDeviceError"),  # the same GPU twice
    ("slurm", "", "", {}, "NoVisibleDeviceError"),
    ("slurmjob", "2,3", BUS, {}, "NoVisibleDeviceError"),  # the node's numbers, in a cgroup
    ("mig", "{uuid[1:2]}", "", {}, "GPU1:2"),  # Slurm or Kubernetes with MIG
    ("mig570", "{uuid[1:4]},{uuid[1:1]}", "", {"devices": ["1:4", "1:1"]}, "GPU1:4 GPU1:1"),
]


@pytest.mark.promise
@pytest.mark.parametrize(("scenario", "value", "order", "arguments", "expected"), LIMITS)
def test_an_inherited_limit(
    here: Here,
    forker: Forker,
    monkeypatch: pytest.MonkeyPatch,
    scenario: str,
    value: str,
    order: str,
    arguments: dict[str, Any],
    expected: str,
) -> None:
    """Devices are chosen within an inherited limit, and CUDA sees exactly the reserved ones."""
    here.use(scenario)
    value = re.sub(r"{uuid\[([0-9:]+)\]}", lambda match: here.uuid(match[1]), value)
    before = {"CUDA_VISIBLE_DEVICES": value} | ({"CUDA_DEVICE_ORDER": order} if order else {})
    for name, text in before.items():
        monkeypatch.setenv(name, text)
    seen_before = forker.cuda(os.environ)
    if expected.endswith("Error"):
        with pytest.raises(reserve_gpu.ReserveGPUError) as caught:
            reserve_gpu.reserve(**arguments)
        assert type(caught.value).__name__ == expected
        assert f"CUDA_VISIBLE_DEVICES='{value[:40]}" in str(caught.value)
        closed = before | {"CUDA_VISIBLE_DEVICES": ""}
        assert variables() == (closed if expected == "NoFreeDeviceError" else before)
    else:
        reserve_gpu.reserve(**arguments)
        assert held(forker) == expected.split()
        if scenario != "mig":  # with an old driver, CUDA shows only one of several instances
            assert set(forker.cuda(os.environ)) <= set(seen_before)
    reserve_gpu.release()
    assert variables() == before


# -- MIG -------------------------------------------------------------------------------------------

# The scenario, the arguments of `reserve`, and the labels of the reserved devices, or the error.
INSTANCES: list[tuple[str, dict[str, Any], str]] = [
    ("mig", {}, "GPU0"),
    ("mig", {"devices": "1:2"}, "GPU1:2"),
    ("mig", {"devices": ["1:0", "1:2"]}, "ImpossibleError"),
    ("mig", {"count": 2}, "NoFreeDeviceError"),  # MIG might be disabled on GPU2
    ("mig", {"devices": [0, "1:0"]}, "RequestError"),
    ("mig570", {"devices": ["1:4", "1:1"]}, "GPU1:4 GPU1:1"),
    ("mig570", {"count": 4}, "ImpossibleError"),  # there are not four GPUs or four instances
]


@pytest.mark.promise
@pytest.mark.parametrize(("scenario", "arguments", "expected"), INSTANCES)
def test_instances(
    here: Here, forker: Forker, scenario: str, arguments: dict[str, Any], expected: str
) -> None:
    """CUDA sees exactly the reserved GPUs or instances; a choice that it can't show is refused."""
    here.use(scenario)
    if not expected.endswith("Error"):
        reserve_gpu.reserve(**arguments)
        assert held(forker) == expected.split()
        return
    with pytest.raises(reserve_gpu.ReserveGPUError) as caught:
        reserve_gpu.reserve(**arguments)
    assert type(caught.value).__name__ == expected
    assert "CUDA_DEVICE_ORDER" not in variables()


# -- WSL2 ------------------------------------------------------------------------------------------

WSL_LIBRARIES = "/usr/lib/wsl/lib"


def wsl_script(libraries: str) -> str:
    """Return a script that simulates WSL2: the kernel's name, and the library's place."""
    return f"""
echo 5.15.153.1-microsoft-standard-WSL2 >"$L/release"
mount --bind "$L/release" /proc/sys/kernel/osrelease
mount -t tmpfs none /mnt; mkdir /mnt/new /mnt/work
mount -t overlay overlay -o lowerdir=/usr/lib,upperdir=/mnt/new,workdir=/mnt/work /usr/lib
mkdir -p {WSL_LIBRARIES}; cp {libraries}/libnvidia-ml.so.1 {WSL_LIBRARIES}"""


def test_wsl2(machine: Machine) -> None:
    """Under WSL2, the driver's library is found, and memory decides, because lists are empty."""
    machine.use("wsl2")
    libraries = machine.environ()["LD_LIBRARY_PATH"].split(":")[0]
    overlay = "mount -t tmpfs none /mnt; mkdir /mnt/a /mnt/b /mnt/c; "
    overlay += "mount -t overlay o -o lowerdir=/mnt/a,upperdir=/mnt/b,workdir=/mnt/c /mnt/a"
    if subprocess.run(
        [*OWN_MOUNTS, "sh", "-c", overlay], check=False, capture_output=True
    ).returncode:
        pytest.skip("needs root and overlayfs")
    with behind(machine, *OWN_MOUNTS, script=wsl_script(libraries), LD_LIBRARY_PATH="") as child:
        assert child.reserve().value == "1"
        text = child.reserve("count=2").text
        assert of_gpu(text).startswith("busy: 4.9 GiB ")
        assert "Windows" in of_gpu(text)
        assert "fuser" not in text  # it does not see processes of Windows
        child.run("reserve_gpu.release()")
        machine.write("gpu\n  memory none\ngpu")  # an empty list does not mean idle here
        assert child.reserve().value == "1"


# -- other bindings --------------------------------------------------------------------------------

PIP = ("-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet", "--retries=1")
RESERVE = "import os, reserve_gpu; reserve_gpu.reserve(); print(os.environ['CUDA_VISIBLE_DEVICES'])"


@pytest.mark.full
def test_bindings(machine: Machine) -> None:
    """The oldest bindings work without a warning."""
    path = machine.folder / "bindings"
    pip = [*PIP, "install", "--no-compile", f"--target={path}", "nvidia-ml-py==12.550.*"]
    if subprocess.run([sys.executable, *pip], check=False, capture_output=True).returncode:
        pytest.skip("pip can't install")
    machine.write("gpu\n  compute 4321000 3500\ngpu")
    as_a_site = f"import site, sys; site.addsitedir('{path}'); sys.path.insert(0, '{path}')\n"
    done = machine.python(f"{as_a_site}{RESERVE}")
    assert (done.stdout, done.stderr) == ("1\n", "")


# -- native Windows, macOS -------------------------------------------------------------------------

# Simulates another operating system after IPython was imported.
ON_ANOTHER_SYSTEM = """
import ctypes, ctypes.util, os, sys  # imported first, because they differ by system
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance(colors="NoColor")
import IPython.core.magic, IPython.core.magic_arguments, argparse, shlex, subprocess
missing = {
    "win32": "register_at_fork fork getuid geteuid fchmod pread pwrite O_NOFOLLOW O_CLOEXEC "
             "O_DIRECTORY O_NONBLOCK RTLD_NOLOAD RTLD_NOW",
    "darwin": "",
}
sys.platform = sys.argv[1]
for name in missing[sys.platform].split():
    delattr(os, name)
if sys.platform == "win32":
    sys.modules.update(dict.fromkeys(["fcntl", "pwd", "grp", "resource"]))
import json, reserve_gpu
answers = []
for cell in ("%load_ext reserve_gpu", "%reserve_gpu?", "%reserve_gpu", "%reserve_gpu 0 --memory=1G",
             "%reserve_gpu --optional", "%reserve_gpu --release", "%reserve_gpu --status",
             "%reserve_gpu --check", "%unload_ext reserve_gpu",
             "import reserve_gpu; reserve_gpu.reserve()", "reserve_gpu.current()",
             "reserve_gpu.release()"):
    result = shell.run_cell(cell)
    error = result.error_before_exec or result.error_in_exec
    answers.append([cell, type(error).__name__ if error else None, str(error or "")])
print(json.dumps([answers, dict(os.environ)]))
"""


def cells_on(machine: Machine, system: str, **extra: str) -> dict[str, tuple[str | None, str]]:
    """Return the name of each cell's error, or None, and its text, on another system."""
    before = {"CUDA_VISIBLE_DEVICES": "1"}
    done = machine.command(sys.executable, "-c", ON_ANOTHER_SYSTEM, system, **before, **extra)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    answers, environ = json.loads(done.stdout.splitlines()[-1])
    assert {k: v for k, v in environ.items() if k.startswith("CUDA_")} == before
    return {cell: (error, text) for cell, error, text in answers}


@pytest.mark.parametrize("system", ["win32", "darwin"])
def test_other_systems(machine: Machine, system: str) -> None:
    """On Windows and macOS, each reservation fails with one line that names Linux and WSL2."""
    answers = cells_on(machine, system, WINDIR=str(machine.folder), LD_LIBRARY_PATH="")
    expected = {"NoDriverError", "DriverError", "LockError"}
    for cell, (error, text) in answers.items():
        if "reserve()" in cell or cell in ("%reserve_gpu", "%reserve_gpu 0 --memory=1G"):
            assert error in expected, (cell, error, text)
            assert "\n" not in text
            assert "Linux" in text, (cell, text)
            assert "WSL2" in text
        elif "--check" in cell:
            assert (error, "Linux or WSL2" in text) == ("UsageError", True), (cell, error, text)
        else:
            assert error is None, (cell, error, text)


@on_a_host
def test_a_zombie(here: Here) -> None:
    """A zombie that the driver lists is shown with the parent that can end it."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
        here.write(f"gpu\n compute {process.pid} 3000")
        text, status = refused(), reserve_gpu.status()
    pids = rf"pid {process.pid}, a zombie\b.*\bpid {os.getpid()}\b"
    assert all(re.search(pids, each) for each in (text, str(status)))
    (told,) = status.to_dict()["devices"][0]["processes"]
    assert told["zombie_of"].endswith(f"(pid {os.getpid()})")
    assert told["command"].startswith("python")


# -- a driver that hangs ---------------------------------------------------------------------------


def wait_for_call(machine: Machine, pid: int, function: str) -> None:
    """Wait until the process has called a function of the driver."""
    deadline = time.monotonic() + LIMIT_S
    while not any(
        line.split()[:2] == [str(pid), function]
        for line in (machine.log.read_text().splitlines() if machine.log.exists() else ())
    ):
        assert time.monotonic() < deadline, f"{function} was not called"
        time.sleep(0.005)


@contextmanager
def hanging(machine: Machine, script: str) -> Iterator[Child]:
    """Start a child whose driver hangs, in a scenario that delays a function."""
    scenario = machine.folder / "hanging.txt"
    scenario.write_text(script)
    (function,) = (line.split()[1] for line in script.splitlines() if line.startswith("delay"))
    with machine.child(STAND_IN_SCENARIO=str(scenario)) as child:
        child.send("reserve_gpu.reserve().environ['CUDA_VISIBLE_DEVICES']")
        wait_for_call(machine, child.pid, function)
        yield child


def test_a_hang_under_the_mutex(here: Here) -> None:
    """The error about a hanging holder of the mutex has its pid, and it skips the GPU later."""
    script = (driver.SCENARIOS / "hang.txt").read_text()
    with hanging(here, script) as child, LockDirectory(str(here.locks)) as directory:
        with pytest.raises(LockError, match=rf"\b{child.pid}\b"):
            directory.mutex(limit_s=0.05).__enter__()
        answer = child.answer()
        assert answer.value == "1", answer
        assert got("0") == "0"


@pytest.mark.parametrize(
    "function", ["nvmlInitWithFlags", "nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetComputeMode"]
)
def test_interrupting_a_script_that_hangs(here: Here, function: str) -> None:
    """Ctrl-C ends a Python script that hangs in the driver, and frees its GPUs."""
    scenario = here.folder / "hanging.txt"
    scenario.write_text(f"delay {function} * 100000\ngpu\ngpu")
    process = subprocess.Popen(
        [sys.executable, "-c", RESERVE], env=here.environ(STAND_IN_SCENARIO=str(scenario)),
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    stderr = interrupted(process, lambda: wait_for_call(here, process.pid, function))
    assert "KeyboardInterrupt" in stderr
    assert process.returncode == -signal.SIGINT
    assert got("0,1") == "0,1"
