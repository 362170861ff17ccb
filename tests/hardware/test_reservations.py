"""The promises to users, on a real GPU."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.hardware.machine import (
    CHECK,
    CLI,
    COMPUTE,
    CUDA,
    USER,
    as_user,
    last_line,
    refusal,
    seconds,
    until,
)
from tests.support.hardware.report import check
from tests.support.processes import own_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.hardware.machine import Hardware
    from tests.support.hardware.report import Findings
    from tests.support.machine import Kernel

FRAMEWORKS = ("CUDA driver", "PyTorch", "TensorFlow", "JAX", "CuPy", "Numba")
TORCH = """
import torch
x = torch.rand(2048, 2048, device='cuda')
print('computes:', (x @ x).mean().item() > 0, torch.cuda.device_count())
"""


def brief(row: dict[str, Any]) -> str:
    """Return a row of the status in one line."""
    holders = [f"pid {h['pid']} uses {h['memory_used_mib']} MiB" for h in row["holders"]]
    processes = [f"pid {p['pid']} {p['memory_mib']} MiB" for p in row["processes"]]
    return f"{row['state']}; holders: {holders}; processes: {processes}"


def has_waiters(hardware: Hardware) -> bool:
    return bool(hardware.status()[1])


# -- one reservation --


@check(
    {
        "prints": "%reserve_gpu reserves the GPU, and prints the variables that it sets",
        "memory": "CUDA_DEVICE_MEMORY is the GPU's memory",
        "shell": "the command `reserve-gpu status` shows that the GPU is free again",
    },
    facts={"took": "time of an IPython process that reserves a GPU"},
    limit_s=60,
)
def test_magic(hardware: Hardware, found: Findings) -> None:
    """The first line of a notebook reserves the GPU."""
    total = hardware.read("nvml.nvmlDeviceGetMemoryInfo(handle).total >> 20")
    start = time.monotonic()
    done = hardware.ipython("%reserve_gpu")
    found.fact("took", seconds(time.monotonic() - start))
    lines = (
        rf"Reserving GPU{hardware.index}: ",
        r"CUDA_DEVICE_ORDER = 'PCI_BUS_ID'",
        rf"CUDA_VISIBLE_DEVICES = '{hardware.index}'",
    )
    is_printed = all(re.search(line, done.stdout) for line in lines)
    found.promise("prints", is_printed and not done.returncode, done.stdout + done.stderr)
    memory = re.findall(r"CUDA_DEVICE_MEMORY = '(\d+)'", done.stdout)
    found.promise("memory", memory == [str(total)], memory)
    done = hardware.command(*CLI, "status")
    is_free = not done.returncode and hardware.state() == "free"
    found.promise("shell", is_free, (done.stdout + done.stderr).partition("\n")[0])


@check(
    {name: f"after %reserve_gpu, {name} sees only the reserved GPU" for name in FRAMEWORKS},
    limit_s=150,
)
def test_check(hardware: Hardware, found: Findings) -> None:
    """After a reservation, each framework for CUDA sees the reserved GPU and no other GPU."""
    done = hardware.ipython("%reserve_gpu", CHECK)
    assert done.returncode == 0, done.stderr[-500:]
    for row in json.loads(done.stdout[done.stdout.index("{") :])["frameworks"]:
        detail = f"{row['version']}, {row['state']} {row['reason'] or ''}".strip()
        is_there = row["state"] != "not installed" and row["is_built_for_cuda"] is not False
        fits = row["state"] == "fits" if is_there else None
        found.promise(row["name"], fits, detail if is_there else "not installed for CUDA")


# -- notebooks --


@contextmanager
def two_kernels(hardware: Hardware) -> Iterator[tuple[Kernel, Kernel]]:
    """Start two kernels whose notebooks have names."""
    names = [{"JPY_SESSION_NAME": str(hardware.folder / f"{n}.ipynb")} for n in ("one", "two")]
    with hardware.kernel(**names[0]) as one, hardware.kernel(**names[1]) as two:
        yield one, two


@check(
    {
        "one": "if two kernels request a GPU at the same time, one gets it",
        "pid": "the refusal names the holder's pid",
        "hidden": "after a refusal, CUDA sees no GPU",
        "torch": "PyTorch computes on the reserved GPU",
        "shown": "the status shows the holder, its process and the process's reservation",
    },
    limit_s=150,
)
def test_two_kernels(hardware: Hardware, found: Findings) -> None:
    """One of two kernels gets the GPU, and the other is told the pid of the first."""
    with two_kernels(hardware) as kernels:
        started = [(kernel, kernel.start("%reserve_gpu")) for kernel in kernels]
        cells = [(kernel, kernel.finish(message)) for kernel, message in started]
        errors = sorted(str(cell.error) for _, cell in cells)
        found.promise("one", errors == ["NoFreeDeviceError", "None"], errors)
        (winner,) = (kernel for kernel, cell in cells if not cell.error)
        ((loser, refused),) = ((kernel, cell) for kernel, cell in cells if cell.error)
        pid = winner.pid
        found.promise("pid", f"(pid {pid})" in refused.all, pid)
        # In a child, because a kernel can't start CUDA again after a failed cuInit.
        code = "import ctypes; print(ctypes.CDLL('libcuda.so.1').cuInit(0))"
        cell = loser.run(
            f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {code!r}],"
            " capture_output=True, text=True).stdout.strip()"
        )
        found.promise("hidden", cell.shown == "'100'", f"cuInit {cell.shown}")
        if hardware.is_stand_in or not hardware.has("torch"):
            found.promise("torch", None, "needs PyTorch")
            assert not winner.run(COMPUTE).error
        else:
            cell = winner.run(TORCH)
            found.promise("torch", "computes: True 1" in cell.all, last_line(cell.all))
        row, _ = hardware.status()
    holders = [holder["pid"] for holder in row["holders"]]
    processes = [p["has_reserved"] for p in row["processes"] if p["pid"] == pid]
    is_shown = row["state"] == "reserved" and holders == [pid] and processes == [True]
    # In a container, the driver lists no processes.
    found.promise("shown", is_shown if processes else None, brief(row))


@check(
    {
        "kept": "a restarted kernel keeps its GPU, although another kernel waits",
        "works": "CUDA works in the restarted kernel",
        "shutdown": "after a shutdown, a waiting kernel gets the GPU",
        "killed": "after kill -9 of a kernel that uses CUDA, `run --wait` gets the GPU",
    },
    limit_s=150,
)
def test_handover(hardware: Hardware, found: Findings) -> None:
    """A kernel keeps its GPU until it ends, and then a waiter gets the GPU."""
    with two_kernels(hardware) as (first, second):
        assert not first.run("%reserve_gpu").error
        assert not first.run(f"{COMPUTE}\ntake(1024)").error
        waiting = second.start("%reserve_gpu --wait 60s")
        assert until(lambda: has_waiters(hardware)) is not None
        first.restart()
        first.load()
        cell = first.run("%reserve_gpu")
        row, waiters = hardware.status()
        holders = [holder["pid"] for holder in row["holders"]]
        is_kept = not cell.error and holders == [first.pid] and len(waiters) == 1
        found.promise("kept", is_kept, brief(row))
        cell = first.run(f"{COMPUTE}\ntake(2048); work()")
        found.promise("works", not cell.error, last_line(cell.all))
        start = time.monotonic()
        first.manager.shutdown_kernel(now=False)
        cell = second.finish(waiting)
        took = seconds(time.monotonic() - start)
        found.promise("shutdown", not cell.error and "Reserving GPU" in cell.all, took)
        assert not second.run(f"{COMPUTE}\ntake(4096)").error
        print_time = "import os, time; print(time.monotonic(), os.environ['CUDA_VISIBLE_DEVICES'])"
        argv = [*CLI, "run", "--wait", "60s", "--", sys.executable, "-c", print_time]
        pid = second.pid
        with hardware.running(*argv, environ=hardware.environ(), stdout=-1) as waiter:
            assert until(lambda: has_waiters(hardware)) is not None
            start = time.monotonic()
            os.kill(pid, 9)
            at, visible = waiter.communicate(timeout=60)[0].decode().split()
    took = seconds(float(at) - start)
    found.promise("killed", visible == str(hardware.index), f"the command started after {took}")


# -- use without a reservation --


@check(
    {
        "context": "a process with a bare CUDA context makes the GPU busy",
        "named": "the status of a GPU in use without a reservation names the process and its user",
        "refused": "%reserve_gpu refuses that GPU, and names the process and its user",
        "warned": "a request by number gets that GPU, with a warning that names the process",
        "freed": "the GPU is free once that process is killed",
    },
    limit_s=90,
)
def test_use_without_a_reservation(hardware: Hardware, found: Findings) -> None:
    """A GPU that another process uses is not reserved, unless the user selects it."""
    is_root = not hardware.missing_user()
    user = USER if is_root else own_name()
    with hardware.user_child() if is_root else hardware.child(**hardware.visible()) as child:
        assert not child.run(f"{CUDA}start(); context()").error
        row, _ = hardware.status()
        if child.pid not in [process["pid"] for process in row["processes"]]:
            pytest.skip("the driver does not list the process here, as in a container")
        found.promise("context", row["state"] == "busy", brief(row))
        assert not child.run("take(2048); work()").error
        row, _ = hardware.status()
        named = [(process["pid"], process["user"]) for process in row["processes"]]
        is_named = row["is_used_without_reservation"] and (child.pid, user) in named
        found.promise("named", row["state"] == "busy" and is_named, brief(row))
        done = hardware.ipython("%reserve_gpu")
        text = done.stdout + done.stderr
        is_refused = done.returncode and f"(pid {child.pid})" in text and user in text
        found.promise("refused", bool(is_refused), refusal(text))
        done = hardware.command(*CLI, "run", str(hardware.index), "--", "true")
        text = done.stdout + done.stderr
        found.promise("warned", not done.returncode and str(child.pid) in text, text)
    took = until(lambda: not hardware.command(*CLI, "run", "--", "true").returncode, 30)
    found.promise("freed", took is not None, seconds(took))


@check(
    {
        "number": "once CUDA has started, a request for more GPUs is refused as too late",
        "same": "once CUDA has started, the GPU that it sees can still be reserved",
        "fork": "in a fork of a process that has started CUDA, it is too late",
    },
    limit_s=100,
)
def test_too_late(hardware: Hardware, found: Findings) -> None:
    """A reservation never claims GPUs that CUDA in this process can't see."""
    init = "import ctypes; ctypes.CDLL('libcuda.so.1').cuInit(0)"
    cell = "import torch; torch.cuda.init()" if hardware.has("torch") else init
    done = hardware.ipython(cell, "%reserve_gpu -n 2")
    text = last_line(done.stdout + done.stderr)
    found.promise("number", bool(done.returncode) and "Too late" in done.stdout + done.stderr, text)
    done = hardware.ipython(cell, "%reserve_gpu")
    is_reserved = f"Reserving GPU{hardware.index}" in done.stdout
    found.promise("same", not done.returncode and is_reserved, last_line(done.stdout + done.stderr))
    with hardware.child() as child:
        answer = child.run(f"""{CUDA}
start()
reserve_gpu.current()
reading, writing = os.pipe()
if not os.fork():
    try: reserve_gpu.reserve(); told = 'reserved'
    except BaseException as error: told = type(error).__name__
    os.write(writing, told.encode()); os._exit(0)
os.wait()
os.read(reading, 99).decode()
""")
    found.promise("fork", answer.value == "TooLateError", answer.value or answer.text)


# -- ends --


@check(
    {
        "overdue": "a GPU in use at the end of its lease stays reserved, and is overdue",
        "told": "the next cell says so",
        "freed": "kill -9 frees an overdue GPU",
    },
    limit_s=100,
)
def test_overdue(hardware: Hardware, found: Findings) -> None:
    """A lease that ends does not take a GPU from a process that uses it."""
    lease_s = 6 if hardware.is_stand_in else 20  # PyTorch starts within it
    has_torch = hardware.has("torch") and not hardware.is_stand_in
    with hardware.kernel() as kernel:
        kernel.run("import torch" if has_torch else "0")
        assert not kernel.run(f"%reserve_gpu --for {lease_s}s").error
        assert not kernel.run(TORCH if has_torch else f"{COMPUTE}\ntake(1024)").error
        pid = kernel.pid

        def is_overdue() -> bool:
            holders = hardware.status()[0]["holders"]
            return [h["pid"] for h in holders if h["overdue"] is not None] == [pid]

        took = until(is_overdue, lease_s + 20)
        found.promise("overdue", took is not None, brief(hardware.status()[0]))
        cell = kernel.run("1 + 1")
        found.promise("told", "restart" in cell.all.lower(), cell.all)
        os.kill(pid, 9)
        took = until(lambda: hardware.state() == "free", 30)
    found.promise("freed", took is not None, seconds(took))


BEFORE_END = """
import time
@reserve_gpu.before_end
def save():
    open({path!r}, 'w').write(str(time.monotonic()))
reserve_gpu.reserve(for_='{lease_s}s', end_kernel=True)
time.monotonic()
"""


@check(
    {
        "saved": "a function given to before_end runs before the process ends",
        "ended": "end_kernel ends a process that uses CUDA, and the GPU is free",
    },
    limit_s=60,
)
def test_end_kernel(hardware: Hardware, found: Findings) -> None:
    """With end_kernel, the process saves its work and ends, which frees the GPU."""
    lease_s = 6 if hardware.is_stand_in else 10  # CUDA starts within it
    path = hardware.folder / "saved"
    with hardware.child() as child:
        begin = child.run(BEFORE_END.format(path=str(path), lease_s=lease_s)).value
        assert not child.run(f"{COMPUTE}\ntake(1024)").error
        ended = until(lambda: child.process.poll() is not None, 40)
        end = time.monotonic()
    saved = float(path.read_text()) if path.exists() else None
    is_saved = saved is not None and saved < end
    found.promise("saved", is_saved, f"{seconds(saved and saved - begin)} after the reservation")
    took = until(lambda: hardware.state() == "free", 30)
    is_free = ended is not None and took is not None
    found.promise(
        "ended",
        is_free,
        f"ended {end - begin:.2f} s after the reservation, then free after {seconds(took)}",
    )


# -- users --


@check(
    {
        "can": "an ordinary user can reserve the GPU, and use CUDA there",
        "root": "root is refused a GPU that an ordinary user holds, and told the user and pid",
        "user": "an ordinary user is refused a GPU that root holds, and told the user and pid",
    },
    limit_s=60,
)
def test_two_users(hardware: Hardware, found: Findings) -> None:
    """Root and an ordinary user respect each other's reservations."""
    if reason := hardware.missing_user():
        pytest.skip(f"no process of {USER} can run: {reason}")
    with hardware.user_child() as child:
        answer = child.reserve()
        works = child.run(COMPUTE)
        found.promise("can", not (answer.error or works.error), answer.text + works.text)
        done = hardware.ipython("%reserve_gpu")
        is_told = USER in done.stdout and f"(pid {child.pid})" in done.stdout
        found.promise("root", bool(done.returncode) and is_told, refusal(done.stdout))
    until(lambda: hardware.state() == "free", 30)
    with hardware.child() as child:
        assert not child.reserve().error
        argv = [*as_user(), *CLI, "run", "--", "true"]
        done = hardware.command(*argv, HOME="/nonexistent")
        is_told = "root" in done.stderr and f"(pid {child.pid})" in done.stderr
        found.promise("user", bool(done.returncode) and is_told, refusal(done.stderr))
