"""Imports are fast and have no side effects."""

from __future__ import annotations

import pkgutil
import re
from typing import TYPE_CHECKING

import pytest

import reserve_gpu

if TYPE_CHECKING:
    from tests.support.machine import Machine

# Programs, and modules that need Jupyter or an extra.
NOT_IMPORTED = re.compile(r"__main__|\.dask|\.check\.(probes|frameworks)|provisioner|\.slurm\.")
IMPORTS = """
import os, sys, threading
opened = []
def watch(event, arguments):
    if event == 'open' and isinstance(arguments[0], str):
        opened.append(arguments[0])
    elif event in ('os.mkdir', 'os.fork', 'subprocess.Popen', 'os.putenv', 'ctypes.dlopen'):
        opened.append(f'{event} {arguments}')
import IPython.core.magic, IPython.core.magic_arguments
before, environ = set(sys.modules), dict(os.environ)
import ctypes  # opens the program itself
for slow in ('asyncio', 'subprocess'):
    before.discard(slow); sys.modules.pop(slow, None)
sys.addaudithook(watch)
import MODULES
places = tuple(path for path in sys.path if path)
is_module = lambda o: o.startswith(places) and o.endswith(('.py', '.pyc', '.so'))
print([o for o in opened if not is_module(o) and '__pycache__' not in o])
print(threading.active_count(), os.environ == environ)
print(*{name.split('.')[0] for name in set(sys.modules) - before})
"""


@pytest.mark.promise
def test_import_has_no_side_effects(machine: Machine) -> None:
    """Importing the modules opens no other file, starts no process, and sets no variable."""
    found = pkgutil.walk_packages(reserve_gpu.__path__, "reserve_gpu.")
    names = [module.name for module in found if not NOT_IMPORTED.search(module.name)]
    done = machine.python(IMPORTS.replace("MODULES", ", ".join(names)))
    assert done.stderr == ""
    opened, state, modules = done.stdout.splitlines()
    assert opened == "[]"
    assert state == "1 True"
    assert not set(modules.split()) & {"pynvml", "IPython", "asyncio"}
    assert machine.calls() == []
    assert not machine.locks.exists()


RESERVES = """
import sys, pynvml
before = set(sys.modules)
import reserve_gpu
reserve_gpu.reserve()
print(*set(sys.modules) - before)
"""
NOT_NEEDED = {"IPython", "argparse", "asyncio", "shlex", "subprocess", "tomllib"}
NOT_NEEDED |= {"reserve_gpu.cli", "reserve_gpu.commands", "reserve_gpu.ipython"}
NOT_NEEDED |= {"reserve_gpu.render.pictures", "reserve_gpu.render.progress"}


@pytest.mark.promise
def test_reservation_loads_no_slow_module(machine: Machine) -> None:
    """A script that reserves a free GPU does not load the modules of other features."""
    done = machine.python(RESERVES)
    assert done.stderr == ""
    modules = set(done.stdout.split())
    assert "reserve_gpu.allocation" in modules
    assert not modules & NOT_NEEDED
