"""%reserve_gpu --check: what each framework sees, asked of real child processes."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tests.machine import LIMIT_S, ROOT

if TYPE_CHECKING:
    from pathlib import Path

    from tests.machine import Child, Machine


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


STANDINS = f"{ROOT}:{ROOT / 'tests' / 'standins'}"
KEYS = ("torch", "tensorflow", "jax", "cupy", "numba", "mxnet")
NAMES = ("PyTorch", "TensorFlow", "JAX", "CuPy", "Numba", "MXNet")


def troubles(what: str, *names: str) -> dict[str, str]:
    """The environment in which these stand-ins, by default all, get into a trouble."""
    told = ",".join(f"{key}={what}" for key in names or KEYS)
    return {"PYTHONPATH": STANDINS, "STAND_IN_TROUBLE": told}


def check(child: Child, arguments: str = "") -> dict[str, Any]:
    answer = child.run(f"reserve_gpu.check({arguments}).to_dict()")
    assert answer.error is None, answer.text
    return {row["name"]: row for row in answer.value["frameworks"]} | {"all": answer.value}


def states(rows: dict[str, Any], *names: str) -> list[str]:
    return [rows[name]["state"] for name in names or NAMES]


def processes_of(machine: Machine) -> set[int]:
    """The processes that run on the machine now."""
    found = set()
    for pid in psutil.pids():
        with suppress(psutil.Error):
            if psutil.Process(pid).environ().get("STAND_IN_SCENARIO") == str(machine.scenario):
                found.add(pid)
    return found


def ready(machine: Machine) -> tuple[Path, dict[str, str]]:
    """A pipe that a stand-in opens once it hangs, and the variable that tells it."""
    path = machine.folder / "ready"
    os.mkfifo(path)
    return path, {"STAND_IN_READY": str(path)}


def test_every_framework_fits(machine: Machine) -> None:
    """Each framework on the reserved GPU has a row: its version, what it was built for, fits."""
    with machine.child(**troubles("")) as child:
        child.reserve("1")
        rows = check(child)
    assert states(rows, "CUDA driver", *NAMES) == ["fits"] * 7
    assert {row["sees"][0]["label"] for row in rows["all"]["frameworks"] if row["sees"]} == {"GPU1"}
    assert rows["PyTorch"]["version"] == "2.9.0"
    assert rows["PyTorch"]["cuda_version"] == "11.4"
    assert rows["CuPy"]["cuda_version"] == "11.8"
    assert rows["all"]["is_well"]


@pytest.mark.parametrize(
    ("scenario", "asked", "labels"),
    [
        ("eight", "'5,2'", ["GPU5", "GPU2"]),
        ("mixed", "'1,0'", ["GPU1", "GPU0"]),
        ("mig", "'1:2'", ["GPU1:2"]),
        ("mig570", "'1:4,1:1'", ["GPU1:4", "GPU1:1"]),
    ],
)
def test_several_and_instances(
    machine: Machine, scenario: str, asked: str, labels: list[str]
) -> None:
    """Several GPUs in their order, and MIG instances, are told from others."""
    machine.use(scenario)
    with machine.child(**troubles("")) as child:
        assert child.reserve(asked).error is None
        rows = check(child)
    assert states(rows, "CUDA driver", *NAMES) == ["fits"] * 7
    assert [device["label"] for device in rows["JAX"]["sees"]] == labels


TROUBLES = [
    ("cpu", "no device", "a CPU build", ("torch", "tensorflow", "jax", "mxnet")),
    ("ignores", "other devices", "importing it sets CUDA_VISIBLE_DEVICES to '0'", ()),
    ("hides", "no device", "importing it sets CUDA_VISIBLE_DEVICES to ''", ()),
    ("old", "no device", "too old", ("torch", "jax", "cupy", "numba", "mxnet")),
    ("crashes", "fails", "crashed (SIGSEGV) while being imported: terminate called", ()),
    ("exits", "fails", "exit code 3", ()),
    ("raises", "fails", "ImportError: libcudnn.so.9: cannot open shared object file", ()),
    ("memory", "fails", "CUDA out of memory. (while computing)", ()),
    ("wrong", "fails", "computes wrongly", ()),
    ("elsewhere", "fails", "computed on /device:CPU:0", ("tensorflow",)),
    ("stranger", "other devices", None, ("torch", "numba")),
    ("simulates", "fails", "NUMBA_ENABLE_CUDASIM is set", ("numba",)),
]


@pytest.mark.parametrize(
    ("what", "state", "reason", "names"), TROUBLES, ids=[what for what, *_ in TROUBLES]
)
def test_trouble(
    machine: Machine, what: str, state: str, reason: str | None, names: tuple[str, ...]
) -> None:
    """A framework in trouble has a row that says so and why; those beside it fit."""
    with machine.child(**troubles(what, *names)) as child:
        child.reserve("1")
        rows = check(child)
    troubled = [name for name in NAMES if not names or name.lower().endswith(names)]
    for name in NAMES:
        row = rows[name]
        if name in troubled:
            assert row["state"] == state
            assert reason in row["reason"] if reason else row["reason"] is None
            assert "\x1b" not in str(row["reason"])
        else:
            assert row["state"] == "fits"
    assert rows["CUDA driver"]["state"] == "fits"
    assert not rows["all"]["is_well"]


def test_fewer_than_reserved(machine: Machine) -> None:
    """A framework that leaves out one of two reserved GPUs doesn't fit."""
    with machine.child(**troubles("fewer")) as child:
        child.reserve("count=2")
        rows = check(child)
    assert states(rows) == ["other devices"] * 6
    assert rows["JAX"]["reason"] == "not all that are reserved"


def test_noise_is_no_answer(machine: Machine) -> None:
    """What a framework prints, much of it and the like of an answer, is not taken for one."""
    with machine.child(**troubles("noise")) as child:
        child.reserve()
        rows = check(child)
    assert states(rows) == ["fits"] * 6
    assert rows["PyTorch"]["version"] == "2.9.0"


def test_a_hanging_framework(machine: Machine) -> None:
    """One that hangs is killed at the limit with all that it started; the others' rows stand."""
    with machine.child(**troubles("hangs", "torch", "cupy")) as child:
        child.reserve()
        rows = check(child, "limit_s=4")
        assert processes_of(machine) == {child.pid}
    assert states(rows) == ["fails", "fits", "fits", "fails", "fits", "fits"]
    assert rows["PyTorch"]["reason"] == "no answer within 4 s while being imported"


def test_the_end_of_a_framework_is_not_waited_for(machine: Machine) -> None:
    """A framework that has said all and then takes its time to end keeps nobody waiting."""
    with machine.child(**troubles("lingers", "torch")) as child:
        child.reserve()
        assert states(check(child)) == ["fits"] * 6


def test_interrupted(machine: Machine) -> None:
    """Ctrl-C ends a check in one line and leaves no process behind; the kernel goes on."""
    path, extra = ready(machine)
    with machine.kernel(**troubles("hangs", "torch"), **extra) as kernel:
        pid = kernel.pid
        before = kernel.run("%reserve_gpu").stdout
        cell = kernel.start("%reserve_gpu --check")
        path.read_bytes()
        os.kill(pid, signal.SIGINT)
        shown = kernel.finish(cell)
        assert shown.error == "WaitInterrupted"
        assert shown.traceback == ["Stopped the check; nothing was changed."]
        assert processes_of(machine) == {pid}
        assert kernel.run("%reserve_gpu").stdout == before


def test_killed(machine: Machine) -> None:
    """If who asks is killed with -9, the children are gone as well."""
    path, extra = ready(machine)
    with machine.child(**troubles("waits", "torch"), **extra) as child:
        child.reserve()
        child.send("reserve_gpu.check()")
        path.read_bytes()
        child.kill()
        end = time.monotonic() + LIMIT_S
        while processes_of(machine) and time.monotonic() < end:
            time.sleep(0.02)
        assert processes_of(machine) == set()


def test_starts_nothing_here(machine: Machine) -> None:
    """A check starts no CUDA in this process, imports no framework and changes no variable."""
    with machine.child(**troubles("")) as child:
        child.reserve("1")
        before = child.run("dict(os.environ)").value
        check(child)
        assert child.run("from reserve_gpu import cuda\ncuda.started()").value is False
        assert child.run("'torch' in sys.modules or 'cupy' in sys.modules").value is False
        assert child.run("dict(os.environ)").value == before
        assert not [line for line in machine.log.read_text().splitlines()
                    if line.startswith(f"{child.pid} cu")]  # fmt: skip


@pytest.mark.parametrize("visible", [None, "0", "0,1"])
def test_others_gpus_are_not_touched(machine: Machine, visible: str | None) -> None:
    """Where more than the reserved GPU is visible no framework computes on any, and all say so."""
    change = f"os.environ['CUDA_VISIBLE_DEVICES'] = {visible!r}" if visible else (
        "del os.environ['CUDA_VISIBLE_DEVICES']"
    )  # fmt: skip
    with machine.child(**troubles("")) as child:
        child.reserve("1")
        child.run(change)
        rows = check(child)
    assert states(rows, "CUDA driver", *NAMES) == ["other devices"] * 7
    assert all(rows[name]["reason"].endswith("since; reserve again") for name in NAMES)
    assert rows["JAX"]["sees"][0]["label"] == "GPU0"
    assert not [call for call in machine.calls() if "PrimaryCtx" in call]


def test_nothing_reserved(machine: Machine) -> None:
    """Without a reservation the rows say what is visible, and no GPU is used."""
    with machine.child(**troubles("")) as child:
        rows = check(child)
        text = child.run("str(reserve_gpu.check())").value
    assert states(rows, "CUDA driver", *NAMES) == ["unreserved"] * 7
    assert [device["label"] for device in rows["JAX"]["sees"]] == ["GPU0", "GPU1"]
    assert rows["all"]["reserved"] == []
    assert rows["all"]["is_well"]
    assert text.startswith("Nothing is reserved here")
    assert "CUDA_VISIBLE_DEVICES is not set." in text
    assert not [call for call in machine.calls() if "PrimaryCtx" in call]


def test_in_a_child_of_the_holder(machine: Machine) -> None:
    """A process that was started by the one that holds the GPUs checks that reservation."""
    code = "import reserve_gpu, json; print(json.dumps(reserve_gpu.check().to_dict()))"
    with machine.child(**troubles("")) as child:
        child.reserve("'1,0'")
        told = child.run(
            "import subprocess\n"
            f"subprocess.run([sys.executable, '-c', {code!r}], capture_output=True).stdout.decode()"
        ).value
    found = json.loads(told)
    assert [device["label"] for device in found["reserved"]] == ["GPU1", "GPU0"]
    assert {row["state"] for row in found["frameworks"]} == {"fits"}


@pytest.mark.parametrize("visible", ["", "7"])
def test_an_empty_variable(machine: Machine, visible: str) -> None:
    """An empty variable, or one that names nothing, is given as the cause of seeing no device."""
    with machine.child(**troubles(""), CUDA_VISIBLE_DEVICES=visible) as child:
        rows = check(child)
    assert states(rows, "CUDA driver", *NAMES) == ["no device"] * 7
    assert all("CUDA_VISIBLE_DEVICES" in rows[name]["reason"] for name in ("CUDA driver", *NAMES))


def test_without_a_driver(machine: Machine) -> None:
    """Without a driver there are rows as well, and each says why it sees nothing."""
    with machine.child(**troubles(""), LD_LIBRARY_PATH="") as child:
        rows = check(child)
    assert states(rows, "CUDA driver", *NAMES) == ["no device"] * 7
    assert "libcuda.so.1" in rows["CUDA driver"]["reason"]
    assert {rows[name]["reason"] for name in NAMES} == {"no NVIDIA driver can be used here"}


def test_a_driver_that_does_not_start(machine: Machine) -> None:
    """Where cuInit fails each row has its error by number and name."""
    machine.add("fail cuInit * 801")
    with machine.child(**troubles("")) as child:
        rows = check(child)
    for name in ("CUDA driver", *NAMES):
        assert rows[name]["state"] == "no device"
        assert "cuInit answers 801 CUDA_ERROR_NOT_SUPPORTED" in rows[name]["reason"]


def test_a_folder_is_no_framework(machine: Machine) -> None:
    """A folder called like a framework, beside the notebook, is not taken for it."""
    (machine.folder / "mxnet").mkdir()
    with machine.child() as child:
        child.run("sys.path.insert(0, '')")
        assert check(child)["MXNet"]["state"] == "not installed"


def test_the_path_of_this_process(machine: Machine) -> None:
    """A framework is found where this process would import it from, and nowhere else."""
    with machine.child() as child:
        child.reserve()
        child.run(f"sys.path.append({str(ROOT / 'tests' / 'standins')!r})")
        assert check(child)["MXNet"]["state"] == "fits"


def test_a_working_directory_full_of_traps(machine: Machine) -> None:
    """Modules beside the notebook that hide Python's own, and odd paths, don't mislead a check."""
    for name in ("json", "uuid", "ctypes", "runpy", "contextlib"):
        (machine.folder / f"{name}.py").write_text("raise SystemExit('trap')")
    with machine.child(**troubles("")) as child:
        child.reserve()
        child.run("import pathlib; sys.path += ['', pathlib.Path('/x'), 7, '\udcff']")
        assert states(check(child), "CUDA driver", "JAX") == ["fits", "fits"]


def test_no_process_can_be_started(machine: Machine) -> None:
    """Where no process can be started one line says so, and none is left behind."""
    with machine.child(**troubles("")) as child:
        child.run("import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (30, 30))")
        answer = child.run("files = []\ntry:\n while True: files.append(open('/dev/null'))\n"
                           "except OSError: del files[-12:]\nreserve_gpu.check()")  # fmt: skip
        assert answer.error == "ReserveGPUError"
        assert answer.text.startswith("No process can be started to check with: ")
        assert processes_of(machine) == {child.pid}


def test_where_children_are_not_waited_for(machine: Machine) -> None:
    """A process that ignores SIGCHLD, so that its children vanish, can check as well."""
    with machine.child(**troubles("")) as child:
        child.reserve()
        child.run("import signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)")
        assert states(check(child), "CUDA driver", *NAMES) == ["fits"] * 7


def test_leaves_no_descriptor_open(machine: Machine) -> None:
    """A check, with a child that is killed and without, leaves no descriptor open."""
    with machine.child(**troubles("hangs", "torch")) as child:
        look = "sorted(os.listdir('/proc/self/fd'))"
        child.run("reserve_gpu.check(limit_s=1)")
        before = child.run(look).value
        child.run("reserve_gpu.check(limit_s=1)")
        assert child.run(look).value == before


def test_three_ways_say_the_same(machine: Machine) -> None:
    """A notebook shows a table, text and JSON that agree; what is foreign stays text."""
    with machine.kernel(**troubles("crashes", "torch")) as kernel:
        kernel.run("%reserve_gpu 1")
        *progress, shown = kernel.run("%reserve_gpu --check").values
        told = json.loads(kernel.run("%reserve_gpu --check --json").stdout)
    assert progress[0]["text/plain"].startswith("Checking what each framework sees: ")
    assert progress[-1]["text/plain"] == ""
    table = Cells(shown["text/html"])
    head, _, *lines = shown["text/plain"].splitlines()
    assert head == "Reserved: GPU1."
    for cells, line, row in zip(table.rows[1:], lines, told["frameworks"], strict=True):
        assert all(cell in line for cell in cells)
        assert cells[0] == row["name"]
        assert cells[-1].startswith(row["state"])
    assert table.tags <= {"table", "thead", "tbody", "tr", "th", "td", "b", "div"}
    assert "<b>boom</b>" in table.rows[2][-1]
    assert "<b>boom" not in shown["text/html"]
    assert "\x1b" not in shown["text/plain"] + shown["text/html"]


def test_takes_no_names(machine: Machine) -> None:
    """--check takes no names of GPUs, and says so in one line."""
    done = machine.ipython("%reserve_gpu --check 1")
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "UsageError: --check is about what this kernel holds; it takes no names."
    ]


@pytest.mark.needs("frameworks")
def test_real_builds_for_the_cpu(machine: Machine) -> None:
    """The real PyTorch and JAX of PyPI for the CPU say so; the real Numba sees the reserved GPU."""
    with machine.child() as child:
        child.reserve("1")
        rows = check(child)
    for name in ("PyTorch", "JAX"):
        assert rows[name]["state"] == "no device"
        assert "a CPU build" in rows[name]["reason"]
        assert rows[name]["is_built_for_cuda"] is False
    assert rows["PyTorch"]["version"].startswith("2.13.0")
    assert [device["label"] for device in rows["Numba"]["sees"]] == ["GPU1"]
    assert rows["Numba"]["state"] == "fails"  # the stand-in driver runs no kernels
    assert "while computing" in rows["Numba"]["reason"]
