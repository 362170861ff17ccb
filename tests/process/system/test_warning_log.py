"""Warnings in the log: what is printed where."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.support.machine import Machine

SETTINGS = [
    "",
    "logging.disable()",
    "logger.disabled = True",
    "logger.setLevel(logging.ERROR)",
    "logger.addFilter(lambda record: False)",
    "logger.addFilter(lambda record: setattr(record, 'msg', 'changed %s') or True)",
    "logger.propagate = False",
    "logger.addHandler(logging.NullHandler())",
    "logging.basicConfig(format='%(levelname)s %(message)s')",
    "logging.getLogger().addHandler(logging.StreamHandler(sys.stdout))",
    "logging.lastResort.setLevel(logging.ERROR)",
    "logging.lastResort.addFilter(lambda record: False)",
    "logging.lastResort.setFormatter(logging.Formatter('%(name)s %(message)s'))",
    "logging.lastResort = logging.FileHandler('/dev/stdout')",
    "logging.lastResort, logging.raiseExceptions = None, False",
]
# Prints each warning twice: by us, and by logging.
BOTH = """
import logging, os, sys
from reserve_gpu.system.warning_log import warn
logger = logging.getLogger("reserve_gpu")
def ours():
    warn("100% \u2192", error)
def theirs():
    logger.warning("%s", "100% \u2192", exc_info=error)
for setting in sys.argv[1:]:
    for error in (None, ValueError("no")):
        for log in (ours, theirs):
            if os.fork() == 0:
                exec(setting)
                log()
                os._exit(0)
            os.wait()
            for stream in (sys.stdout, sys.stderr):
                print("--", file=stream, flush=True)
"""


def test_a_warning_is_what_logging_prints(machine: Machine) -> None:
    """A warning obeys the settings of logging, and looks the same as from logging itself."""
    done = machine.command(sys.executable, "-c", BOTH, *SETTINGS)
    assert done.stderr.startswith("100% \u2192\n--\n")
    for text in (done.stdout, done.stderr):
        pieces = text.split("--\n")
        assert len(pieces) == 4 * len(SETTINGS) + 1
        assert pieces[0:-1:2] == pieces[1::2]
