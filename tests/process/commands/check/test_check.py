"""`%reserve_gpu --check` with stand-in frameworks, which run in real child processes.

Each framework costs a process, so most facts are shown with one or two of them.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

import reserve_gpu
from reserve_gpu.gpus import cuda_environment
from reserve_gpu.system import subprocesses
from tests.support.check import (
    DRIVER,
    all_are,
    check_rows,
    check_troubles,
    no_process_left,
    processes_of,
    states,
)
from tests.support.frameworks import KEYS, NAMES, STANDINS, installed
from tests.support.processes import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.here import Here
    from tests.support.machine import Child, Machine

    Install = Callable[..., None]


@pytest.fixture
def ready(here: Here) -> pathlib.Path:
    """Make a pipe that a stand-in opens once it hangs."""
    path = here.folder / "ready"
    os.mkfifo(path)
    os.environ["STAND_IN_READY"] = str(path)
    return path


@pytest.fixture
def install(here: Here, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return a function that installs stand-ins of frameworks; see `installed`."""
    return partial(installed, monkeypatch)


# -- what fits -------------------------------------------------------------------------------------


@pytest.mark.promise
def test_every_framework_fits_the_reserved_gpu(install: Install) -> None:
    install(*KEYS)
    reserve_gpu.reserve("1")
    rows = check_rows()
    assert states(rows) == all_are("fits", *NAMES)
    assert {row["sees"][0]["label"] for row in rows["all"]["frameworks"]} == {"GPU1"}
    assert {row["cap"] for row in rows["all"]["frameworks"]} == {None}
    assert rows["PyTorch"]["version"] == "2.9.0"
    assert rows["PyTorch"]["cuda_version"] == "11.4"
    assert rows["CuPy"]["cuda_version"] == "11.8"
    assert rows["all"]["is_well"]


# -- what does not fit -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "troubles",
    [
        {"torch": "cpu", "jax": "old", "cupy": "ignores", "numba": "raises"},
        {"tensorflow": "hides", "jax": "crashes", "numba": "simulates", "cupy": "exits"},
    ],
    ids=["first", "second"],
)
def test_a_fault_does_not_affect_the_others(install: Install, troubles: dict[str, str]) -> None:
    install("torch", **troubles)
    check_troubles(troubles)


@pytest.mark.parametrize(
    ("visible", "keys"),
    [
        (None, ["jax"]),
        ("0", ["jax"]),
        pytest.param("0,1", KEYS, marks=pytest.mark.full),
    ],
)
def test_no_framework_starts_on_an_unreserved_gpu(
    here: Here, install: Install, visible: str | None, keys: list[str]
) -> None:
    install(*keys)
    reserve_gpu.reserve("1")
    del os.environ["CUDA_VISIBLE_DEVICES"]
    if visible:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    rows = check_rows()
    assert list(states(rows).values()) == ["other devices"] * (len(keys) + 1)
    assert rows["JAX"]["sees"][0]["label"] == "GPU0"
    assert not [call for call in here.calls() if "PrimaryCtx" in call]


def test_a_child_process_checks_its_parent_s_reservation(here: Here) -> None:
    code = "import sys; sys.modules.update(torch=None, jax=None, numba=None)\n"
    code += "import reserve_gpu, json; print(json.dumps(reserve_gpu.check().to_dict()))"
    reserve_gpu.reserve("1,0")
    found = json.loads(subprocess.check_output([sys.executable, "-c", code]))
    assert [device["label"] for device in found["reserved"]] == ["GPU1", "GPU0"]
    assert {row["state"] for row in found["frameworks"]} == {"fits", "not installed"}


# -- the driver ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "key"),
    [("CUDA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"), ("LD_LIBRARY_PATH", "driver")],
)
def test_the_driver_s_fault_is_the_cause(install: Install, variable: str, key: str) -> None:
    """No GPU is visible, or the child processes don't find the CUDA library."""
    install("torch")
    os.environ[variable] = ""
    rows = check_rows()
    assert states(rows) == all_are("no device", "PyTorch")
    assert key in rows["PyTorch"]["reason"]
    assert (rows[DRIVER]["remedy"] is None) is (variable == "CUDA_VISIBLE_DEVICES")


def hide_frameworks(child: Child, *shown: str) -> None:
    """Let a child process find no frameworks except those."""
    child.run(f"sys.modules.update({', '.join(f'{key}=None' for key in {*KEYS} - {*shown})})")


# -- the calling process ---------------------------------------------------------------------------


def test_a_check_does_not_change_the_calling_process(here: Here, install: Install) -> None:
    install("torch")
    reserve_gpu.reserve("1")
    environ, modules = dict(os.environ), set(sys.modules)
    check_rows()
    assert not cuda_environment.cuda_started()
    assert "torch" not in set(sys.modules) - modules
    assert dict(os.environ) == environ
    calls = here.log.read_text().splitlines()
    assert f"{os.getpid()} cuInit" not in calls
    assert [call for call in calls if call.endswith(" cuInit")]


def test_modules_in_the_working_directory_are_not_imported(here: Here, install: Install) -> None:
    """Entries of sys.path that are not strings are left out."""
    for name in ("json", "uuid", "ctypes", "runpy", "contextlib"):
        (here.folder / f"{name}.py").write_text("raise SystemExit('trap')")
    install("jax")
    reserve_gpu.reserve()
    odd: list[Any] = [pathlib.Path("/x"), 7, "\udcff"]
    sys.path[:] = ["", *sys.path, *odd]
    assert states(check_rows()) == all_are("fits", "JAX")


@pytest.mark.full
def test_if_one_child_can_not_start_the_others_end(machine: Machine) -> None:
    with machine.child(PYTHONPATH=STANDINS) as child:
        child.run("import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (30, 30))")
        answer = child.run(
            "files = []\ntry:\n while True: files.append(open('/dev/null'))\n"
            "except OSError: del files[-12:]\nreserve_gpu.check()"
        )
        assert answer.error == "ReserveGPUError"
        assert processes_of(machine) == {child.pid}


def test_a_check_leaves_nothing_behind_at_its_timeout(here: Here, install: Install) -> None:
    def descriptors_and_threads() -> Any:
        return sorted(os.listdir("/proc/self/fd")), threading.active_count()

    install(torch="hangs")
    check_rows(limit_s=0.1)
    before = descriptors_and_threads()
    with no_process_left(here):
        rows = check_rows(limit_s=0.1)
    assert descriptors_and_threads() == before
    assert rows["PyTorch"]["state"] == "fails"
    assert " 0.1 s " in rows["PyTorch"]["reason"]


# -- frameworks that hang --------------------------------------------------------------------------

# A program that answers, starts another one, ignores SIGTERM, and hangs.
HANGING = """trap '' TERM; echo '{"doing": "hanging"}'; sleep 600 & echo noise >&2; wait"""
ENDING = """echo 7; echo '{"a": 1}'; echo '{"a'; echo last >&2; exit 3"""


def test_a_hanging_program_is_killed_with_its_children(here: Here) -> None:
    """Its output up to then is kept, and other programs are not affected."""
    commands = {"hangs": ["sh", "-c", HANGING], "ends": ["sh", "-c", ENDING]}
    with no_process_left(here), subprocesses.run_programs(commands, here.environ()) as started:
        ends = {key: started[key].code() for key in subprocesses.wait_for_output(started, 2.0)}
    assert ends == {"ends": 3}
    assert started["hangs"].output == (b'{"doing": "hanging"}\n', b"noise\n")
    assert started["ends"].output == (b'7\n{"a": 1}\n{"a\n', b"last\n")


def test_ctrl_c_ends_a_check(here: Here, install: Install, ready: pathlib.Path) -> None:
    """The error is one line, and the reservation is kept."""
    install(torch="hangs")
    shell = here.shell()
    before = shell.run("%reserve_gpu").stdout

    def interrupt() -> None:
        ready.read_bytes()
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    with no_process_left(here):
        thread.start()
        cell = shell.run("%reserve_gpu --check")
        thread.join()
    assert (cell.error, cell.traceback) == ("WaitInterrupted", [])
    assert cell.stdout.count("\n") == 1
    assert shell.run("%reserve_gpu").stdout == before


# -- frameworks that hang --------------------------------------------------------------------------


def test_the_processes_of_a_killed_check_end(machine: Machine) -> None:
    path = machine.folder / "ready"
    os.mkfifo(path)
    trouble = {"STAND_IN_READY": str(path), "STAND_IN_TROUBLE": "torch=waits"}
    with machine.child(PYTHONPATH=STANDINS, **trouble) as child:
        hide_frameworks(child, "torch")
        child.send("reserve_gpu.check()")
        path.read_bytes()
        child.kill()
        wait_for(lambda: not processes_of(machine), pause_s=0.02)


@pytest.mark.full
@pytest.mark.needs("frameworks")
def test_real_cpu_builds_see_no_device_and_real_numba_fits(here: Here) -> None:
    reserve_gpu.reserve("1")
    rows = check_rows()
    for name in ("PyTorch", "JAX"):
        assert rows[name]["state"] == "no device"
        assert rows[name]["is_built_for_cuda"] is False
    assert rows["PyTorch"]["version"].startswith("2.13.0")
    assert [device["label"] for device in rows["Numba"]["sees"]] == ["GPU1"]
    assert rows["Numba"]["state"] == "fits"
