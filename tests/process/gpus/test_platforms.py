"""A notebook on every machine people have: the rows of the table in docs/machines.md.

What users, kernels, locks and single readings have to do with it is in the tests of their own.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import venv
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

import reserve_gpu
from reserve_gpu.locks.directory import LockDirectory
from reserve_gpu.model.errors import LockError
from tests import driver
from tests.support.forker import Forker
from tests.support.machine import LIMIT_S, ROOT, Child, Machine, program
from tests.support.processes import interrupted, wait_for
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
    return child.run(VARIABLES).value


@pytest.fixture(scope="module")
def forker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forker]:
    with Forker(tmp_path_factory.mktemp("forker")) as forker:
        yield forker


def held(forker: Forker) -> list[str]:
    """Return the labels of what this process holds: just what CUDA shows, in order."""
    reservation = reserve_gpu.current()
    assert reservation
    uuids = [device.uuid[4:] for device in reservation.devices]
    assert forker.cuda(os.environ) == uuids
    return [device.label for device in reservation.devices]


# What CUDA enumerates with the variables that a child has now: the UUIDs, without what they are of.
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
    """Where others' processes can't be seen, a GPU whose memory is in use is busy anyway."""
    machine.use("container")
    with behind(machine, *CONTAINER) as child:
        text = child.reserve("count=2").text
        why = "in use by no visible process (perhaps outside this container)"
        assert of_gpu(text).startswith(f"busy: 8.8 GiB {why}")
        assert "fuser" not in text  # which sees as little
        assert child.reserve().value == "2"


def test_a_listed_pid_is_not_looked_up_in_a_container(machine: Machine) -> None:
    """A compute process counts, but its pid is not taken for a process of this container."""
    machine.use("container")
    with behind(machine, *CONTAINER) as child:
        assert child.pid == 1  # as the job that the driver lists has outside
        busy = of_gpu(child.reserve("count=2").text, "1")
        (named,) = (t for t in child.run(WARNINGS.format("1")).value if "GPU1" in t)
    for line in (busy, named):
        assert "pid 1" in line
        assert "python" not in line
        assert "root" not in line


def test_a_container_without_a_reading(machine: Machine) -> None:
    """With neither memory nor processes to go by a GPU is not picked but can be named."""
    machine.write("gpu\nfail nvmlDeviceGetMemoryInfo * 4\nfail nvmlDeviceGetMemoryInfo_v2 * 4")
    with behind(machine, *CONTAINER, CUDA_DEVICE_MEMORY="7") as child:
        refused = child.reserve()
        assert refused.error == "NoFreeDeviceError"
        assert of_gpu(refused.text).startswith("unknown: ")
        assert "reserve('0')" not in refused.text  # nobody knows whose it is
        assert "in the queue" not in refused.text  # and no wait would tell
        assert "If you know it is unused, reserve all of it by number." in refused.text
        assert any("unknown" in text for text in child.run(WARNINGS.format("0")).value)
        uuid = child.run("reserve_gpu.current().devices[0].uuid").value
        assert child.run(CUDA_SEES).value == [uuid[4:]]
        assert "CUDA_DEVICE_MEMORY" not in variables_in(child)


def test_the_hosts_memory_in_a_container(machine: Machine) -> None:
    """A GPU with the host's memory, whose processes can't be seen, is unknown, and can be named."""
    machine.write("gpu\n  memory none")
    with behind(machine, *CONTAINER) as child:
        for asked in ("", "memory='1GiB'"):
            refused = child.reserve(asked)
            assert of_gpu(refused.text).startswith("unknown: it shares the host's memory, and some")
            assert "reserve all of it by number" in refused.text
        assert child.run("reserve_gpu.status().rows[0].promisable_mib").value is None
        assert any("unknown" in text for text in child.run(WARNINGS.format("0")).value)


@pytest.mark.promise
def test_a_holder_in_a_container_is_seen_from_outside(machine: Machine) -> None:
    """Outside, the holder is named by the pid that it has there, not by the one that it knows."""
    with behind(machine, *CONTAINER) as holder, machine.child() as other:
        assert holder.reserve("0").value == "0"
        refused = other.reserve("0")
        assert refused.error == "NoFreeDeviceError"
        assert f"(pid {pid_outside(holder)})" in refused.text
        assert "(pid 1)" not in refused.text
        assert other.reserve().value == "1"


def test_a_holder_elsewhere_is_not_taken_for_a_local_process(machine: Machine) -> None:
    """In a container, a holder outside or in another one is said to be elsewhere, not looked up."""
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
        assert "(pid 1 in another container, unverified)" in refused.text
        assert f"(pid {outside.pid} in another container, unverified)" in refused.text
        one.run("reserve_gpu.release()")
        assert two.reserve().value == "0"


# How the lock directory comes into a container, as which path, and whether the container is alone.
MOUNTS = {
    "its own root": ("", "shared/locks", True),
    "its own tmpfs": ('mount -t tmpfs none "$L/.."', "shared/locks", True),
    "the directory": ('mount --bind "$L" "$L"', "shared/locks", False),
    "one above it": ('mount --bind "$L/.." "$L/.."', "shared/locks", False),
    "one above it, behind a link": ('mount --bind "$L/.." "$L/.."', "link/locks", False),
}


@pytest.mark.parametrize(("script", "path", "alone"), MOUNTS.values(), ids=MOUNTS.keys())
def test_a_container_of_its_own_is_told(
    machine: Machine, script: str, path: str, *, alone: bool
) -> None:
    """One warning says that others' reservations can't be seen, unless the directory is mounted."""
    machine.locks = machine.folder / "shared" / "locks"
    machine.locks.mkdir(parents=True)
    (machine.folder / "link").symlink_to("shared")
    directory = str(machine.folder / path)
    with behind(machine, *CONTAINER, script=script, RESERVE_GPU_LOCK_DIR=directory) as child:
        told = child.run(WARNINGS.format("")).value
        assert len(told) == alone
        for text in told:
            assert "this container" in text
            assert directory in text
            assert "RESERVE_GPU_LOCK_DIR" in text
        assert child.run(WARNINGS.format("")).value == []  # asked again, it says nothing


def test_the_magic_tells_a_container_in_one_line(machine: Machine) -> None:
    """In a notebook the warning is one line on stderr, beside the usual output."""
    with behind(machine, *CONTAINER) as child:
        child.run("import subprocess")
        shown = child.run(
            "done = subprocess.run([sys.executable, '-m', 'IPython', '--ext=reserve_gpu', '-c',"
            " '%reserve_gpu'], capture_output=True, text=True)\n[done.stdout, done.stderr]"
        ).value
    assert shown[0].startswith("Reserving GPU0: ")
    assert shown[1].count("\n") == 1
    assert shown[1].startswith("Warning: this container")


# -- JupyterHub on one box, with PrivateTmp --------------------------------------------------------


def private_tmp(machine: Machine) -> str:
    """Return a script that makes /tmp and /var/tmp a service's own, as far as the test can."""
    needed = [*machine.environ()["LD_LIBRARY_PATH"].split(":"), sys.prefix, sys.base_prefix]
    paths = {Path(path) for path in (*needed, str(ROOT), str(machine.folder))}
    below = [
        shlex.quote(str(path.relative_to("/tmp"))) for path in paths if path.is_relative_to("/tmp")
    ]
    return (
        "mount --bind /tmp /mnt; mount -t tmpfs none /tmp; mount -t tmpfs none /var/tmp\n"
        f"for path in {' '.join(below)}; do\n"
        '  mkdir -p "/tmp/$path"; mount --bind "/mnt/$path" "/tmp/$path"\ndone'
    )


@pytest.mark.skipif(not program("nsenter"), reason="needs nsenter")
def test_a_service_with_private_tmp_uses_the_shells_locks(machine: Machine) -> None:
    """A service with a /tmp of its own finds reserved what a shell reserved, and the reverse."""
    own_lock_place = "mkdir -p /run/lock; mount -t tmpfs -o mode=1777 none /run/lock"
    default = {"RESERVE_GPU_LOCK_DIR": ""}
    with behind(machine, *OWN_MOUNTS, script=own_lock_place, **default) as shell:
        beside_it = ("nsenter", "--mount", f"--target={shell.pid}", *OWN_MOUNTS)
        with behind(machine, *beside_it, script=private_tmp(machine), **default) as service:
            devices = [c.run("os.stat('/tmp').st_dev").value for c in (shell, service)]
            assert devices[0] != devices[1]
            assert shell.reserve().value == "0"
            refused = service.reserve("0")
            assert refused.error == "NoFreeDeviceError"
            assert f"pid {shell.pid}" in refused.text
            assert service.reserve().value == "1"
            assert f"pid {service.pid}" in shell.reserve("1").text
        made = shell.run("os.listdir('/run/lock/reserve_gpu')").value
        assert len([name for name in made if name.startswith("GPU-")]) >= 2


# -- Slurm, Ray, and whoever else set CUDA_VISIBLE_DEVICES -----------------------------------------


def test_a_slurm_job_in_a_cgroup(
    here: Here, forker: Forker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside a cgroup GPUs have other numbers, but the same locks as on the node outside."""
    here.use("slurm")
    with here.child() as node:
        node_scenario = str(driver.SCENARIOS / "slurm.txt")
        node.run(f"os.environ['STAND_IN_SCENARIO'] = {node_scenario!r}")
        here.use("slurmjob")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
        assert node.reserve().value == "2"
        assert f"pid {node.pid}" in of_gpu(refused("0"))
        assert got() == "1"
        assert held(forker) == ["GPU1"]
        assert f"pid {os.getpid()}" in node.reserve("3").text
    reserve_gpu.release()
    assert variables() == {"CUDA_VISIBLE_DEVICES": "0,1"}


BUS, FASTEST = "PCI_BUS_ID", "FASTEST_FIRST"
C, D = (f"GPU-51000000-0000-4000-8000-00000000000{end}" for end in "cd")  # of slurm.txt

# Scenario, CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER as somebody set them, what is asked for, and
# what must be reserved: labels, or the error.
LIMITS: list[tuple[str, str, str, dict[str, Any], str]] = [
    ("slurm", "2,3", BUS, {}, "GPU2"),  # Slurm without cgroups
    ("slurm", "3,2", BUS, {"count": 2}, "GPU2 GPU3"),
    ("slurm", "3,2", BUS, {"devices": [3, 2]}, "GPU3 GPU2"),
    ("slurm", "0", "", {}, "RequestError"),  # CUDA's own order: the A100s first
    ("slurm", "1", FASTEST, {}, "RequestError"),
    ("slurm", "0,1", BUS, {}, "NoFreeDeviceError"),  # both are busy
    ("slurm", "0,1", BUS, {"devices": 2}, "RequestError"),
    ("slurm", D, "", {}, "GPU3"),  # Ray or Kubernetes, by UUID
    ("slurm", f"{D},{C}", BUS, {"count": 2}, "GPU2 GPU3"),
    ("slurm", D[:-3], "", {}, "NoVisibleDeviceError"),  # the start of all four
    ("slurm", f"{C},junk,{D}", "", {"count": 2}, "ImpossibleError"),
    ("slurm", f"{C},junk,{D}", "", {}, "GPU2"),
    ("slurm", f"{C},{C}", "", {}, "NoVisibleDeviceError"),
    ("slurm", f"2,{C}", BUS, {}, "NoVisibleDeviceError"),  # one GPU by two names
    ("slurm", "", "", {}, "NoVisibleDeviceError"),
    ("slurm", "-1", "", {}, "NoVisibleDeviceError"),
    ("slurmjob", "2,3", BUS, {}, "NoVisibleDeviceError"),  # the node's numbers in a cgroup
    ("mig", "{uuid[1:2]}", "", {}, "GPU1:2"),  # Slurm or Kubernetes with MIG
    ("mig", "{uuid[1:5]},{uuid[1:2]}", "", {}, "GPU1:2"),
    ("mig", "{uuid[1:2]}", "", {"devices": "1:0"}, "RequestError"),
    ("mig570", "{uuid[1:4]},{uuid[1:1]}", "", {"count": 2}, "GPU1:1 GPU1:4"),
    ("mig570", "{uuid[1:4]},{uuid[1:1]}", "", {"devices": ["1:4", "1:1"]}, "GPU1:4 GPU1:1"),
]


@pytest.mark.promise
@pytest.mark.parametrize(("scenario", "value", "order", "wishes", "expected"), LIMITS)
def test_a_fence(
    here: Here,
    forker: Forker,
    monkeypatch: pytest.MonkeyPatch,
    scenario: str,
    value: str,
    order: str,
    wishes: dict[str, Any],
    expected: str,
) -> None:
    """What is reserved is inside an inherited value, and CUDA then sees that and nothing else."""
    here.use(scenario)
    value = re.sub(r"{uuid\[([0-9:]+)\]}", lambda match: here.uuid(match[1]), value)
    before = {"CUDA_VISIBLE_DEVICES": value} | ({"CUDA_DEVICE_ORDER": order} if order else {})
    for name, text in before.items():
        monkeypatch.setenv(name, text)
    seen_before = forker.cuda(os.environ)
    if expected.endswith("Error"):
        with pytest.raises(reserve_gpu.ReserveGPUError) as caught:
            reserve_gpu.reserve(**wishes)
        assert type(caught.value).__name__ == expected
        assert f"CUDA_VISIBLE_DEVICES='{value[:40]}" in str(caught.value)
        closed = before | {"CUDA_VISIBLE_DEVICES": ""}
        assert variables() == (closed if expected == "NoFreeDeviceError" else before)
    else:
        reserve_gpu.reserve(**wishes)
        assert held(forker) == expected.split()
        if scenario != "mig":  # with an old driver CUDA shows but one of several instances
            assert set(forker.cuda(os.environ)) <= set(seen_before)
    reserve_gpu.release()
    assert variables() == before


# -- MIG -------------------------------------------------------------------------------------------

# Scenario, what is asked for, and what is reserved, or the error and what it must say.
INSTANCES: list[tuple[str, dict[str, Any], str, str]] = [
    ("mig", {}, "GPU0", ""),
    ("mig", {"devices": "1:2"}, "GPU1:2", ""),
    ("mig", {"min_memory": "18GB", "name": "MIG"}, "GPU1:5", ""),
    ("mig", {"devices": ["1:0", "1:2"]}, "ImpossibleError", "can use only one"),
    ("mig", {"count": 2}, "NoFreeDeviceError", "can use only one"),  # GPU2 may be made whole again
    ("mig", {"devices": [0, "1:0"]}, "RequestError", "GPU1:0 is a MIG instance"),
    ("mig", {"devices": 1}, "RequestError", "1:0, 1:2, 1:5"),
    ("mig", {"devices": 2}, "NoFreeDeviceError", "no instance  MIG is on, but the GPU has no MIG"),
    ("mig570", {"devices": ["1:4", "1:1"]}, "GPU1:4 GPU1:1", ""),
    ("mig570", {"count": 2}, "GPU1:1 GPU1:3", ""),
    ("mig570", {"count": 3}, "GPU1:1 GPU1:3 GPU1:4", ""),
    ("mig570", {"devices": [0, "1:1"]}, "RequestError", "GPU1:1 is a MIG instance"),
    ("mig570", {"count": 4}, "ImpossibleError", "MIG"),  # four are free, but not four of a kind
]


@pytest.mark.promise
@pytest.mark.parametrize(("scenario", "wishes", "expected", "words"), INSTANCES)
def test_instances(
    here: Here, forker: Forker, scenario: str, wishes: dict[str, Any], expected: str, words: str
) -> None:
    """CUDA sees just the GPUs or instances that were reserved; what it can't show is refused."""
    here.use(scenario)
    if not expected.endswith("Error"):
        reserve_gpu.reserve(**wishes)
        assert held(forker) == expected.split()
        return
    with pytest.raises(reserve_gpu.ReserveGPUError, match=re.escape(words)) as caught:
        reserve_gpu.reserve(**wishes)
    assert type(caught.value).__name__ == expected
    assert "CUDA_DEVICE_ORDER" not in variables()


# -- WSL2, Google Colab ----------------------------------------------------------------------------

WSL_LIBRARIES = "/usr/lib/wsl/lib"


def wsl(libraries: str) -> str:
    """Return a script that makes this WSL2: the kernel's name, and the place of the library."""
    return f"""
echo 5.15.153.1-microsoft-standard-WSL2 >"$L/release"
mount --bind "$L/release" /proc/sys/kernel/osrelease
mount -t tmpfs none /mnt; mkdir /mnt/new /mnt/work
mount -t overlay overlay -o lowerdir=/usr/lib,upperdir=/mnt/new,workdir=/mnt/work /usr/lib
mkdir -p {WSL_LIBRARIES}; cp {libraries}/libnvidia-ml.so.1 {WSL_LIBRARIES}"""


def test_wsl2(machine: Machine) -> None:
    """Under WSL2 the library is found where it is, and memory decides, whatever the lists say."""
    machine.use("wsl2")
    libraries = machine.environ()["LD_LIBRARY_PATH"].split(":")[0]
    overlay = "mount -t tmpfs none /mnt; mkdir /mnt/a /mnt/b /mnt/c; "
    overlay += "mount -t overlay o -o lowerdir=/mnt/a,upperdir=/mnt/b,workdir=/mnt/c /mnt/a"
    if subprocess.run(
        [*OWN_MOUNTS, "sh", "-c", overlay], check=False, capture_output=True
    ).returncode:
        pytest.skip("needs root and overlayfs, to put the library where WSL has it")
    with behind(machine, *OWN_MOUNTS, script=wsl(libraries), LD_LIBRARY_PATH="") as child:
        assert child.reserve().value == "1"
        text = child.reserve("count=2").text
        why = "busy: 4.9 GiB in use by no visible process (perhaps by Windows)"
        assert of_gpu(text).startswith(why)
        assert "fuser" not in text  # which does not see Windows
        child.run("reserve_gpu.release()")
        machine.write("gpu\n memory 8192\n used 2880")
        text = child.reserve().text
        (limit,) = re.findall("environment: RESERVE_GPU_IDLE_MEMORY=(.*)", text)
        assert child.run("reserve_gpu.reserve('0').release()").error is None
        assert limit in child.run("str(reserve_gpu.status())").value
        child.run(f"import os; os.environ['RESERVE_GPU_IDLE_MEMORY'] = '{limit}'")
        assert child.reserve().value == "0"
        child.run("del os.environ['RESERVE_GPU_IDLE_MEMORY']; reserve_gpu.release()")
        machine.write("gpu\n  memory none\ngpu")  # an empty list is not idle here
        assert child.reserve().value == "1"


def test_colab(machine: Machine) -> None:
    """In Colab's container, without process lists, the one GPU is had; if in use, it is said."""
    machine.use("colab")
    with behind(machine, *CONTAINER) as child:
        assert child.reserve().value == "0"
        child.run("reserve_gpu.release()")
        machine.add("used 4000")
        refused = child.reserve()
        assert refused.error == "NoFreeDeviceError"
        assert "3.9 GiB in use" in refused.text


# What may stand in an environment beside nvidia-ml-py, or in its place; whether it serves.
BINDINGS = {
    "pynvml==13.*": True,
    "pynvml==11.5.*": False,
    "nvidia-ml-py3==7.352.0": None,  # either will do
    "nvidia-ml-py==12.550.*": True,
}
PIP = ("-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet", "--retries=1")
RESERVE = "import os, reserve_gpu; reserve_gpu.reserve(); print(os.environ['CUDA_VISIBLE_DEVICES'])"


def pip_install(python: str, *arguments: str) -> subprocess.Popen[str]:
    """Begin to install."""
    return subprocess.Popen(
        [python, *PIP, "install", "--no-compile", *arguments],
        text=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip


def finish_or_skip(pip: subprocess.Popen[str]) -> None:
    """Wait for pip; skip the test where it can't install, as without a network."""
    try:
        complaint = pip.communicate(timeout=LIMIT_S)[1]
    except subprocess.TimeoutExpired:
        complaint = f"no end after {LIMIT_S} s"
        pip.kill()
    if pip.returncode != 0:
        pytest.skip(f"pip can't install: {complaint.strip()[-200:]}")


@pytest.fixture(scope="session")
def installing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Make a folder and a pip for each of the BINDINGS, all at work at the same time."""
    folder = tmp_path_factory.mktemp("bindings")
    paths = {name: folder / str(number) for number, name in enumerate(BINDINGS)}
    running = {n: pip_install(sys.executable, f"--target={p}", n) for n, p in paths.items()}
    try:
        yield {name: (path, running[name]) for name, path in paths.items()}
    finally:
        for pip in running.values():
            pip.kill()
            pip.communicate()


@pytest.mark.full
@pytest.mark.xdist_group("bindings")
@pytest.mark.parametrize(("name", "serves"), BINDINGS.items())
def test_bindings(
    machine: Machine, installing: dict[str, Any], name: str, *, serves: bool | None
) -> None:
    """Other people's bindings serve without a warning, or the file in the way is named."""
    path, pip = installing[name]
    finish_or_skip(pip)
    machine.write("gpu\n  compute 4321000 3500\ngpu")
    as_a_site = f"import site, sys; site.addsitedir('{path}'); sys.path.insert(0, '{path}')\n"
    done = machine.python(f"{as_a_site}{RESERVE}")
    if serves or (serves is None and not done.returncode):
        assert (done.stdout, done.stderr) == ("1\n", "")
    else:
        last = done.stderr.splitlines()[-1]
        assert last.startswith("reserve_gpu.model.errors.DriverError: ")
        assert str(path) in last  # it comes before what is installed
        assert "deprecated" not in done.stderr


@pytest.mark.full
def test_the_command_mends_it(machine: Machine) -> None:
    """The command that is named where old bindings are in the way makes the same script work."""
    environment = machine.folder / "environment"
    venv.create(environment, symlinks=True, with_pip=True)
    python = str(environment / "bin" / "python")
    finish_or_skip(pip_install(python, "pynvml==11.5.*", "nvidia-ml-py3==7.352.0"))
    path = {"PATH": f"{environment / 'bin'}:{os.environ['PATH']}"}
    before = machine.command("python", "-c", RESERVE, **path)
    last = before.stderr.splitlines()[-1]
    assert "Run: " in last
    mending = machine.command("sh", "-c", last.partition("Run: ")[2], **path)
    assert mending.returncode == 0, mending.stderr
    after = machine.command("python", "-c", RESERVE, **path)
    assert after.stdout == "0\n"
    assert "Error" not in after.stderr


# -- native Windows, macOS -------------------------------------------------------------------------

# Makes this process one of another system, as far as Python shows it; IPython is there already.
ELSEWHERE = """
import ctypes, ctypes.util, os, sys  # of Linux: others have a part that is missing here
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


def elsewhere(machine: Machine, system: str, **extra: str) -> dict[str, tuple[str | None, str]]:
    """Return what each cell came to on that system: the name of an error or None, and its text."""
    before = {"CUDA_VISIBLE_DEVICES": "1"}
    done = machine.command(sys.executable, "-c", ELSEWHERE, system, **before, **extra)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    answers, environ = json.loads(done.stdout.splitlines()[-1])
    assert {k: v for k, v in environ.items() if k.startswith("CUDA_")} == before
    return {cell: (error, text) for cell, error, text in answers}


@pytest.mark.parametrize(
    ("system", "has_driver"), [("win32", False), ("win32", True), ("darwin", False)]
)
def test_other_systems(machine: Machine, system: str, *, has_driver: bool) -> None:
    """On Windows and macOS nothing crashes, and one line says what reservations need."""
    libraries = machine.environ()["LD_LIBRARY_PATH"].split(":")[0]
    if has_driver:
        (machine.folder / "System32").mkdir()
        (machine.folder / "System32" / "nvml.dll").symlink_to(f"{libraries}/libnvidia-ml.so.1")
    else:
        libraries = ""
    windows = {"WINDIR": str(machine.folder), "LD_LIBRARY_PATH": libraries}
    answers = elsewhere(machine, system, **windows)
    ours = {"NoDriverError", "DriverError", "LockError"}
    for cell, (error, text) in answers.items():
        if "reserve()" in cell or cell in ("%reserve_gpu", "%reserve_gpu 0 --memory=1G"):
            assert error in ours, (cell, error, text)
            assert "\n" not in text
            assert "Linux" in text, (cell, text)
            assert "WSL2" in text
        elif "--check" in cell:
            assert (error, "Linux or WSL2" in text) == ("UsageError", True), (cell, error, text)
        else:
            assert error is None, (cell, error, text)


@on_a_host
def test_a_zombie_is_called_so(here: Here) -> None:
    """Of a process that has ended, and is listed still, it is said with which process it goes."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
        here.write(f"gpu\n compute {process.pid} 3000")
        text, status = refused(), reserve_gpu.status()
        shown = here.shell().run("%reserve_gpu --status").values[0]["text/html"]
    assert f"(pid {process.pid}, a zombie)" in of_gpu(text)
    ends = rf"\(pid {process.pid}, a zombie\) will go away when .*\(pid {os.getpid()}\) ends\."
    assert all(re.search(ends, each) for each in (text, str(status), shown))
    (told,) = status.to_dict()["devices"][0]["processes"]
    assert told["zombie_of"].endswith(f"(pid {os.getpid()})")
    assert told["command"].startswith("python")


@on_a_host
def test_the_parent_of_a_zombie_has_its_pid_after_a_long_command(here: Here) -> None:
    """A zombie's parent is named with its pid, however long its command is."""
    code = "import os; pid = os.fork() or os._exit(0); print(pid, flush=True); os.read(0, 1)"
    argv = [sys.executable, "-c", code, "argument" * 100]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout
        zombie = int(parent.stdout.readline())
        wait_for(lambda: psutil.Process(zombie).status() == psutil.STATUS_ZOMBIE)
        here.write(f"gpu\n compute {zombie} 3000")
        text = refused()
        parent.communicate()
    assert f"(pid {parent.pid}) ends." in text


# -- a driver that hangs ---------------------------------------------------------------------------


def wait_for_call(machine: Machine, pid: int, function: str) -> None:
    """Wait until the process has called the function."""
    deadline = time.monotonic() + LIMIT_S
    while not any(
        line.split()[:2] == [str(pid), function]
        for line in (machine.log.read_text().splitlines() if machine.log.exists() else ())
    ):
        assert time.monotonic() < deadline, f"{function} was not called"
        time.sleep(0.005)


@contextmanager
def hanging(machine: Machine, script: str) -> Iterator[Child]:
    """Start a child for which alone the driver hangs, at the function that the scenario delays."""
    scenario = machine.folder / "hanging.txt"
    scenario.write_text(script)
    (function,) = (line.split()[1] for line in script.splitlines() if line.startswith("delay"))
    with machine.child(STAND_IN_SCENARIO=str(scenario)) as child:
        child.send("reserve_gpu.reserve().environ['CUDA_VISIBLE_DEVICES']")
        wait_for_call(machine, child.pid, function)
        yield child


def test_a_hang_before_the_mutex_blocks_nobody(here: Here) -> None:
    """Who hangs while a GPU is touched for the first time does not keep others from any GPU."""
    with hanging(here, "delay nvmlDeviceGetMemoryInfo_v2 0 100000\ngpu\ngpu"):
        assert got("0,1") == "0,1"


def test_a_hang_under_the_mutex_is_told_with_its_pid(here: Here) -> None:
    """Who waits in vain for one that hangs is told its pid; that passes the GPU over in the end."""
    script = (driver.SCENARIOS / "hang.txt").read_text()
    with hanging(here, script) as child, LockDirectory(str(here.locks)) as directory:
        with pytest.raises(LockError, match=rf"\b{child.pid}\b"):
            directory.mutex(limit_s=0.05).__enter__()
        answer = child.answer()
        assert answer.value == "1", answer
        assert got("0") == "0"


def test_killing_one_that_hangs_frees_all(here: Here) -> None:
    """Once a process that hangs under the mutex is killed everything can be reserved."""
    with hanging(here, (driver.SCENARIOS / "hang.txt").read_text()) as child:
        child.kill()
        assert got("0,1") == "0,1"


def test_a_hang_in_another_container_names_no_process_of_this_one(machine: Machine) -> None:
    """In a container, who hangs outside is not said to be the local process of the same pid."""
    script = (driver.SCENARIOS / "hang.txt").read_text()
    with behind(machine, *CONTAINER) as contained, hanging(machine, script) as child:
        told = contained.run(
            "from reserve_gpu.locks.directory import LockDirectory\n"
            "with LockDirectory() as directory, directory.mutex(limit_s=0.05): pass"
        )
        assert told.error == "MutexHeldError"
        assert "can't be seen from here" in told.text
        assert not any(str(pid) in told.text for pid in (1, child.pid))


@pytest.mark.parametrize(
    "function", ["nvmlInitWithFlags", "nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetComputeMode"]
)
def test_interrupting_a_script_that_hangs(here: Here, function: str) -> None:
    """Ctrl-C ends a Python script that hangs in the driver, and frees all that it had taken."""
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
