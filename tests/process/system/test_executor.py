"""Calls on threads of our own: in turn, given up, in the midst of signals, and without threads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.machine import Machine

from tests.support.executor import LOCK_IMPORTS


@pytest.mark.promise
def test_released_at_exit(machine: Machine) -> None:
    """What is called at the end of Python can release, also where no thread can be started then."""
    done = machine.python(
        "import atexit, os, reserve_gpu\n"
        "@atexit.register\n"
        "def at_exit():\n"
        "    print(reserve_gpu.release(), os.environ.get('CUDA_VISIBLE_DEVICES'))\n"
        "reserve_gpu.reserve(memory='1GB')\n"
    )
    assert done.stdout.startswith("(<GPU0: "), done
    assert done.stdout.endswith(",) None\n"), done
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("wishes", "rules"),
    [
        ("", ""),
        ("memory='1GB'", ""),
        ("wait=1", ""),
        ("", "[limits]\ngpus = 2\n"),
    ],
    ids=["plain", "part", "wait", "rules"],
)
def test_the_import_lock_that_a_signal_has_left(machine: Machine, wishes: str, rules: str) -> None:
    """A handler that has raised in an import leaves Python's lock: a reservation goes on."""
    machine.rules.write_text(rules)
    with machine.child() as child:
        child.run(LOCK_IMPORTS)
        assert child.reserve(wishes).error is None
        assert child.run("reserve_gpu.release()\nstr(reserve_gpu.current())").value == "None"


def test_a_refusal_needs_no_lock_of_imports(machine: Machine) -> None:
    """With that lock left to the main thread a refusal answers, at once and after a wait."""
    with machine.child() as holder, machine.child() as child:
        holder.reserve("count=2")
        child.run(LOCK_IMPORTS)
        assert child.reserve("").error == "NoFreeDeviceError"
        assert child.reserve("wait=0.3").error == "WaitTimeoutError"
