"""Leases in real processes: by the clock, by idleness, where somebody waits; with CUDA or not.

When something is due is a table (test_schedule.py). Here is what happens then, and who is told.
"""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING

import pytest

import reserve_gpu
from reserve_gpu.system.shutdown import ProcessEnd
from tests.support.machine import LIMIT_S

if TYPE_CHECKING:
    from tests.support.machine import Machine

from tests.support.lease import IMPORTS, WAIT_FOR_ENDS

START_CUDA = "import ctypes; cuda = ctypes.CDLL('libcuda.so.1'); cuda.cuInit(0)"
USE_GPU = f"{START_CUDA}; cuda.cuCtxCreate_v2(ctypes.byref(ctypes.c_void_p()), 0, 0)"
# It is over once CUDA has started, on however busy a machine.
OVER_WITH_CUDA = f"reserve_gpu.reserve(for_='1h')\n{USE_GPU}\nreserve_gpu.reserve(for_=0.5)"
END_WITH_CUDA = f"reserve_gpu.reserve(for_='1h', end_kernel=True)\n{OVER_WITH_CUDA}"


@pytest.mark.parametrize("what", ["not_callable", "no_limit"])
def test_before_end_mistakes(what: str) -> None:
    """What can't be called, or waited for, is refused."""
    function, limit = (7, "5m") if what == "not_callable" else (print, "soon")
    with pytest.raises(reserve_gpu.RequestError):
        reserve_gpu.before_end(function, limit=limit)  # type: ignore[type-var]


@pytest.mark.process
@pytest.mark.full
def test_before_end_may_prolong(busy: Machine) -> None:
    """A function that asks for more time gets it: the process goes on."""
    done = busy.python(
        f"import reserve_gpu\n{IMPORTS}\n"
        "is_asked = []\n"
        "@reserve_gpu.before_end\n"
        "def ask(): reserve_gpu.reserve(for_='1h'); is_asked.append(True)\n"
        f"{END_WITH_CUDA}\n"
        "while not is_asked: time.sleep(0.01)\n"
        f"{WAIT_FOR_ENDS.format(0)}\n"
        "print(reserve_gpu.current().devices[0].label)"
    )
    assert (done.returncode, done.stdout) == (0, "GPU0\n"), done


def test_all_that_is_called_before_has_one_time() -> None:
    """However many functions there are, all of them together have no more than the longest time."""
    end, problems, is_over = ProcessEnd(longest_s=0.1), list[str](), threading.Event()
    for _ in range(3):
        end.call_before(lambda: is_over.wait(LIMIT_S), LIMIT_S)
    end.begin(lambda: False, problems.append, is_over.set)
    assert is_over.wait(LIMIT_S)
    assert [problem.endswith("did not finish within 0 s.") for problem in problems] == [
        False,
        True,
        True,
    ]


@pytest.mark.process
@pytest.mark.full
def test_one_that_ignores_the_end_is_killed(busy: Machine) -> None:
    """A program that does not end by SIGTERM is killed a little later."""
    done = busy.python(
        "import reserve_gpu, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"{END_WITH_CUDA}\n"
        "time.sleep(60)"
    )
    assert done.returncode == -signal.SIGKILL
