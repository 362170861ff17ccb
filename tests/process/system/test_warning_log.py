"""Tests of warnings in the log."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.support.machine import Machine

SETTINGS = [
    "",
    "logging.disable()",
    "logger.setLevel(logging.ERROR)",
    "logger.addFilter(lambda record: False)",
    "logger.addFilter(lambda record: setattr(record, 'msg', 'changed %s') or True)",
    "logging.basicConfig(format='%(levelname)s %(message)s')",
    "logging.getLogger().addHandler(logging.StreamHandler(sys.stdout))",
    "logging.lastResort.setLevel(logging.ERROR)",
    "logging.lastResort.addFilter(lambda record: False)",
    "logging.lastResort.setFormatter(logging.Formatter('%(name)s %(message)s'))",
    "logging.lastResort = logging.FileHandler('/dev/stdout')",
    "logging.lastResort, logging.raiseExceptions = None, False",
]
# Prints each warning twice: by this package, and by logging.
PRINT_BOTH = """
import logging, os, sys
from reserve_gpu.system.warning_log import warn
logger = logging.getLogger("reserve_gpu")
def by_package():
    warn("100% \u2192", error)
def by_logging():
    logger.warning("%s", "100% \u2192", exc_info=error)
for setting in sys.argv[1:]:
    for error in (None, ValueError("no")):
        for log in (by_package, by_logging):
            if os.fork() == 0:
                exec(setting)
                log()
                os._exit(0)
            os.wait()
            for stream in (sys.stdout, sys.stderr):
                print("--", file=stream, flush=True)
"""


def test_warnings_look_like_those_of_logging(machine: Machine) -> None:
    """A warning is printed exactly as logging prints it, whatever the settings of logging are."""
    done = machine.command(sys.executable, "-c", PRINT_BOTH, *SETTINGS)
    assert done.stderr.startswith("100% \u2192\n--\n")
    for text in (done.stdout, done.stderr):
        pieces = text.split("--\n")
        assert len(pieces) == 4 * len(SETTINGS) + 1
        assert pieces[0:-1:2] == pieces[1::2]
