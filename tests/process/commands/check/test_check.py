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
    TROUBLES,
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


def install_metadata(here: Here, name: str) -> None:
    """Let this Python find the metadata of an installed package."""
    (here.folder / name).mkdir()
    sys.path.insert(0, str(here.folder))  # `installed` restores the list


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


def test_each_framework_has_a_variable_or_code_as_its_cap(here: Here, install: Install) -> None:
    install(*KEYS)
    install_metadata(here, "torch-2.10.0.dist-info")
    reserve_gpu.reserve("1", memory="3GB")
    rows = check_rows()
    assert states(rows) == all_are("fits", *NAMES)
    fraction = os.environ["XLA_CLIENT_MEM_FRACTION"]
    frameworks = rows["all"]["frameworks"]
    assert {row["name"]: row["cap"] for row in frameworks if row["cap"]} == {
        "PyTorch": f"PYTORCH_ALLOC_CONF=per_process_memory_fraction:{fraction}",
        "JAX": f"XLA_CLIENT_MEM_FRACTION={fraction}",
        "CuPy": f"CUPY_GPU_MEMORY_LIMIT={os.environ['CUPY_GPU_MEMORY_LIMIT']}",
    }
    (uncapped,) = (row for row in frameworks if row["to_type"])
    assert uncapped["name"] == "TensorFlow"
    assert "memory_limit=2093" in uncapped["to_type"]
    assert rows["all"]["part_mib"] == pytest.approx(3e9 / 2**20)


def test_a_cap_that_the_user_has_set_is_shown(here: Here, install: Install) -> None:
    """A framework without a cap has the same advice as the reservation's warning."""
    install("cupy", "torch")
    install_metadata(here, "torch-2.9.1.dist-info")
    os.environ["CUPY_GPU_MEMORY_LIMIT"] = "<b>1e9</b>\x1b"
    with pytest.warns(reserve_gpu.ReserveGPUWarning) as warned:
        reserve_gpu.reserve("1", memory="3GB")
    check = reserve_gpu.check()
    rows = {row["name"]: row for row in check.to_dict()["frameworks"]}
    assert rows["CuPy"]["cap"] == "CUPY_GPU_MEMORY_LIMIT=<b>1e9</b>\N{REPLACEMENT CHARACTER}"
    assert (rows["PyTorch"]["cap"], rows["PyTorch"]["state"]) == (None, "fits")
    assert str(check).splitlines()[-2:] == str(warned[-1].message).splitlines()


@pytest.mark.parametrize(
    ("scenario", "request_", "labels", "keys"),
    [
        ("eight", "5,2", ["GPU5", "GPU2"], ["cupy"]),
        ("mig570", "1:4,1:1", ["GPU1:4", "GPU1:1"], ["torch"]),
        pytest.param("mixed", "1,0", ["GPU1", "GPU0"], KEYS, marks=pytest.mark.full),
        pytest.param("mig", "1:2", ["GPU1:2"], KEYS, marks=pytest.mark.full),
    ],
)
def test_several_gpus_and_instances_are_identified_in_order(
    here: Here,
    install: Install,
    scenario: str,
    request_: str,
    labels: list[str],
    keys: tuple[str, ...],
) -> None:
    here.use(scenario)
    install(*keys)
    reserve_gpu.reserve(request_)
    rows = check_rows()
    assert [*states(rows).values()] == ["fits"] * (len(keys) + 1)
    for name in states(rows):
        assert [device["label"] for device in rows[name]["sees"]] == labels


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


@pytest.mark.full
@pytest.mark.parametrize("trouble", TROUBLES)
def test_each_framework_reports_each_fault(install: Install, trouble: str) -> None:
    troubles = dict.fromkeys(TROUBLES[trouble][2], trouble)
    install(*KEYS, **troubles)
    check_troubles(troubles)


def test_a_build_without_code_for_the_gpu_fails(here: Here, install: Install) -> None:
    here.add("capability 12.0")
    install("torch", "tensorflow", "jax")
    reserve_gpu.reserve("1")
    rows = check_rows()
    verdicts = {"PyTorch": "fails", "TensorFlow": "fails"}
    assert states(rows) == all_are("fits", "JAX") | verdicts
    for name in verdicts:
        assert "sm_120" in rows[name]["reason"]
        assert rows[name]["sees"][0]["label"] == "GPU1"


def test_output_of_a_framework_is_not_taken_for_an_answer(install: Install) -> None:
    install(torch="noise")
    reserve_gpu.reserve()
    rows = check_rows()
    assert states(rows) == all_are("fits", "PyTorch")
    assert rows["PyTorch"]["version"] == "2.9.0"


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


def test_without_a_reservation_no_gpu_is_used(here: Here, install: Install) -> None:
    install("jax")
    rows = check_rows()
    assert states(rows) == all_are("unreserved", "JAX")
    assert [device["label"] for device in rows["JAX"]["sees"]] == ["GPU0", "GPU1"]
    assert (rows["all"]["reserved"], rows["all"]["is_well"]) == ([], True)
    assert not [call for call in here.calls() if "PrimaryCtx" in call]


def test_a_held_gpu_is_checked_although_nvml_fails(here: Here, install: Install) -> None:
    """Without a reservation, the failure of NVML is raised."""
    install("torch")
    reserve_gpu.reserve("1")
    here.add("fail nvmlInitWithFlags * 18")
    assert states(check_rows()) == all_are("fits", "PyTorch")
    reserve_gpu.release()
    with pytest.raises(reserve_gpu.DriverError):
        reserve_gpu.check()


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


def test_a_damaged_driver_library_has_no_advice(here: Here, install: Install) -> None:
    install()
    (here.folder / "libcuda.so.1").write_text("no library")
    os.environ["LD_LIBRARY_PATH"] = str(here.folder)
    row = check_rows()[DRIVER]
    assert "libcuda.so.1" in row["reason"]
    assert row["remedy"] is None


def test_an_error_of_cuinit_is_named_in_the_driver_s_row(here: Here, install: Install) -> None:
    install("torch")
    reserve_gpu.reserve("1")
    here.add("fail cuInit * 999")
    rows = check_rows()
    assert states(rows) == all_are("no device", "PyTorch")
    assert rows[DRIVER]["reason"].startswith("cuInit returned 999 CUDA_ERROR_UNKNOWN: ")
    assert "sudo modprobe" in rows[DRIVER]["remedy"]
    assert "driver" in rows["PyTorch"]["reason"]


def hide_frameworks(child: Child, *shown: str) -> None:
    """Let a child process find no frameworks except those."""
    child.run(f"sys.modules.update({', '.join(f'{key}=None' for key in {*KEYS} - {*shown})})")


def test_gpus_that_await_their_ready_state_come_first_in_the_advice(machine: Machine) -> None:
    machine.write("conf-compute on\ngpu\n  name NVIDIA H100 PCIe")
    with machine.child() as child:
        hide_frameworks(child)
        child.run("reserve_gpu.reserve()")
        row = child.run("reserve_gpu.check().to_dict()['frameworks'][0]").value
    assert "802 CUDA_ERROR_SYSTEM_NOT_READY" in row["reason"]
    assert row["remedy"].splitlines()[1] == "nvidia-smi conf-compute -srs 1"


def test_gpus_in_their_ready_state_fit(machine: Machine) -> None:
    """The mode of confidential computing is not read then."""
    machine.write("conf-compute protected-pcie\nconf-compute-ready 1\ngpu")
    with machine.child() as child:
        hide_frameworks(child)
        child.run("reserve_gpu.reserve()")
        assert child.run("reserve_gpu.check().is_well").value is True
    assert not [call for call in machine.calls() if "ConfCompute" in call]


# -- a number of GPUs that PyTorch keeps -----------------------------------------------------------


def test_a_number_of_gpus_from_before_the_reservation_does_not_fit(machine: Machine) -> None:
    """The reservation and the check suggest the same line, which corrects the number."""
    machine.use("eight")
    trouble = {"STAND_IN_TROUBLE": "torch=keeps-count"}
    with machine.child(PYTHONPATH=STANDINS, **trouble) as child:
        hide_frameworks(child, "torch")
        assert child.run("import torch, warnings\ntorch.cuda.device_count()").value == 8
        (warning,) = child.run(
            "with warnings.catch_warnings(record=True) as warned:\n"
            "    warnings.simplefilter('always'); reserve_gpu.reserve('3')\n"
            "[str(each.message) for each in warned]"
        ).value
        row = child.run("reserve_gpu.check().to_dict()['frameworks'][1]").value
        line = row["remedy"].splitlines()[-1]
        assert warning.splitlines()[-1] == line
        assert (row["name"], row["state"]) == ("PyTorch", "other devices")
        assert [device["label"] for device in row["sees"]] == ["GPU3"]
        assert child.run("torch.cuda.device_count()").value == 8
        assert child.run(line).error is None
        assert child.run("torch.cuda.device_count()").value == 1
        assert child.run("reserve_gpu.check().is_well").value is True
        assert child.run("reserve_gpu.gpus.cuda_environment.cuda_started()").value is False


def test_a_pytorch_that_counts_again_fits(machine: Machine) -> None:
    machine.use("eight")
    with machine.child(PYTHONPATH=STANDINS, STAND_IN_TROUBLE="torch=counts") as child:
        hide_frameworks(child, "torch")
        child.run("import torch, warnings\nwarnings.simplefilter('error')")
        assert child.run("torch.cuda.device_count()").value == 8
        assert child.run("reserve_gpu.reserve('3')").error is None
        assert child.run("torch.cuda.device_count()").value == 1
        assert child.run("reserve_gpu.check().is_well").value is True


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


def test_a_process_that_ignores_sigchld_can_check(install: Install) -> None:
    """The kernel removes the children of such a process without its waiting for them."""
    install("torch")
    reserve_gpu.reserve()
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert states(check_rows()) == all_are("fits", "PyTorch")
    finally:
        signal.signal(signal.SIGCHLD, before)


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


def test_a_check_does_not_wait_for_an_answered_framework(install: Install) -> None:
    install(torch="lingers")
    reserve_gpu.reserve()
    assert states(check_rows()) == all_are("fits", "PyTorch")


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


# -- the result in a notebook ----------------------------------------------------------------------


def test_text_html_and_json_of_a_check_agree(here: Here, install: Install) -> None:
    """Output of a framework is escaped. The progress is shown until the result is."""
    install(torch="crashes")
    shell = here.shell(is_notebook=True)
    shell.run("%reserve_gpu 1")
    *progress, shown = shell.run("%reserve_gpu --check").values
    rows = reserve_gpu.check().to_dict()["frameworks"]
    assert progress[0]["text/plain"]
    assert progress[-1]["text/plain"] == ""
    text, html = shown["text/plain"], shown["text/html"]
    for row in rows:
        assert row["name"] in text
        assert row["name"] in html
    assert text.count("fits") == html.count("fits") == 1
    assert "<b>boom</b>" in text
    assert "<b>boom" not in html
    assert "\x1b" not in text + html


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
