"""The Python interface, in real processes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.machine import Answer, Child, Machine

TWO_GPUS = """
gpu
  uuid GPU-aaaa1111-0000-0000-0000-000000000000
  memory 4038
gpu
  uuid GPU-bbbb2222-0000-0000-0000-000000000000
  memory 8192
"""
BUSY = "gpu\n  compute 4321 3500\n"

VARIABLES = "{k: v for k, v in os.environ.items() if k[:5] == 'CUDA_'}"
DEVICES = "[device.index for device in reserve_gpu.current().devices]"
RESERVE_WITH_WARNINGS = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter('always')
    reserve_gpu.reserve({})
[[w.category.__name__, str(w.message)] for w in caught if 'this container' not in str(w.message)]
"""


def variables(child: Child) -> Any:
    return child.run(VARIABLES).value


def devices(child: Child) -> Any:
    """The indices of what the child holds, None for nothing."""
    return child.run(f"{DEVICES} if reserve_gpu.current() else None").value


def free(machine: Machine) -> list[int]:
    """The GPUs that another process could reserve now."""
    with machine.child() as other:
        count = other.run("import pynvml; pynvml.nvmlInit(); pynvml.nvmlDeviceGetCount()").value
        return [index for index in range(count) if not other.reserve(f"'{index}'").error]


# -- reserve, current, release ---------------------------------------------------------------------


def test_reserve_current_release(machine: Machine) -> None:
    """reserve() sets the variables and holds the device; release() gives both back."""
    machine.write(TWO_GPUS)
    with machine.child() as child:
        assert child.run("reserve_gpu.current()").value is None
        child.run("r = reserve_gpu.reserve()")
        assert child.run("reserve_gpu.current() is r").value is True
        (device,) = child.run("[[d.index, d.uuid, d.memory_mib] for d in r.devices]").value
        assert device == [0, "GPU-aaaa1111-0000-0000-0000-000000000000", 4038]
        expected = {
            "CUDA_DEVICE_MEMORY": "4038",
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "CUDA_VISIBLE_DEVICES": "0",
        }
        assert child.run("r.environ").value == variables(child) == expected
        assert free(machine) == [1]
        assert child.run("[d.index for d in reserve_gpu.release()]").value == [0]
        assert child.run("reserve_gpu.current()").value is None
        assert variables(child) == {}
        assert free(machine) == [0, 1]


def test_release_of_nothing(machine: Machine) -> None:
    """release() without a reservation does nothing, and needs no driver."""
    with machine.child(CUDA_VISIBLE_DEVICES="1") as child:
        assert child.run("reserve_gpu.release()").value == []
        assert variables(child) == {"CUDA_VISIBLE_DEVICES": "1"}
    assert machine.calls() == []


@pytest.mark.parametrize(
    ("devices", "visible"),
    [
        ("", "0"),
        ("count=2", "0,1"),
        ("1", "1"),
        ("'1'", "1"),
        ("[1, 0]", "1,0"),
        ("('1', 'GPU-aaaa')", "1,0"),
        ("'1 0'", "1,0"),
        ("iter([1])", "1"),
    ],
)
def test_arguments(machine: Machine, devices: str, visible: str) -> None:
    """Devices are an index, a name or several of them, in this order; else count says how many."""
    machine.write(TWO_GPUS)
    with machine.child() as child:
        assert child.reserve(devices).value == visible


@pytest.mark.parametrize(
    "arguments",
    [
        *("[]", "''", "-1", "2", "[0, 0]", "'x'", "True", "[None]"),
        *("count=0", "count=-1", "count='2'", "count='x'", "count=True", "count=1.5"),
    ],
)
def test_bad_arguments(machine: Machine, arguments: str) -> None:
    """An argument that makes no sense is a RequestError in one line, and changes nothing."""
    with machine.child(CUDA_VISIBLE_DEVICES="0,1", CUDA_DEVICE_ORDER="PCI_BUS_ID") as child:
        before = variables(child)
        answer = child.reserve(arguments)
        assert answer.error in ("RequestError", "ImpossibleError")
        assert answer.text
        assert "\n" not in answer.text
        assert (variables(child), devices(child)) == (before, None)


def test_errors_are_one_family(machine: Machine) -> None:
    """Every error of reserve() is a ReserveGPUError, and a bad request is a ValueError too."""
    caught = (
        "try:\n reserve_gpu.reserve({})\nexcept {} as error:\n name = type(error).__name__\nname"
    )
    with machine.child() as child:
        assert child.run(caught.format("'x'", "ValueError")).value == "RequestError"
        assert (
            child.run(caught.format("'x'", "reserve_gpu.ReserveGPUError")).value == "RequestError"
        )
        machine.write(BUSY)
        assert (
            child.run(caught.format("", "reserve_gpu.ReserveGPUError")).value == "NoFreeDeviceError"
        )
        machine.write("gpu\nfail nvmlInitWithFlags * 9")
        assert child.run(caught.format("", "reserve_gpu.DriverError")).value == "NoDriverError"
        child.run("os.environ['RESERVE_GPU_LOCK_DIR'] = '/proc/no'")
        machine.write(TWO_GPUS)
        assert child.run(caught.format("", "reserve_gpu.ReserveGPUError")).value == "LockError"
        child.run("reserve_gpu.release()\nimport ctypes; ctypes.CDLL('libcuda.so.1').cuInit(0)")
        assert child.run(caught.format("", "reserve_gpu.ReserveGPUError")).value == "TooLateError"


# -- the environment -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "before",
    [
        {},
        {"CUDA_DEVICE_MEMORY": "123"},
        {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"},
        {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_DEVICE_MEMORY": ""},
    ],
)
@pytest.mark.parametrize("times", [1, 2])
def test_environment_is_restored(machine: Machine, before: dict[str, str], times: int) -> None:
    """Release restores every variable exactly, also after several different reservations."""
    machine.write("gpu\n  memory none\ngpu\n  memory none")
    with machine.child(**before) as child:
        for index in range(times):
            child.reserve(f"'{1 - index}'")
            expected = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "1"}
            if "CUDA_VISIBLE_DEVICES" in before:
                assert variables(child)["CUDA_VISIBLE_DEVICES"] == "1"  # the fence stands
            else:
                assert variables(child) == expected | {"CUDA_VISIBLE_DEVICES": str(1 - index)}
            assert "CUDA_DEVICE_MEMORY" not in variables(child)  # none reported, no stale one kept
        child.run("reserve_gpu.release()")
        assert variables(child) == before


def test_environment_that_somebody_changed_is_theirs(machine: Machine) -> None:
    """A variable that was changed while a device was held is not overwritten by its release."""
    with machine.child(CUDA_VISIBLE_DEVICES="0,1") as child:
        child.reserve()
        child.run("os.environ['CUDA_VISIBLE_DEVICES'] = '1'\nreserve_gpu.release()")
        assert variables(child) == {"CUDA_VISIBLE_DEVICES": "1"}


# -- as a context manager --------------------------------------------------------------------------


def test_with(machine: Machine) -> None:
    """At the end of `with` the device is free and the variables are as they were."""
    with machine.child(CUDA_VISIBLE_DEVICES="1") as child:
        child.run("context = reserve_gpu.reserve()\nreservation = context.__enter__()")
        assert child.run("reservation is context").value is True
        assert free(machine) == [0]
        child.run("context.__exit__(None, None, None)")
        assert free(machine) == [0, 1]
        assert variables(child) == {"CUDA_VISIBLE_DEVICES": "1"}


def test_with_and_an_exception(machine: Machine) -> None:
    """An exception leaves `with` as itself, and the device is free."""
    with machine.child() as child:
        assert child.run("with reserve_gpu.reserve('0,1'):\n 1/0").error == "ZeroDivisionError"
        assert (variables(child), free(machine)) == ({}, [0, 1])


def test_with_inside_with(machine: Machine) -> None:
    """A `with` that asks for what is held already does not let go of it; the outer one does."""
    with machine.child() as child:
        child.run("outer = reserve_gpu.reserve(1); outer.__enter__()")
        assert child.run(
            f"with reserve_gpu.reserve() as inner:\n seen = {DEVICES}\nseen"
        ).value == [1]
        assert (devices(child), free(machine)) == ([1], [0])
        assert variables(child)["CUDA_VISIBLE_DEVICES"] == "1"
        child.run("outer.__exit__(None, None, None)")
        assert (devices(child), variables(child), free(machine)) == (None, {}, [0, 1])


def test_old_reservation_lets_go_of_nothing_that_is_in_use(machine: Machine) -> None:
    """The end of an earlier `with` does not free a device that a later reservation took over."""
    with machine.child() as child:
        child.run("with reserve_gpu.reserve(0):\n later = reserve_gpu.reserve([0, 1])")
        assert devices(child) == [0, 1]
        assert variables(child)["CUDA_VISIBLE_DEVICES"] == "0,1"
        assert free(machine) == []
        child.run("later.release()")
        assert (variables(child), free(machine)) == ({}, [0, 1])


def test_release_twice(machine: Machine) -> None:
    """A second release of a reservation leaves alone what was reserved since."""
    with machine.child() as child:
        child.run(
            "old = reserve_gpu.reserve(0)\nold.release()\n"
            "new = reserve_gpu.reserve(0)\nold.release()"
        )
        assert devices(child) == [0]
        assert variables(child)["CUDA_VISIBLE_DEVICES"] == "0"
        assert free(machine) == [1]


# -- asking again ----------------------------------------------------------------------------------


def test_asking_for_another(machine: Machine) -> None:
    """Asking for another GPU takes that one and then lets go of the first."""
    with machine.child() as child:
        child.reserve("0")
        assert child.reserve("1").value == "1"
        assert (devices(child), free(machine)) == ([1], [0])


def test_another_that_cannot_be_had(machine: Machine) -> None:
    """If the other GPU can't be had, the first one stays, and so do the variables."""
    with machine.child() as child, machine.child() as neighbour:
        neighbour.reserve("1")
        child.reserve("0")
        before = variables(child)
        for wanted in ("1", "[0, 1]", "count=2"):
            answer = child.reserve(wanted)
            assert answer.error == "NoFreeDeviceError"
            assert "keeps GPU0" in answer.text
            assert "CUDA_VISIBLE_DEVICES = ''" not in answer.text
            assert (variables(child), devices(child), free(machine)) == (before, [0], [])


@pytest.mark.parametrize(
    ("first", "then", "visible"),
    [
        ("1", "count=2", "0,1"),
        ("0", "count=2", "0,1"),
        ("1", "[0, 1]", "0,1"),
        ("[0, 1]", "", "0,1"),
        ("[1, 0]", "count=2", "1,0"),
        ("[0, 1]", "[1, 0]", "1,0"),
        ("[0, 1]", "1", "1"),
        ("1", "", "1"),
        ("1", "'GPU-bbbb'", "1"),
    ],
)
def test_what_is_held_counts_as_free(machine: Machine, first: str, then: str, visible: str) -> None:
    """What is held satisfies what asks for no more; else it is free for the one who holds it."""
    machine.write(TWO_GPUS)
    with machine.child() as child:
        child.reserve(first)
        assert child.reserve(then).value == visible
        assert variables(child)["CUDA_VISIBLE_DEVICES"] == visible
        assert free(machine) == [i for i in (0, 1) if str(i) not in visible]


def test_held_counts_as_free_though_in_use(machine: Machine) -> None:
    """A GPU that is held counts as free for its holder although a process computes on it by now."""
    with machine.child() as child:
        child.reserve("0")
        machine.write("gpu\n  compute 4321 3500\ngpu")
        assert child.reserve("count=2").value == "0,1"


# -- what can't be had -----------------------------------------------------------------------------


def test_a_reason_for_each_device(machine: Machine) -> None:
    """Where nothing is free the error says of every device why, and none is visible after it."""
    machine.write(
        "gpu\n compute 4321 3500\n"
        "gpu\n memory 8192\n used 3000\n"
        "gpu\n mode prohibited\n"
        "gpu\n mps 777 100\n"
        "gpu\n"
        "gpu\nfail nvmlDeviceGetHandleByIndex_v2 5 15"
    )
    with machine.child() as child, machine.child() as neighbour:
        neighbour.reserve("4")
        answer = child.reserve()
        assert answer.error == "NoFreeDeviceError"
        first, *reasons = answer.text.splitlines()[:7]
        assert first.startswith("No free GPU devices: 5 of 6 are in use")
        for index, part in enumerate(
            ["4321", "2.9 GiB", "prohibited", "777", f"pid {neighbour.pid}", "lost"]
        ):
            assert reasons[index].startswith(f"  GPU{index}: ")
            assert part in reasons[index]
        assert variables(child) == {"CUDA_VISIBLE_DEVICES": ""}


def test_all_or_nothing(machine: Machine) -> None:
    """Of several devices none stays held if one can't be had, whether they are named or counted."""
    machine.write("gpu\ngpu\ngpu")
    with machine.child() as child, machine.child() as neighbour:
        neighbour.reserve("1")
        for wanted in ("[0, 1]", "[2, 1, 0]", "count=3"):
            answer = child.reserve(wanted)
            assert answer.error == "NoFreeDeviceError"
            assert f"pid {neighbour.pid}" in answer.text
            assert free(machine) == [0, 2]
        assert child.reserve("count=2").value == "0,2"


@pytest.mark.parametrize(("before", "there"), [({}, 2), ({"CUDA_VISIBLE_DEVICES": "1"}, 1)])
def test_impossible_count(machine: Machine, before: dict[str, str], there: int) -> None:
    """More GPUs than there are is a bad request that says how many there are."""
    with machine.child(**before) as child:
        answer = child.reserve("count=9")
        assert answer.error == "ImpossibleError"
        assert "9" in answer.text
        assert str(there) in answer.text
        assert variables(child) == before


def test_named_busy_device(machine: Machine) -> None:
    """A busy device that nobody reserved is taken if it is named; a warning names the pid."""
    machine.write(BUSY)
    with machine.child() as child:
        ((category, text),) = child.run(RESERVE_WITH_WARNINGS.format("0")).value
        assert category == "ReserveGPUWarning"
        assert "GPU0" in text
        assert "4321" in text
        assert devices(child) == [0]
        assert child.run(RESERVE_WITH_WARNINGS.format("0")).value == []  # said once


def test_warning_as_error_is_no_trap(machine: Machine) -> None:
    """Where warnings are errors, a refused warning leaves variables and locks telling the same."""
    machine.write(BUSY)
    with machine.child() as child:
        child.run("import warnings; warnings.simplefilter('error')")
        answer: Answer = child.reserve("0")
        assert answer.error == "ReserveGPUWarning"
        held = devices(child)
        assert free(machine) == ([] if held else [0])
        assert variables(child).get("CUDA_VISIBLE_DEVICES") == ("0" if held else None)


def test_named_reserved_device(machine: Machine) -> None:
    """A device that somebody reserved is refused to others also if it is named."""
    with machine.child() as holder, machine.child() as child:
        holder.reserve("0")
        answer = child.reserve("0")
        assert answer.error == "NoFreeDeviceError"
        assert f"pid {holder.pid}" in answer.text
        assert variables(child) == {"CUDA_VISIBLE_DEVICES": ""}


def test_threads(machine: Machine) -> None:
    """Eight threads of one process that ask at the same moment get one and the same reservation."""
    machine.add("delay nvmlInitWithFlags * 0.05")
    with machine.child() as child:
        code = """
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
barrier = Barrier(8)
def ask(_):
    barrier.wait()
    return id(reserve_gpu.reserve())
with ThreadPoolExecutor(8) as pool:
    found = set(pool.map(ask, range(8)))
len(found)
"""
        assert child.run(code).value == 1
        assert (devices(child), free(machine)) == ([0], [1])


# -- an inherited CUDA_VISIBLE_DEVICES -------------------------------------------------------------

FENCES = [
    ("1", "1"),
    ("0,1", "0"),
    ("1,0", "0"),
    ("GPU-bbbb2222-0000-0000-0000-000000000000", "1"),
    ("GPU-bbbb", "1"),
    ("1,-1,0", "1"),
    ("1,7,0", "1"),
    ("1junk", "1"),
    ("", None),
    ("-1", None),
    ("NoDevFiles", None),
    ("0,0", None),
    ("7", None),
    ("GPU-cccc", None),
]


@pytest.mark.parametrize(("value", "visible"), FENCES)
@pytest.mark.parametrize("order", [{}, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}])
def test_inherited_fence(
    machine: Machine, value: str, visible: str | None, order: dict[str, str]
) -> None:
    """What is reserved is inside an inherited CUDA_VISIBLE_DEVICES, as CUDA reads it."""
    machine.write(TWO_GPUS.replace("memory 8192", "memory 4038"))
    before = {"CUDA_VISIBLE_DEVICES": value, **order}
    with machine.child(**before) as child:
        answer = child.reserve()
        assert answer.value == visible
        if visible is None:
            assert answer.error == "NoFreeDeviceError"
            assert f"CUDA_VISIBLE_DEVICES={value!r}" in answer.text
            assert variables(child)["CUDA_VISIBLE_DEVICES"] == ""
        child.run("reserve_gpu.release()")
        assert variables(child) == before


def test_named_outside_the_fence(machine: Machine) -> None:
    """A named device outside the fence is a bad request that names what is inside."""
    with machine.child(CUDA_VISIBLE_DEVICES="1") as child:
        answer = child.reserve("0")
        assert answer.error == "RequestError"
        assert "CUDA_VISIBLE_DEVICES='1'" in answer.text
        assert "GPU1" in answer.text
        assert variables(child) == {"CUDA_VISIBLE_DEVICES": "1"}
        assert child.reserve("1").value == "1"


@pytest.mark.parametrize(
    ("order", "visible"), [("PCI_BUS_ID", "1"), ("FASTEST_FIRST", "3"), ("", "3")]
)
def test_number_on_mixed_models(machine: Machine, order: str, visible: str) -> None:
    """A number means what CUDA means by it: the PCI bus order only if it was asked for."""
    machine.use("mixed")
    with machine.child(
        CUDA_VISIBLE_DEVICES="1" if visible == "1" else "0", CUDA_DEVICE_ORDER=order
    ) as child:
        assert child.reserve().value == visible


def test_number_on_mixed_models_that_cannot_be_asked(machine: Machine) -> None:
    """Where CUDA can't say what a number means it is refused, and the way out is named."""
    machine.use("mixed")
    machine.add("fail cuInit * 999")
    with machine.child(CUDA_VISIBLE_DEVICES="0") as child:
        answer = child.reserve()
        assert answer.error == "RequestError"
        assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in answer.text
        assert variables(child) == {"CUDA_VISIBLE_DEVICES": "0"}


# -- what people do in between ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "change", ["os.environ['CUDA_VISIBLE_DEVICES'] = '0'", "os.environ.clear()"]
)
def test_variables_that_were_changed_are_set_again(machine: Machine, change: str) -> None:
    """Asking again mends the variables that somebody changed since, and a warning says so."""
    with machine.child() as child:
        child.reserve("1")
        before = variables(child)
        child.run(change)
        told = child.run(
            f"import warnings\n{CATCH}reserve_gpu.reserve(1)\n[str(w.message) for w in caught]"
        )
        assert variables(child) == before
    assert len(told.value) == 1
    assert "GPU1" in told.value[0]


def test_changed_variables_after_cuda_has_started(machine: Machine) -> None:
    """Once CUDA has started a changed variable stays as it is, and the warning says that."""
    with machine.child() as child:
        child.reserve("1")
        child.run("import ctypes; ctypes.CDLL('libcuda.so.1').cuInit(0)")
        child.run("os.environ['CUDA_VISIBLE_DEVICES'] = '0'")
        told = child.run(
            f"import warnings\n{CATCH}reserve_gpu.reserve(1)\n[str(w.message) for w in caught]"
        )
        assert child.visible() == "0"
    assert "CUDA has started" in told.value[0]


CATCH = "with warnings.catch_warnings(record=True) as caught:\n warnings.simplefilter('always')\n "


def test_an_inner_call_keeps_nothing_alive(machine: Machine) -> None:
    """A library that asks again inside of a `with` does not keep the GPU beyond its end."""
    with machine.child() as child:
        child.run("with reserve_gpu.reserve(0):\n reserve_gpu.reserve()")
        assert (variables(child), free(machine)) == ({}, [0, 1])


def test_a_with_of_what_is_held_already_ends_nothing(machine: Machine) -> None:
    """A `with` in a process that has reserved before leaves that reservation as it is."""
    with machine.child() as child:
        child.reserve("0")
        child.run("with reserve_gpu.reserve():\n pass")
        assert (devices(child), free(machine)) == ([0], [1])


def test_a_released_reservation_can_not_be_entered(machine: Machine) -> None:
    """`with` on a reservation that was released is an error, not a block without a GPU."""
    with machine.child() as child:
        child.run(
            "held = reserve_gpu.reserve(0)\n"
            "with held:\n with held:\n  pass\n inside = reserve_gpu.current()"
        )
        assert child.run("inside is held").value
        answer = child.run("with held:\n pass")
    assert answer.error == "RequestError"


def test_a_warning_that_is_an_error_leaves_nothing_held(machine: Machine) -> None:
    """Where warnings are errors, a reservation that would have warned is none."""
    machine.use("busy")
    with machine.child() as child:
        child.run("import warnings; warnings.simplefilter('error')")
        assert child.reserve("0").error == "ReserveGPUWarning"
        assert (variables(child), devices(child)) == ({}, None)


@pytest.mark.parametrize("argument", ["note=5", "name=5", "exclude=b'0'"])
def test_arguments_of_the_wrong_type(machine: Machine, argument: str) -> None:
    """An argument of the wrong type is a RequestError, whether or not something is held."""
    with machine.child() as child:
        assert child.reserve(argument).error == "RequestError"
        child.reserve("0")
        assert child.reserve(argument).error == "RequestError"
        child.run("reserve_gpu.release()")
        assert free(machine) == [0, 1]


def test_the_parent_is_named_as_such(machine: Machine) -> None:
    """A child made by spawn whose parent holds the GPU is told so, and keeps the variables."""
    script = machine.folder / "script.py"
    script.write_text(
        "import multiprocessing, reserve_gpu\n"
        "def job():\n"
        "    try: reserve_gpu.reserve()\n"
        "    except reserve_gpu.NoFreeDeviceError as error: print(error)\n"
        "if __name__ == '__main__':\n"
        "    reserve_gpu.reserve(0)\n"
        "    child = multiprocessing.get_context('spawn').Process(target=job)\n"
        "    child.start(); child.join()\n"
    )
    done = machine.command(sys.executable, str(script))
    assert "GPU0 is reserved already, for all that the holder has started" in done.stdout, done
    assert "CUDA_VISIBLE_DEVICES = '0'" in done.stdout


def test_who_shares_a_device_alone_can_have_it_alone(machine: Machine) -> None:
    """A process is no obstacle to itself; another one that shares the device is, and is named."""
    with machine.child() as child, machine.child() as other:
        child.reserve("1, share=True")
        other.reserve("1, share=True")
        refused = child.reserve("1")
        assert refused.error == "NoFreeDeviceError"
        assert f"pid {other.pid}" in refused.text
        other.run("reserve_gpu.release()")
        assert child.reserve("1").value == "1"
        assert other.reserve("1").error == "NoFreeDeviceError"
        child.run("reserve_gpu.release()")
        assert other.reserve("1").value == "1"


def test_who_shares_says_again_who_it_is(machine: Machine) -> None:
    """What another sharer wrote over is written again when the cell is run again."""
    with machine.child() as child, machine.child() as other:
        child.reserve("1, share=True, note='mine'")
        other.reserve("1, share=True, note='theirs'")
        other.run("reserve_gpu.release()")
        child.reserve("1, share=True")
        assert child.run("reserve_gpu.status().rows[1].holders[0].note").value == "mine"


OFTEN = """
import gc
for _ in range(50):
    reserve_gpu.reserve().release()
gc.collect()
before = len(gc.get_objects())
for _ in range(200):
    reserve_gpu.reserve().release()
len(gc.get_objects()) - before
"""


def test_reserving_often_leaves_no_garbage(machine: Machine) -> None:
    """What a reservation leaves behind, Python's garbage collector gets to see."""
    with machine.child() as child:
        assert child.run(OFTEN).value < 2000  # each leaves 20, and it looks at every 700
