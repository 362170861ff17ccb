"""%reserve_gpu --check: what each framework sees, asked of real child processes.

Each framework costs a child, so most facts are shown on one or two; the layer `full` has all.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import pytest

import reserve_gpu
from reserve_gpu.gpus import cuda_environment
from reserve_gpu.system import subprocesses
from tests.support.frameworks import KEYS, NAMES, STANDINS, installed
from tests.support.processes import wait_for

if TYPE_CHECKING:
    from tests.support.here import Here
    from tests.support.machine import Machine

from tests.support.check import all_are, check, check_troubles, left_behind, processes_of, states

DRIVER = "CUDA driver"

probing = pytest.mark.process  # it starts a child for the driver and for each framework


class Cells(HTMLParser):
    """The text of each cell of a table, and the names of all tags."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.tags: set[str] = set()
        self.feed(html)

    def handle_starttag(self, tag: str, _: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data


@pytest.fixture
def ready(here: Here) -> pathlib.Path:
    """Make a pipe that a stand-in opens once it hangs, or waits."""
    path = here.folder / "ready"
    os.mkfifo(path)
    os.environ["STAND_IN_READY"] = str(path)
    return path


@pytest.fixture
def packages(here: Here, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let this Python have these packages, by the folders beside them."""

    def install(*names: str) -> None:
        for name in names:
            (here.folder / name).mkdir()
        monkeypatch.setattr(sys, "path", [str(here.folder), *sys.path])

    return install


# -- what fits -------------------------------------------------------------------------------------


@pytest.mark.promise
@probing
def test_every_framework_fits(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each framework on the reserved GPU has a row: its version, what it was built for, fits."""
    installed(monkeypatch, *KEYS)
    reserve_gpu.reserve("1")
    rows = check()
    assert states(rows) == all_are("fits", *NAMES)
    assert {row["sees"][0]["label"] for row in rows["all"]["frameworks"]} == {"GPU1"}
    assert rows["PyTorch"]["version"] == "2.9.0"
    assert rows["PyTorch"]["cuda_version"] == "11.4"
    assert rows["CuPy"]["cuda_version"] == "11.8"
    assert rows["all"]["is_well"]


@probing
def test_within_a_part(here: Here, monkeypatch: pytest.MonkeyPatch, packages: Any) -> None:
    """Of a part, each framework has the variable that caps it, or the line to type."""
    installed(monkeypatch, *KEYS)
    packages("torch-2.10.0.dist-info")
    reserve_gpu.reserve("1", memory="3GB")
    rows = check()
    assert states(rows) == all_are("fits", *NAMES)
    fraction = os.environ["XLA_CLIENT_MEM_FRACTION"]
    assert {name: row["cap"] for name, row in rows.items() if name != "all" and row["cap"]} == {
        "PyTorch": f"PYTORCH_ALLOC_CONF=per_process_memory_fraction:{fraction}",
        "JAX": f"XLA_CLIENT_MEM_FRACTION={fraction}",
        "CuPy": f"CUPY_GPU_MEMORY_LIMIT={os.environ['CUPY_GPU_MEMORY_LIMIT']}",
    }
    typed = {name: row["to_type"] for name, row in rows.items() if name != "all" and row["to_type"]}
    assert [*typed] == ["TensorFlow"]
    assert "memory_limit=2093" in typed["TensorFlow"]
    assert rows["all"]["part_mib"] == pytest.approx(3e9 / 2**20)


@probing
def test_a_part_is_shown(here: Here, monkeypatch: pytest.MonkeyPatch, packages: Any) -> None:
    """What caps a framework is shown, whoever has set it; below, what to type for the others."""
    installed(monkeypatch, "cupy", "torch")
    packages("torch-2.9.1.dist-info")
    os.environ["CUPY_GPU_MEMORY_LIMIT"] = "<b>1e9</b>\x1b"
    with pytest.warns(reserve_gpu.ReserveGPUWarning) as warned:
        reserve_gpu.reserve("1", memory="3GB")
    note = str(warned[-1].message).splitlines()
    found = reserve_gpu.check()
    lines = str(found).splitlines()
    assert lines[0].startswith("Reserved: 2.8 GiB of GPU1. Python: ")
    assert lines[1].split()[-2:] == ["cap", "result"]
    ends = {line.split()[0]: line for line in lines[2:]}
    assert ends["PyTorch"].split()[-3:] == ["not", "capped", "fits"]
    cap = "CUPY_GPU_MEMORY_LIMIT=<b>1e9</b>\N{REPLACEMENT CHARACTER}"
    assert f"  {cap}  " in ends["CuPy"]
    assert lines[-2:] == note
    html = found._repr_html_()
    assert f"<div>{note[1]}</div>" in html
    rows = Cells(html).rows
    assert {len(row) for row in rows} == {6}
    assert {row[0]: row[-2] for row in rows}["CuPy"] == cap


@probing
def test_a_whole_gpu_has_no_column_of_caps(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has reserved all of a GPU reads nothing of caps."""
    installed(monkeypatch)
    reserve_gpu.reserve()
    assert check()[DRIVER]["cap"] is None
    assert "cap" not in repr(reserve_gpu.check()).splitlines()[1].split()


ALL = pytest.param(KEYS, marks=pytest.mark.full, id="all")


@probing
@pytest.mark.parametrize(
    ("scenario", "asked", "labels", "keys"),
    [
        ("eight", "5,2", ["GPU5", "GPU2"], ["cupy"]),
        ("mig570", "1:4,1:1", ["GPU1:4", "GPU1:1"], ["torch"]),
        pytest.param("eight", "5,2", ["GPU5", "GPU2"], KEYS, marks=pytest.mark.full),
        pytest.param("mixed", "1,0", ["GPU1", "GPU0"], KEYS, marks=pytest.mark.full),
        pytest.param("mig", "1:2", ["GPU1:2"], KEYS, marks=pytest.mark.full),
        pytest.param("mig570", "1:4,1:1", ["GPU1:4", "GPU1:1"], KEYS, marks=pytest.mark.full),
    ],
)
def test_several_and_instances(
    here: Here,
    monkeypatch: pytest.MonkeyPatch,
    scenario: str,
    asked: str,
    labels: list[str],
    keys: tuple[str, ...],
) -> None:
    """Several GPUs in their order, and MIG instances, are told from others."""
    here.use(scenario)
    installed(monkeypatch, *keys)
    reserve_gpu.reserve(asked)
    rows = check()
    assert set(states(rows).values()) == {"fits"}
    assert len(rows) == len(keys) + 2
    for name in states(rows):
        assert [device["label"] for device in rows[name]["sees"]] == labels


# Each trouble once, in two checks.
MIXED = [
    {"torch": "cpu", "jax": "old", "cupy": "ignores", "numba": "raises"},
    {"tensorflow": "hides", "jax": "crashes", "numba": "simulates", "cupy": "exits"},
]


@probing
@pytest.mark.parametrize("troubles", MIXED, ids=["first", "second"])
def test_troubles_side_by_side(
    here: Here, monkeypatch: pytest.MonkeyPatch, troubles: dict[str, str]
) -> None:
    """A framework in trouble has a row that says so and why, whatever befalls the others."""
    installed(monkeypatch, "torch", **troubles)
    check_troubles(troubles)


@probing
@pytest.mark.parametrize("capability", ["12.0", pytest.param("3.7", marks=pytest.mark.full)])
def test_no_code_for_the_gpu(here: Here, monkeypatch: pytest.MonkeyPatch, capability: str) -> None:
    """A build without code for the reserved GPU, newer or older than it, does not fit."""
    here.add(f"capability {capability}")
    installed(monkeypatch, "torch", "tensorflow", "jax")
    reserve_gpu.reserve("1")
    rows = check()
    assert states(rows) == {
        **all_are("fits", "JAX"),
        **dict.fromkeys(("PyTorch", "TensorFlow"), "fails"),
    }
    target = f"sm_{capability.replace('.', '')}"
    for name in ("PyTorch", "TensorFlow"):
        assert rows[name]["reason"].startswith(f"no code for {target} in this build, only for sm_5")
        assert rows[name]["sees"][0]["label"] == "GPU1"


@probing
@pytest.mark.parametrize("keys", [("jax",), ALL])
def test_fewer_than_reserved(
    here: Here, monkeypatch: pytest.MonkeyPatch, keys: tuple[str, ...]
) -> None:
    """A framework that leaves out one of two reserved GPUs doesn't fit."""
    installed(monkeypatch, **dict.fromkeys(keys, "fewer"))
    reserve_gpu.reserve(count=2)
    rows = check()
    assert states(rows).pop(DRIVER) == "fits"
    assert list(states(rows).values())[1:] == ["other devices"] * len(keys)
    assert rows["JAX"]["reason"] == "not all reserved devices"


@probing
@pytest.mark.parametrize("keys", [("torch",), ALL])
def test_noise_is_no_answer(
    here: Here, monkeypatch: pytest.MonkeyPatch, keys: tuple[str, ...]
) -> None:
    """What a framework prints, much of it and the like of an answer, is not taken for one."""
    installed(monkeypatch, **dict.fromkeys(keys, "noise"))
    reserve_gpu.reserve()
    rows = check()
    assert set(states(rows).values()) == {"fits"}
    assert rows["PyTorch"]["version"] == "2.9.0"


@probing
@pytest.mark.parametrize(
    ("visible", "keys"),
    [
        (None, ["jax"]),
        ("0", ["jax"]),
        *(pytest.param(value, KEYS, marks=pytest.mark.full) for value in (None, "0", "0,1")),
    ],
)
def test_others_gpus_are_not_touched(
    here: Here, monkeypatch: pytest.MonkeyPatch, visible: str | None, keys: list[str]
) -> None:
    """Where more than the reserved GPU is visible no framework starts on any, and all say so."""
    installed(monkeypatch, *keys)
    reserve_gpu.reserve("1")
    del os.environ["CUDA_VISIBLE_DEVICES"]
    if visible:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    rows = check()
    assert list(states(rows).values()) == ["other devices"] * (len(keys) + 1)
    assert all(
        rows[name]["reason"].endswith("after the reservation; reserve again")
        for name in states(rows)
    )
    assert rows["JAX"]["sees"][0]["label"] == "GPU0"
    assert not [call for call in here.calls() if "PrimaryCtx" in call]


@probing
def test_nothing_reserved(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a reservation the rows say what is visible, and no GPU is used."""
    installed(monkeypatch, "jax")
    found = reserve_gpu.check()
    rows = {row["name"]: row for row in found.to_dict()["frameworks"]}
    assert rows[DRIVER]["state"] == rows["JAX"]["state"] == "unreserved"
    assert [device["label"] for device in rows["JAX"]["sees"]] == ["GPU0", "GPU1"]
    assert not found.reserved
    assert found.is_well
    assert str(found).startswith("Nothing is reserved here")
    assert max(map(len, str(found).splitlines()[:2])) <= 80
    assert "CUDA_VISIBLE_DEVICES is not set." in str(found)
    assert not [call for call in here.calls() if "PrimaryCtx" in call]


@probing
def test_nvml_fails_since(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is held is checked though NVML fails by now; where nothing is held its error is said."""
    installed(monkeypatch, "torch")
    reserve_gpu.reserve("1")
    here.add("fail nvmlInitWithFlags * 18")
    assert states(check()) == all_are("fits", "PyTorch")
    reserve_gpu.release()
    with pytest.raises(reserve_gpu.DriverError, match="driver was updated"):
        reserve_gpu.check()


@probing
def test_in_a_child_of_the_holder(here: Here) -> None:
    """A process that was started by the one that holds the GPUs checks that reservation."""
    code = "import sys; sys.modules.update(torch=None, jax=None, numba=None)\n"
    code += "import reserve_gpu, json; print(json.dumps(reserve_gpu.check().to_dict()))"
    reserve_gpu.reserve("1,0")
    found = json.loads(subprocess.check_output([sys.executable, "-c", code]))
    assert [device["label"] for device in found["reserved"]] == ["GPU1", "GPU0"]
    assert {row["state"] for row in found["frameworks"]} == {"fits", "not installed"}


@probing
@pytest.mark.parametrize("visible", ["", pytest.param("7", marks=pytest.mark.full)])
def test_an_empty_variable(here: Here, monkeypatch: pytest.MonkeyPatch, visible: str) -> None:
    """An empty variable, or one that names nothing, is given as the cause of seeing no device."""
    installed(monkeypatch, "torch")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible
    rows = check()
    assert states(rows) == all_are("no device", "PyTorch")
    assert all("CUDA_VISIBLE_DEVICES" in rows[name]["reason"] for name in states(rows))


@probing
def test_without_a_driver(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a driver there are rows as well, and each says why it sees nothing."""
    installed(monkeypatch, "torch", "jax")
    os.environ["LD_LIBRARY_PATH"] = ""  # for the children
    rows = check()
    assert states(rows) == all_are("no device", "PyTorch", "JAX")
    assert rows[DRIVER]["reason"].startswith("libcuda.so.1: cannot open")
    assert "NVIDIA_DRIVER_CAPABILITIES=compute" in rows[DRIVER]["remedy"]
    reasons = {rows[name]["reason"] for name in ("PyTorch", "JAX")}
    assert reasons == {"the CUDA driver does not start"}


@probing
def test_a_driver_of_which_nothing_is_known(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """A libcuda.so.1 that is there and can't be loaded comes with no advice for a missing one."""
    installed(monkeypatch)
    (here.folder / "libcuda.so.1").write_text("no library")
    os.environ["LD_LIBRARY_PATH"] = str(here.folder)
    row = check()[DRIVER]
    assert "libcuda.so.1: " in row["reason"]
    assert row["remedy"] is None


@probing
def test_a_driver_that_does_not_start(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where cuInit fails the driver has its error by number and name; the others point there."""
    installed(monkeypatch, "torch")
    here.add("fail cuInit * 801")
    rows = check()
    assert states(rows) == all_are("no device", "PyTorch")
    error = "cuInit returned 801 CUDA_ERROR_NOT_SUPPORTED: operation not supported"
    assert rows[DRIVER]["reason"] == error
    assert rows["PyTorch"]["reason"] == "the CUDA driver does not start"


@probing
@pytest.mark.parametrize(
    ("code", "name", "typed"),
    [
        (802, "CUDA_ERROR_SYSTEM_NOT_READY", "systemctl status nvidia-fabricmanager"),
        (100, "CUDA_ERROR_NO_DEVICE", "ls -l /dev/nvidia*"),
        (999, "CUDA_ERROR_UNKNOWN", "sudo modprobe -r nvidia_uvm && sudo modprobe nvidia_uvm"),
    ],
)
def test_what_to_do_about_the_driver(
    here: Here, monkeypatch: pytest.MonkeyPatch, code: int, name: str, typed: str
) -> None:
    """Of a driver that does not start, what can be typed stands alone on a line, once."""
    installed(monkeypatch, "torch")
    reserve_gpu.reserve("1")
    here.add(f"fail cuInit * {code}")
    lines = str(reserve_gpu.check()).splitlines()
    assert [line for line in lines if typed in line] == [typed]
    assert f"no device: cuInit returned {code} {name}: " in lines[2]
    assert lines[3].endswith("no device: the CUDA driver does not start")


READY_STATE_FIRST = "nvidia-smi conf-compute -srs 1", "systemctl status nvidia-fabricmanager"
FABRIC_MANAGER_FIRST = READY_STATE_FIRST[::-1]
ONLY_FABRIC_MANAGER = READY_STATE_FIRST[1:]
ON = "conf-compute on\n"
FAILS = "fail cuInit * 802\n"
MISSING = "missing nvmlSystemGetConfCompute"
# Descriptions of a machine whose CUDA is not ready, and the commands that the check suggests.
READY_STATES: dict[str, tuple[str, tuple[str, ...]]] = {
    "not ready": (ON, READY_STATE_FIRST),
    "protected PCIe": ("conf-compute protected-pcie\n", READY_STATE_FIRST),
    "older driver": (f"{MISSING}Settings\n{ON}", READY_STATE_FIRST),
    "ready": (f"{FAILS}conf-compute-ready 1\n{ON}", ONLY_FABRIC_MANAGER),
    "off": (f"{FAILS}conf-compute off\n", ONLY_FABRIC_MANAGER),
    "not supported": (FAILS, ONLY_FABRIC_MANAGER),
    "old driver": (f"{MISSING}Settings\n{MISSING}State\n{ON}", FABRIC_MANAGER_FIRST),
    "no ready state": (f"{MISSING}GpusReadyState\n{ON}", FABRIC_MANAGER_FIRST),
    "error": (f"fail nvmlSystemGetConfComputeGpusReadyState * 999\n{ON}", FABRIC_MANAGER_FIRST),
}


@pytest.mark.parametrize("state", READY_STATES)
def test_gpus_that_are_not_ready_for_confidential_computing(machine: Machine, state: str) -> None:
    """If cuInit returns 802, the first suggested command fits the mode that NVML reports."""
    scenario, commands = READY_STATES[state]
    machine.write(f"{scenario}gpu\n  name NVIDIA H100 PCIe")
    with machine.child() as child:
        child.run("sys.modules.update(torch=None, tensorflow=None, jax=None, cupy=None)")
        child.run("sys.modules.update(numba=None)\nreserve_gpu.reserve()")
        row = child.run("reserve_gpu.check().to_dict()['frameworks'][0]").value
    assert row["reason"].startswith("cuInit returned 802 CUDA_ERROR_SYSTEM_NOT_READY")
    assert tuple(row["remedy"].splitlines()[1::2]) == commands


@pytest.mark.parametrize("mode", ["on", "protected-pcie"])
def test_gpus_that_are_ready_for_confidential_computing(machine: Machine, mode: str) -> None:
    """Once the ready state is set, CUDA starts in the same mode, and the check finds no fault."""
    machine.write(f"conf-compute {mode}\nconf-compute-ready 1\ngpu\n  name NVIDIA H100 PCIe")
    with machine.child() as child:
        child.run("sys.modules.update(torch=None, tensorflow=None, jax=None, cupy=None)")
        child.run("sys.modules.update(numba=None)\nreserve_gpu.reserve()")
        assert child.run("reserve_gpu.check().is_well").value is True
    assert not [call for call in machine.calls() if "ConfCompute" in call]


EIGHT_COUNTED = (
    "PyTorch counted 8 GPUs before the reservation, and keeps that number in this process"
)


def test_a_count_from_before_the_reservation(machine: Machine) -> None:
    """If PyTorch keeps a count, the reservation warns, and the check fails until it is cleared."""
    machine.use("eight")
    trouble = {"STAND_IN_TROUBLE": "torch=keeps-count"}
    with machine.child(PYTHONPATH=STANDINS, **trouble) as child:
        child.run(f"sys.modules.update({', '.join(f'{key}=None' for key in KEYS[1:])})")
        assert child.run("import torch, warnings\ntorch.cuda.device_count()").value == 8
        warned = child.run(
            "with warnings.catch_warnings(record=True) as warned:\n"
            "    warnings.simplefilter('always'); reserve_gpu.reserve('3')\n"
            "[str(each.message) for each in warned]"
        ).value
        row = child.run("reserve_gpu.check().to_dict()['frameworks'][1]").value
        assert [text.splitlines()[-1] for text in warned] == [row["remedy"].splitlines()[-1]]
        assert warned[0].startswith(EIGHT_COUNTED)
        assert (row["name"], row["state"]) == ("PyTorch", "other devices")
        assert row["reason"] == EIGHT_COUNTED
        assert [device["label"] for device in row["sees"]] == ["GPU3"]
        assert child.run("torch.cuda.device_count()").value == 8
        assert child.run(row["remedy"].splitlines()[-1]).error is None
        assert child.run("torch.cuda.device_count()").value == 1
        assert child.run("reserve_gpu.check().is_well").value is True
        assert child.run("reserve_gpu.gpus.cuda_environment.cuda_started()").value is False


def test_a_count_that_is_not_kept(machine: Machine) -> None:
    """A PyTorch that counts again after the reservation fits, and causes no warning."""
    machine.use("eight")
    with machine.child(PYTHONPATH=STANDINS, STAND_IN_TROUBLE="torch=counts") as child:
        child.run(f"sys.modules.update({', '.join(f'{key}=None' for key in KEYS[1:])})")
        child.run("import torch, warnings\nwarnings.simplefilter('error')")
        assert child.run("torch.cuda.device_count()").value == 8
        assert child.run("reserve_gpu.reserve('3')").error is None
        assert child.run("torch.cuda.device_count()").value == 1
        assert child.run("reserve_gpu.check().is_well").value is True


# -- this process ----------------------------------------------------------------------------------


@probing
def test_starts_nothing_here(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check starts no CUDA in this process, imports no framework and changes no variable."""
    installed(monkeypatch, "torch")
    reserve_gpu.reserve("1")
    before = dict(os.environ), set(sys.modules)
    check()
    assert not cuda_environment.cuda_started()
    assert "torch" not in set(sys.modules) - before[1]
    assert dict(os.environ) == before[0]
    calls = here.log.read_text().splitlines()
    assert f"{os.getpid()} cuInit" not in calls
    assert [call for call in calls if call.endswith(" cuInit")]


@probing
def test_a_working_directory_full_of_traps(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules beside the notebook that hide Python's own, and odd paths, don't mislead a check."""
    for name in ("json", "uuid", "ctypes", "runpy", "contextlib"):
        (here.folder / f"{name}.py").write_text("raise SystemExit('trap')")
    installed(monkeypatch, "jax")
    reserve_gpu.reserve()
    odd: list[Any] = [pathlib.Path("/x"), 7, "\udcff"]
    monkeypatch.setattr(sys, "path", ["", *sys.path, *odd])
    assert states(check()) == all_are("fits", "JAX")


@pytest.mark.full
def test_too_few_descriptors_to_start_all(machine: Machine) -> None:
    """Where some can't be started, those that were started are gone as well."""
    with machine.child(PYTHONPATH=STANDINS) as child:
        child.run("import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (30, 30))")
        answer = child.run("files = []\ntry:\n while True: files.append(open('/dev/null'))\n"
                           "except OSError: del files[-12:]\nreserve_gpu.check()")  # fmt: skip
        assert answer.error == "ReserveGPUError"
        assert answer.text.startswith("The check can't start a process: ")
        assert processes_of(machine) == {child.pid}


@probing
def test_where_children_are_not_waited_for(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ignores SIGCHLD, so that its children vanish, can check as well."""
    installed(monkeypatch, "torch")
    reserve_gpu.reserve()
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert states(check()) == all_are("fits", "PyTorch")
    finally:
        signal.signal(signal.SIGCHLD, before)


@probing
def test_leaves_no_descriptor_open(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check whose children are killed leaves no descriptor open, and no thread."""

    def left() -> Any:
        return sorted(os.listdir("/proc/self/fd")), threading.active_count()

    installed(monkeypatch, torch="hangs")
    check(limit_s=0.1)
    before = left()
    check(limit_s=0.1)
    assert left() == before


# -- what hangs ------------------------------------------------------------------------------------

# A child that answers, starts another one, and hangs, whatever SIGTERM may say.
HANGING = """trap '' TERM; echo '{"doing": "hanging"}'; sleep 600 & echo noise >&2; wait"""
ENDING = """echo 7; echo '{"a": 1}'; echo '{"a'; echo last >&2; exit 3"""


@probing
def test_limit(here: Here) -> None:
    """Who hangs is killed at the limit with all that it started; what it had said by then counts.

    Those that have ended meanwhile are not touched by that.
    """
    commands = {"hangs": ["sh", "-c", HANGING], "ends": ["sh", "-c", ENDING]}
    with left_behind(here), subprocesses.run_programs(commands, here.environ()) as started:
        ends = {key: started[key].code() for key in subprocesses.wait_for_output(started, 2.0)}
    assert ends == {"ends": 3}
    assert started["hangs"].output == (b'{"doing": "hanging"}\n', b"noise\n")
    assert started["ends"].output == (b'7\n{"a": 1}\n{"a\n', b"last\n")


@probing
def test_the_end_of_a_framework_is_not_waited_for(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A framework that has said all and then takes its time to end keeps nobody waiting."""
    installed(monkeypatch, torch="lingers")
    reserve_gpu.reserve()
    assert states(check()) == all_are("fits", "PyTorch")


@probing
def test_interrupted(here: Here, monkeypatch: pytest.MonkeyPatch, ready: pathlib.Path) -> None:
    """Ctrl-C ends a check in one line and leaves no process behind; the shell goes on."""
    installed(monkeypatch, torch="hangs")
    shell = here.shell()
    before = shell.run("%reserve_gpu").stdout

    def interrupt() -> None:
        ready.read_bytes()
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    with left_behind(here):
        thread.start()
        cell = shell.run("%reserve_gpu --check")
        thread.join()
    assert cell.error == "WaitInterrupted"
    assert (cell.traceback, cell.stdout) == (
        [],
        "The check was interrupted; nothing was changed.\n",
    )
    assert shell.run("%reserve_gpu").stdout == before


@probing
def test_killed(machine: Machine) -> None:
    """If who asks is killed with -9, the children are gone as well."""
    path = machine.folder / "ready"
    os.mkfifo(path)
    trouble = {"STAND_IN_READY": str(path), "STAND_IN_TROUBLE": "torch=waits"}
    with machine.child(PYTHONPATH=STANDINS, **trouble) as child:
        names = ", ".join(f"{key}=None" for key in KEYS if key != "torch")
        child.run(f"sys.modules.update({names})")
        child.send("reserve_gpu.check()")
        path.read_bytes()
        child.kill()
        wait_for(lambda: not processes_of(machine), pause_s=0.02)


# -- how it is shown -------------------------------------------------------------------------------


@probing
def test_three_ways_say_the_same(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook shows a table, text and JSON that agree; what is foreign stays text.

    What is not installed is one line for people, and a row for programs.
    """
    installed(monkeypatch, torch="crashes")
    shell = here.shell(is_notebook=True)
    shell.run("%reserve_gpu 1")
    *progress, shown = shell.run("%reserve_gpu --check").values
    told = reserve_gpu.check().to_dict()
    assert progress[0]["text/plain"].startswith("Checking what each framework sees: ")
    assert progress[-1]["text/plain"] == ""
    table = Cells(shown["text/html"])
    head, _, *lines, last = shown["text/plain"].splitlines()
    absent = [row["name"] for row in told["frameworks"] if row["state"] == "not installed"]
    *but_one, one = absent
    assert last == f"Not installed: {', '.join(but_one)} and {one}."
    assert f"<div>{last}</div>" in shown["text/html"]
    there = [row for row in told["frameworks"] if row["name"] not in absent]
    assert head == f"Reserved: GPU1. Python: {sys.executable}."
    assert told["python"] == sys.executable
    for cells, line, row in zip(table.rows[1:], lines, there, strict=True):
        *about, result = (cell.removesuffix(last) for cell in cells)
        assert all(cell in line for cell in about)
        assert about[0] == row["name"]
        assert result.startswith(row["state"])  # a chip, and the reason beside it
        assert result.removeprefix(row["state"]).strip() in line
    assert table.tags <= {"table", "thead", "tbody", "tr", "th", "td", "b", "div"}
    assert "<b>boom</b>" in table.rows[2][-1]
    assert "<b>boom" not in shown["text/html"]
    assert "\x1b" not in shown["text/plain"] + shown["text/html"]
