"""The CUDA variables, whether CUDA has started, and what can be reserved after it has."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

import pytest

from reserve_gpu.gpus.cuda_environment import (
    ORDER,
    VISIBLE,
)
from reserve_gpu.system import procfs
from tests.support.forker import Forker
from tests.support.reserving import got

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.here import Here
    from tests.support.machine import Machine


REFUSED = """
import reserve_gpu
try:
    reserve_gpu.reserve()
except reserve_gpu.NoFreeDeviceError:
    pass
"""
BELOW = """
import subprocess, sys
def below(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]
"""
GET = "import os, reserve_gpu as r; print(r.reserve().environ['CUDA_VISIBLE_DEVICES'])"
GIVE_BACK = f"{GET}; r.release(); print(repr(os.environ['CUDA_VISIBLE_DEVICES']))"


def test_below_a_refused_process(machine: Machine) -> None:
    """A child of a refused process sees no GPU, but may reserve within the user's own limit."""
    machine.write("gpu\n used 6000\ngpu\n used 6000\ngpu")
    with machine.child(CUDA_VISIBLE_DEVICES="0,1", CUDA_DEVICE_ORDER="PCI_BUS_ID") as child:
        child.run(f"{REFUSED}{BELOW}")
        assert child.visible() == ""
        machine.write("gpu\n used 6000\ngpu\ngpu")
        assert child.run(f"below({GET!r})").value == "1"
        assert child.run(f"below({GIVE_BACK!r})").value == "1\n''"
        nested = f"{REFUSED.replace('reserve()', 'reserve(count=2)')}{BELOW}print(below({GET!r}))"
        assert child.run(f"below({nested!r})").value == "1"
        hidden = "os.environ['CUDA_VISIBLE_DEVICES'] = '-1'"
        assert "hides every GPU" in child.run(f"{hidden}; below({GET!r})").value


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_pool_below_a_refused_process(machine: Machine, method: str) -> None:
    """Workers of multiprocessing below a refused process can reserve, however they start."""
    machine.write("gpu\n used 6000")
    (machine.folder / "work.py").write_text(
        "import reserve_gpu\n"
        "def got(_):\n"
        "    return reserve_gpu.reserve().environ['CUDA_VISIBLE_DEVICES']\n"
    )
    script = machine.folder / "pool.py"
    script.write_text(
        f"import multiprocessing, os, sys, work\n{REFUSED}"
        "if __name__ == '__main__':\n"
        "    open('draft.txt', 'w').write('gpu')\n"
        "    os.rename('draft.txt', 'scenario.txt')\n"
        f"    with multiprocessing.get_context({method!r}).Pool(1) as pool:\n"
        "        print(pool.map(work.got, [0]))\n"
    )
    done = machine.command(sys.executable, str(script))
    assert done.stdout == "['0']\n", done.stderr


# -- has CUDA started? -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def forker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forker]:
    """Return where CUDA can be started, in a fork for each question."""
    with Forker(tmp_path_factory.mktemp("forker")) as forker:
        yield forker


STARTED = "from reserve_gpu.gpus import cuda_environment\n[cuda_environment.cuda_started(), {}]"


def test_not_loaded_is_not_started(machine: Machine) -> None:
    """Without the driver library CUDA has not started, and asking does not load it."""
    with machine.child() as child:
        loaded = "'libcuda' in open('/proc/self/maps').read()"
        assert child.run(STARTED.format(loaded)).value == [False, False]
        assert child.run("cuda_environment.cuda_uuids()").value == []
    assert machine.calls() == []


def test_loaded_is_not_started(machine: Machine) -> None:
    """A loaded library, as after `import torch`, is not a started one; asking starts nothing."""
    with machine.child() as child:
        load = "import ctypes; cuda = ctypes.CDLL('libcuda.so.1')"
        assert child.run(f"{load}\n{STARTED.format('0')}").value == [0, False]
        assert child.run("cuda_environment.cuda_uuids()").value == []
        assert set(machine.calls()) == {"cuDeviceGetCount"}
        assert child.reserve().value == "0"


@pytest.mark.parametrize(("visible", "code", "started"), [("0", 0, True), ("", 100, False)])
def test_initialised_is_started(
    machine: Machine, forker: Forker, visible: str, code: int, *, started: bool
) -> None:
    """After cuInit CUDA has started, whoever called it; not if it has found no device."""
    answer = forker.ask(
        f"code = cuda.cuInit(0)\n{STARTED.format('code')}",
        machine.environ(CUDA_VISIBLE_DEVICES=visible),
    )
    assert answer == [started, code]


IN_FORK = """
cuda_environment.remember_over_fork()
if {start}: cuda.cuInit(0)
reading, writing = os.pipe()
if not os.fork():
    seen = [cuda_environment.cuda_started(), cuda_environment.cuda_uuids()]
    os.write(writing, json.dumps(seen).encode())
    os._exit(0)
os.wait()
json.loads(os.read(reading, 999))
"""


@pytest.mark.parametrize("start", [False, True])
def test_forked_child_remembers(machine: Machine, forker: Forker, *, start: bool) -> None:
    """A child forked after CUDA has started counts as started: the driver can't be asked there."""
    answer = forker.ask(f"{IMPORT}{IN_FORK.format(start=start)}", machine.environ())
    assert answer == [start, []]


MIG = "driver 570.26\ngpu\n  mig on\n  instance 0\n  instance 2\ngpu\n"
IMPORT = """
import warnings
from reserve_gpu.gpus import cuda_environment
"""


@pytest.mark.parametrize(
    ("scenario", "visible", "numbers"),
    [
        ("gpu\ngpu\ngpu", "2,0", ["2", "0"]),
        ("gpu\ngpu\ngpu", "1", ["1"]),
        (MIG, "0", ["0:0"]),
        (MIG, "1", ["1"]),
    ],
)
def test_what_cuda_sees(
    here: Here, forker: Forker, scenario: str, visible: str, numbers: list[str]
) -> None:
    """What CUDA sees is known by UUID, in its order; of an instance its own, not its GPU's."""
    here.write(scenario)
    environ = here.environ(CUDA_VISIBLE_DEVICES=visible, CUDA_DEVICE_ORDER="PCI_BUS_ID")
    uuids = forker.ask(f"{IMPORT}cuda.cuInit(0)\ncuda_environment.cuda_uuids()", environ)
    assert uuids == [here.uuid(number).partition("-")[2] for number in numbers]


# -- after CUDA has started ------------------------------------------------------------------------

# What each of several calls comes to: CUDA_VISIBLE_DEVICES, or the error; and all warnings.
ASKING = f"""{IMPORT}
def ask(**wishes):
    try:
        return reserve_gpu.reserve(**wishes).environ["CUDA_VISIBLE_DEVICES"]
    except reserve_gpu.ReserveGPUError as error:
        return type(error).__name__ + ": " + str(error)
def start():
    assert not cuda.cuInit(0)
def use():
    assert not cuda.cuCtxCreate_v2(ctypes.byref(ctypes.c_void_p()), 0, 0)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    steps = [eval(step) for step in {{steps!r}}]
from tests.support.locked import texts
json.dumps([steps, texts(caught)], default=repr)
"""
RELEASE, START, USE = "reserve_gpu.release()", "start()", "use()"
VARIABLE = "os.environ.get('CUDA_VISIBLE_DEVICES')"


class Asking:
    """A machine on which calls are made, in a process of their own, in which CUDA may start."""

    def __init__(self, here: Here, forker: Forker) -> None:
        self.here, self._forker = here, forker
        self.environ: dict[str, str] = {}

    def __call__(self, *steps: str) -> tuple[list[Any], list[str]]:
        """Return what each step comes to, and what was warned of."""
        environ = self.here.environ(**self.environ)
        answers, warnings = json.loads(self._forker.ask(ASKING.format(steps=steps), environ))
        # Of the frameworks that are installed here some read no variable, which is told, too.
        return answers, [each for each in warnings if not each.startswith("To keep ")]


@pytest.fixture
def asking(here: Here, forker: Forker) -> Asking:
    here.write("gpu\ngpu\ngpu")
    return Asking(here, forker)


LATE = (
    "CUDA is already running: JAX, TensorFlow and CuPy keep the limit that they started with until "
    "you restart."
)
RESTART = "estart the process and run reserve_gpu.reserve() before anything that uses a GPU."


@pytest.mark.promise
@pytest.mark.parametrize("wishes", ["", "devices='1'", "count=2", "memory='1GB'", "wait=True"])
def test_too_late(asking: Asking, wishes: str) -> None:
    """Who never reserved anything can't after CUDA has started, is told why, nothing is changed."""
    (_, refused, visible), warnings = asking(START, f"ask({wishes})", VARIABLE)
    assert refused.startswith("TooLateError: Too late: CUDA has already started")
    seen = (
        "CUDA sees GPU0, GPU1 and GPU2 here: a reservation can no longer limit it to some of them."
    )
    assert refused.endswith(f"Nothing was reserved or changed. {seen} R{RESTART}")
    assert (visible, warnings) == (None, [])
    assert not asking.here.locks.exists()


@pytest.mark.parametrize(
    ("first", "then", "expected"),
    [
        ("devices='1'", "", "1"),
        ("devices='1'", "devices='1'", "1"),
        ("devices='1'", "devices='GPU1'", "1"),
        ("devices='1'", "count=1", "1"),
        ("devices='1'", "min_memory='1GiB', note='x'", "1"),
        ("devices='1'", "memory='1GB'", "1"),
        ("devices='1', memory='1GB'", "devices='1'", "1"),
        ("devices='2,0'", "devices='2,0'", "2,0"),
        ("devices='2,0'", "count=2", "2,0"),
        ("count=2", "devices=[0, 1]", "0,1"),
        ("devices='1'", "devices='0'", None),
        ("devices='1'", "count=2", None),
        ("devices='1'", "name='H100'", None),
        ("devices='2,0'", "", None),
        ("devices='2,0'", "devices='2'", None),
        ("devices='2,0'", "devices='0,2'", None),
        ("devices='2,0'", "devices='0,1,2'", None),
    ],
)
def test_taken_back(asking: Asking, first: str, then: str, expected: str | None) -> None:
    """What was released can be had again after CUDA has started: all that it sees, in its order."""
    answers, warnings = asking(f"ask({first})", START, RELEASE, f"ask({then})", VARIABLE)
    *_, again, visible = answers
    assert warnings == ([LATE] if then.startswith("memory=") else [])
    if expected is not None:
        assert again == visible == expected
        return
    assert visible is None
    assert again.startswith("TooLateError: ")
    numbers = answers[0]
    assert (
        f"still be reserved, with reserve_gpu.reserve('{numbers}'). For another GPU, r{RESTART}"
        in again
    )


def test_an_instance_taken_back(asking: Asking) -> None:
    """A MIG instance that CUDA sees can be had again, by its number as well."""
    asking.here.write(MIG)
    uuid = asking.here.uuid("0:2")
    answers, _ = asking(
        "ask(devices='0:2')", START, RELEASE, "ask()", RELEASE, "ask(devices='0:2')"
    )
    assert answers[0] == answers[3] == answers[5] == uuid


def test_what_a_shell_has_set_can_be_reserved_late(asking: Asking) -> None:
    """Also who never reserved can have all that CUDA sees; what was limited is said."""
    assert asking(START, "ask(count=3)") == ([None, "0,1,2"], [])
    asking.environ = {VISIBLE: "1", ORDER: "PCI_BUS_ID"}
    (_, refused, late), _ = asking(START, "ask(devices='1', name='H100')", "ask(devices='1')")
    assert (
        "CUDA sees GPU1 here: it can still be reserved, with reserve_gpu.reserve('1')." in refused
    )
    assert late == "1"


@pytest.mark.skipif(not procfs.sees_all_processes(), reason="in a container pids tell nothing")
@pytest.mark.parametrize("memory", [None, "1GB"])
@pytest.mark.parametrize("mode", ["default", "exclusive_process"])
def test_its_own_use_is_no_obstacle(asking: Asking, mode: str, memory: str | None) -> None:
    """The process's own context, which makes the GPU busy, neither hinders it nor is warned of."""
    (asking.here.folder / "contexts").mkdir()
    asking.here.write(f"contexts contexts\ngpu\ngpu\n  mode {mode}\ngpu")
    wishes = f"devices='1', memory={memory!r}"
    answers, warnings = asking(
        f"ask({wishes})",
        START,
        USE,
        RELEASE,
        "reserve_gpu.status().rows[1].state.value",
        f"ask({wishes})",
        f"ask(memory={memory!r})",
    )
    assert answers[4] == "busy"
    assert answers[5:] == ["1", "1"]
    assert warnings == ([LATE] if memory else [])


def test_others_use_is_warned_of(asking: Asking) -> None:
    """Who takes back a GPU that others use by now gets it, and is warned of them alone."""
    asking.here.write("gpu\ngpu\n compute 4321000 500")
    answers, warnings = asking("ask(devices='1')", START, RELEASE, "ask()")
    assert (answers[0], answers[3]) == ("1", "1")
    assert len(warnings) == 2  # the first for naming what is busy
    assert all("4321000" in warning for warning in warnings)


@pytest.mark.parametrize("wait", ["None", "0.01"])
def test_what_others_have_by_now(asking: Asking, wait: str) -> None:
    """What somebody else has reserved meanwhile can't be had back, and none is visible then."""
    take = f"""
open({str(asking.here.locks)!r} + '/{asking.here.uuid("1")}.lock', 'r+')
"""
    lock = "__import__('fcntl').flock(globals()['file'], 6)"
    answers, _ = asking(
        "ask(devices='1')",
        START,
        RELEASE,
        f"globals().update(file={take.strip()}) or {lock}",
        f"ask(wait={wait})",
        VARIABLE,
        "globals().pop('file').close()",
        "ask()",
    )
    error = "NoFreeDeviceError" if wait == "None" else "WaitTimeoutError"
    assert answers[4].startswith(f"{error}: ")
    assert "1    reserved " in answers[4]
    assert answers[5] == ""
    assert answers[7] == "1"


@pytest.mark.parametrize(
    ("then", "kept", "stays"),
    [
        ("devices='2'", "1,2", "GPU1 stays"),
        ("count=1", "1,2", "GPU2 stays"),
        ("", "1,2", None),
        ("devices='1,2'", "1,2", None),
    ],
)
def test_a_smaller_wish_comes_late(asking: Asking, then: str, kept: str, stays: str | None) -> None:
    """After CUDA has started all that it sees stays reserved, and a warning says so."""
    answers, warnings = asking("ask(devices='1,2')", START, f"ask({then})", VARIABLE)
    assert answers[2] == answers[3] == kept
    if stays is None:
        assert warnings == []
    else:
        (warning,) = warnings
        assert f"{stays} reserved as well" in warning


@pytest.mark.parametrize("then", ["devices='0'", "count=3", "devices='2,1'", "memory='1GB'"])
def test_another_wish_comes_late(asking: Asking, then: str) -> None:
    """After CUDA has started nothing else can be reserved; what is held stays, and is named."""
    answers, warnings = asking(
        "ask(devices='1,2')", START, f"ask({then})", VARIABLE, "len(reserve_gpu.release())"
    )
    assert answers[2].startswith("TooLateError: ")
    seen = "CUDA sees GPU1 and GPU2 here, and nothing else can be reserved."
    assert f"This process keeps GPU1 and GPU2. {seen} R{RESTART}" in answers[2]
    assert answers[3:] == ["1,2", 2]
    assert warnings == []


def test_another_way_of_holding_comes_late(asking: Asking) -> None:
    """After CUDA has started others can still be let in to share what is held, or be shut out."""
    steps = "ask(devices='1')", START, "ask(memory='1GB')", "ask(devices='1')"
    assert asking(*steps) == (["1", None, "1", "1"], [LATE])


@pytest.mark.parametrize("is_late", [True, False])
def test_a_changed_variable_and_cuda(asking: Asking, *, is_late: bool) -> None:
    """A changed variable is set again; if CUDA has started with it, only a restart helps."""
    change = "os.environ.update(CUDA_VISIBLE_DEVICES='0')"
    steps = [change, START] if is_late else [START, change]
    answers, warnings = asking("ask(devices='1')", *steps, "ask()", VARIABLE)
    assert answers[4] == "1"
    (warning,) = warnings
    assert ("CUDA is not using exactly GPU1: restart" in warning) == is_late
    assert ("the variables are set for GPU1 again" in warning) != is_late


@pytest.mark.promise
def test_release_after_the_start(asking: Asking) -> None:
    """A release after CUDA has started gives the GPU back to others, and the variables."""
    answers, _ = asking("ask(devices='1')", START, RELEASE, VARIABLE, "reserve_gpu.current()")
    assert answers[3:] == [None, None]
    assert os.environ.get(VISIBLE) is None
    assert got("1") == "1"


@pytest.mark.parametrize(
    "missing", ["cuDeviceGetUuid cuDeviceGetUuid_v2", "cuDeviceGet", "cuDeviceGetCount"]
)
def test_a_cuda_library_that_lacks_a_function(machine: Machine, missing: str) -> None:
    """What can't be asked which GPUs it sees is too late for any, in a line."""
    lines = "".join(f"missing {function}\n" for function in missing.split())
    machine.write(f"{machine.scenario.read_text()}\n{lines}")
    with machine.child() as child:
        child.run("reserve_gpu.reserve('0'); import ctypes")
        assert child.run("ctypes.CDLL('libcuda.so.1').cuInit(0)").value == 0
        child.run("reserve_gpu.release()")
        assert child.reserve("'1'").error == "TooLateError"
