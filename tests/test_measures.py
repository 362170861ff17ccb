"""What the project may cost its readers: lines of code, and the depth of a reservation."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from tests.entered import lines_of_code
from tests.machine import ROOT

if TYPE_CHECKING:
    from tests.machine import Machine

MOST_LINES = 14_168  # whoever adds takes away first
MOST_CALLS = 12
# With the three lines of calls.checkpoint, which is entered where the driver is slow.
MOST_ENTERED = {"reserve": 1_775, "refuse": 2_496, "cell": 200}


def test_lines_of_code() -> None:
    """The package has no more lines of code than its budget."""
    counts = [len(lines_of_code(path.read_text())) for path in ROOT.glob("reserve_gpu/**/*.py")]
    assert len(counts) > 50
    assert sum(counts) <= MOST_LINES


DEEPEST = """
import _thread, os, sys, threading
import reserve_gpu
FOLDER = os.path.dirname(reserve_gpu.__file__)
deepest = {}

def watch(frame, event, _):
    if event == 'call':
        names = []
        while frame:
            code = frame.f_code
            if code.co_filename.startswith(FOLDER) and code.co_name != '<module>':
                names.append(code.co_name)
            frame = frame.f_back
        thread = threading.get_ident()
        deepest[thread] = max(deepest.get(thread, []), names, key=len)

def start(function, arguments):
    def watched():
        sys.setprofile(watch)
        function(*arguments)
    return real_start(watched, ())

from reserve_gpu import calls
from reserve_gpu.core import api
real_start, calls.start_new_thread = calls.start_new_thread, start
sys.setprofile(watch)
reserve_gpu.reserve()
sys.setprofile(None)
for names in deepest.values():
    print(len(names), *names)
"""


@pytest.mark.process
def test_the_road_of_a_bare_reservation_is_short(machine: Machine) -> None:
    """On no thread are more than twelve of our own calls under way at once."""
    done = machine.python(DEEPEST)
    threads = done.stdout.splitlines()
    assert len(threads) >= 3, done  # the caller's, the session's, and the driver's
    assert [line for line in threads if int(line.split()[0]) > MOST_CALLS] == []


@pytest.mark.process
@pytest.mark.parametrize("what", MOST_ENTERED)
def test_the_road_is_short(what: str, machine: Machine) -> None:
    """A bare reservation and a refusal enter so much code at most; a cell runs so many lines."""
    done = machine.command(sys.executable, "-m", "tests.entered", what)
    assert done.returncode == 0, done
    *listed, total = done.stdout.splitlines()
    assert len(listed) > 50
    assert int(total) <= MOST_ENTERED[what], done.stdout
