"""Tests of hidden GPUs in child processes, and of reservations after CUDA has started."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

import pytest

from reserve_gpu.gpus.cuda_environment import (
    VISIBLE,
)
from reserve_gpu.render.notices import CAPS_ARE_LATE
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
RUN_IN_CHILD = """
import subprocess, sys
def in_child(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]
"""
RESERVE = "import os, reserve_gpu as r; print(r.reserve().environ['CUDA_VISIBLE_DEVICES'])"
RESERVE_AND_RELEASE = f"{RESERVE}; r.release(); print(repr(os.environ['CUDA_VISIBLE_DEVICES']))"


def test_a_child_of_a_refused_process(machine: Machine) -> None:
    """A child of a refused process sees no GPU, but can reserve within the user's limit."""
    machine.write("gpu\n used 6000\ngpu\n used 6000\ngpu")
    with machine.child(CUDA_VISIBLE_DEVICES="0,1", CUDA_DEVICE_ORDER="PCI_BUS_ID") as child:
        child.run(f"{REFUSED}{RUN_IN_CHILD}")
        assert child.visible() == ""
        machine.write("gpu\n used 6000\ngpu\ngpu")
        assert child.run(f"in_child({RESERVE!r})").value == "1"
        assert child.run(f"in_child({RESERVE_AND_RELEASE!r})").value == "1\n''"


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_of_a_refused_process(machine: Machine, method: str) -> None:
    """Multiprocessing workers of a refused process can reserve, whatever the start method is."""
    machine.write("gpu\n used 6000")
    (machine.folder / "work.py").write_text(
        "import reserve_gpu\n"
        "def reserve(_):\n"
        "    return reserve_gpu.reserve().environ['CUDA_VISIBLE_DEVICES']\n"
    )
    script = machine.folder / "pool.py"
    script.write_text(
        f"import multiprocessing, os, sys, work\n{REFUSED}"
        "if __name__ == '__main__':\n"
        "    open('draft.txt', 'w').write('gpu')\n"
        "    os.rename('draft.txt', 'scenario.txt')\n"
        f"    with multiprocessing.get_context({method!r}).Pool(1) as pool:\n"
        "        print(pool.map(work.reserve, [0]))\n"
    )
    done = machine.command(sys.executable, str(script))
    assert done.stdout == "['0']\n", done.stderr


# -- has CUDA started? -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def forker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forker]:
    """Start a process in whose forks CUDA can be started."""
    with Forker(tmp_path_factory.mktemp("forker")) as forker:
        yield forker


STARTED = "from reserve_gpu.gpus import cuda_environment\n[cuda_environment.cuda_started(), {}]"


def test_cuda_is_not_loaded(machine: Machine) -> None:
    """Without the driver library, CUDA has not started, and the check does not load it."""
    with machine.child() as child:
        loaded = "'libcuda' in open('/proc/self/maps').read()"
        assert child.run(STARTED.format(loaded)).value == [False, False]
        assert child.run("cuda_environment.cuda_uuids()").value == []
    assert machine.calls() == []


def test_cuda_is_loaded(machine: Machine) -> None:
    """A loaded library, as after `import torch`, has not started, and the check starts nothing."""
    with machine.child() as child:
        load = "import ctypes; cuda = ctypes.CDLL('libcuda.so.1')"
        assert child.run(f"{load}\n{STARTED.format('0')}").value == [0, False]
        assert child.run("cuda_environment.cuda_uuids()").value == []
        assert set(machine.calls()) == {"cuDeviceGetCount"}
        assert child.reserve().value == "0"


@pytest.mark.parametrize(("visible", "code", "started"), [("0", 0, True), ("", 100, False)])
def test_cuda_is_initialized(
    machine: Machine, forker: Forker, visible: str, code: int, *, started: bool
) -> None:
    """CUDA has started after cuInit, unless it found no device."""
    answer = forker.ask(
        f"code = cuda.cuInit(0)\n{STARTED.format('code')}",
        machine.environ(CUDA_VISIBLE_DEVICES=visible),
    )
    assert answer == [started, code]


MIG = "driver 570.26\ngpu\n  mig on\n  instance 0\n  instance 2\ngpu\n"
IMPORT = """
import warnings
from reserve_gpu.gpus import cuda_environment
"""


@pytest.mark.parametrize(
    ("scenario", "visible", "numbers"),
    [
        ("gpu\ngpu\ngpu", "2,0", ["2", "0"]),
        (MIG, "0", ["0:0"]),
    ],
)
def test_cuda_uuids(
    here: Here, forker: Forker, scenario: str, visible: str, numbers: list[str]
) -> None:
    """The UUIDs of GPUs and MIG instances that CUDA sees are in CUDA's order."""
    here.write(scenario)
    environ = here.environ(CUDA_VISIBLE_DEVICES=visible, CUDA_DEVICE_ORDER="PCI_BUS_ID")
    uuids = forker.ask(f"{IMPORT}cuda.cuInit(0)\ncuda_environment.cuda_uuids()", environ)
    assert uuids == [here.uuid(number).partition("-")[2] for number in numbers]


# -- after CUDA has started ------------------------------------------------------------------------

# Evaluates steps, and returns their results and the warnings. The result of a reservation is
# CUDA_VISIBLE_DEVICES or an error.
STEPS = f"""{IMPORT}
def reserve(**arguments):
    try:
        return reserve_gpu.reserve(**arguments).environ["CUDA_VISIBLE_DEVICES"]
    except reserve_gpu.ReserveGPUError as error:
        return type(error).__name__ + ": " + str(error)
def start():
    assert not cuda.cuInit(0)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    steps = [eval(step) for step in {{steps!r}}]
from tests.support.locked import texts
json.dumps([steps, texts(caught)], default=repr)
"""
RELEASE, START = "reserve_gpu.release()", "start()"
VARIABLE = "os.environ.get('CUDA_VISIBLE_DEVICES')"


class Steps:
    """A machine, and a process in which CUDA may start, for each sequence of steps."""

    def __init__(self, here: Here, forker: Forker) -> None:
        self.here, self._forker = here, forker

    def __call__(self, *steps: str) -> tuple[list[Any], list[str]]:
        """Return the result of each step, and the warnings."""
        environ = self.here.environ()
        results, warnings = json.loads(self._forker.ask(STEPS.format(steps=steps), environ))
        # Some frameworks that might be installed need a line of code, which is another warning.
        return results, [each for each in warnings if not each.startswith("To keep ")]


@pytest.fixture
def steps(here: Here, forker: Forker) -> Steps:
    """Make a machine with three GPUs."""
    here.write("gpu\ngpu\ngpu")
    return Steps(here, forker)


@pytest.mark.promise
@pytest.mark.parametrize("arguments", ["", "memory='1GB'", "wait=True"])
def test_too_late(steps: Steps, arguments: str) -> None:
    """After CUDA has started, the first reservation is refused, and nothing is changed."""
    (_, refused, visible), warnings = steps(START, f"reserve({arguments})", VARIABLE)
    assert refused.startswith("TooLateError: ")
    assert "GPU0, GPU1 and GPU2" in refused
    assert (visible, warnings) == (None, [])
    assert not steps.here.locks.exists()


@pytest.mark.parametrize(
    ("first", "then", "expected"),
    [
        ("devices='1'", "", "1"),
        ("devices='2,0'", "count=2", "2,0"),
        ("devices='1'", "name='H100'", None),
        ("devices='2,0'", "", None),
        ("devices='2,0'", "devices='0,2'", None),
    ],
)
def test_reserved_again(steps: Steps, first: str, then: str, expected: str | None) -> None:
    """After a release, exactly the GPUs that CUDA sees can be reserved again, in CUDA's order."""
    results, warnings = steps(f"reserve({first})", START, RELEASE, f"reserve({then})", VARIABLE)
    before, *_, again, visible = results
    assert warnings == []
    if expected is not None:
        assert again == visible == expected
        return
    assert visible is None
    assert again.startswith("TooLateError: ")
    assert f"reserve('{before}')" in again


def test_devices_that_cuda_sees_can_be_reserved_first(steps: Steps) -> None:
    """After CUDA has started, a first reservation of all devices that it sees is possible."""
    assert steps(START, "reserve(count=3)") == ([None, "0,1,2"], [])


@pytest.mark.parametrize("wait", ["None", "0.01"])
def test_a_gpu_that_another_process_holds_by_now(steps: Steps, wait: str) -> None:
    """A GPU that another process holds by now can't be reserved again, and CUDA sees none."""
    path = str(steps.here.locks / f"{steps.here.uuid('1')}.lock")
    results, _ = steps(
        "reserve(devices='1')",
        START,
        RELEASE,
        f"globals().update(file=open({path!r}, 'r+')) or __import__('fcntl').flock(file, 6)",
        f"reserve(wait={wait})",
        VARIABLE,
        "globals().pop('file').close()",
        "reserve()",
    )
    error = "NoFreeDeviceError" if wait == "None" else "WaitTimeoutError"
    assert results[4].startswith(f"{error}: ")
    assert "1    reserved " in results[4]
    assert (results[5], results[7]) == ("", "1")


@pytest.mark.parametrize(("then", "stays"), [("devices='2'", "GPU1"), ("", None)])
def test_a_smaller_request(steps: Steps, then: str, stays: str | None) -> None:
    """A smaller request keeps all GPUs that CUDA sees, and warns about those not requested."""
    results, warnings = steps("reserve(devices='1,2')", START, f"reserve({then})", VARIABLE)
    assert results[2] == results[3] == "1,2"
    assert len(warnings) == (stays is not None)
    assert all(f"{stays} stays" in each for each in warnings)


def test_a_part_instead_of_the_whole(steps: Steps) -> None:
    """After CUDA has started, a whole GPU can be exchanged for a part of it, and vice versa."""
    requests = "reserve(devices='1')", START, "reserve(memory='1GB')", "reserve(devices='1')"
    assert steps(*requests) == (["1", None, "1", "1"], [CAPS_ARE_LATE])


@pytest.mark.parametrize("is_late", [True, False])
def test_a_changed_variable(steps: Steps, *, is_late: bool) -> None:
    """A changed variable is set again, but if CUDA started with it, only a restart helps."""
    change = "os.environ.update(CUDA_VISIBLE_DEVICES='0')"
    changes = [change, START] if is_late else [START, change]
    results, warnings = steps("reserve(devices='1')", *changes, "reserve()", VARIABLE)
    assert results[4] == "1"
    (warning,) = warnings
    assert "GPU1" in warning
    assert ("restart" in warning) is is_late


@pytest.mark.promise
def test_release_after_the_start(steps: Steps) -> None:
    """A release after CUDA has started restores the variables, and frees the GPU."""
    results, _ = steps("reserve(devices='1')", START, RELEASE, VARIABLE, "reserve_gpu.current()")
    assert results[3:] == [None, None]
    assert os.environ.get(VISIBLE) is None
    assert got("1") == "1"
