"""Tests of calls at the exit of Python, and under an import lock that is never released."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.executor import LOCK_IMPORTS

if TYPE_CHECKING:
    from tests.support.machine import Machine


@pytest.mark.promise
def test_released_at_exit(machine: Machine) -> None:
    """An exit handler can release, although Python starts no more threads then."""
    done = machine.python(
        "import atexit, os, reserve_gpu\n"
        "@atexit.register\n"
        "def at_exit():\n"
        "    print([each.label for each in reserve_gpu.release()])\n"
        "    print(os.environ.get('CUDA_VISIBLE_DEVICES'))\n"
        "reserve_gpu.reserve(memory='1GB')\n"
    )
    assert (done.stdout, done.stderr) == ("['GPU0']\nNone\n", "")


@pytest.mark.parametrize(
    ("arguments", "rules"),
    [("memory='1GB'", ""), ("wait=1", ""), ("", "[limits]\ngpus = 2\n")],
    ids=["part", "wait", "rules"],
)
def test_reservations_need_no_import_lock(machine: Machine, arguments: str, rules: str) -> None:
    """A reservation works even if an interrupted import has left Python's import lock locked."""
    machine.rules.write_text(rules)
    with machine.child() as child:
        child.run(LOCK_IMPORTS)
        assert child.reserve(arguments).error is None
        assert child.run("reserve_gpu.release()\nstr(reserve_gpu.current())").value == "None"


def test_refusals_need_no_import_lock(machine: Machine) -> None:
    """A refusal works without the import lock, both immediately and after a wait."""
    with machine.child() as holder, machine.child() as child:
        holder.reserve("count=2")
        child.run(LOCK_IMPORTS)
        assert child.reserve("").error == "NoFreeDeviceError"
        assert child.reserve("wait=0.3").error == "WaitTimeoutError"
