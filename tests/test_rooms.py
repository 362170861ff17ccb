"""Which room may import from which, who alone imports what is slow, and that imports do nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from typing import TYPE_CHECKING

import pytest

import reserve_gpu
from tests.machine import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.machine import Machine

pytestmark = pytest.mark.xdist_group("rooms")  # they share what they have parsed

PACKAGE = ROOT / "reserve_gpu"
PUBLIC = PACKAGE / "public" / "__init__.py"
EXTENSION = ROOT / "labextension" / "jupyterlab_reserve_gpu"

# What people type beside a request: no command imports another one but `run`.
COMMANDS = {f"commands.{path.parent.name}" for path in PACKAGE.glob("commands/*/__init__.py")}
RUN = "commands.run"

# From a room imports go to lower rows only. Inside a room they go anywhere, but not in a circle.
ROOMS = [
    {"__main__"},
    {"__init__"},
    {"extension"},
    {"magic", "cli", "dask"},
    {"public"},
    COMMANDS - {RUN},
    {RUN},
    {"jupyter"},
    {"options"},
    {"commands", "commands.table"},
    {"features"},
    {"core"},
    {"machine", "report"},
    {"log"},
    {"rules"},
    {"gpus", "locks"},
    {"cells", "containers"},
    {"this_kernel"},
    {"proc"},
    {"this_process", "settings", "quantities"},
    {"alarm", "heir", "nonblocking", "programs", "startup"},
    {"accounts", "calls", "option", "spawn"},
    {"errors"},
    {"notices"},
    {"model"},
    {"foreign", "clocks"},
    {"forks"},
]
FLOOR = {room: floor for floor, rooms in enumerate(ROOMS) for room in rooms}

# What Jupyter starts, or what starts with its packages.
OF_JUPYTER = {
    f"commands.slurm.{name}" for name in ("relay", "node", "lines", "sockets", "slurm_provisioner")
}

# Who alone may import what is slow to load, or not there on every system.
OWNERS = {
    "IPython": {
        *("extension", "magic", "jupyter.completion"),
        *("report.faces", "report.pictures", "report.progress"),
    },
    "traitlets": {"extension", "commands.hosts.provisioner"},
    "pynvml": {"gpus.bindings"},
    "fcntl": {"locks.lock", "nonblocking"},
    "ctypes": {
        "gpus.bindings",
        "core.environment",
        "commands.check.probes",
        "alarm",
    },
    "argcomplete": {"cli"},
    "ipykernel": {"commands.kernels.kernelspec", "commands.slurm.relay"},
    "jupyter_client": {"commands.kernels.kernelspec", *OF_JUPYTER},
    "zmq": {"commands.slurm.relay"},
    "jupyter_core": {"commands.kernels.kernelspec", "commands.hosts.provisioner"},
    "sshpyk": {"commands.hosts.provisioner"},
    "click": {"dask"},
    "tomli": {"rules"},
    "distributed": {"dask"},
}
# Imported inside functions only; so is what is ours and seldom needed.
LATE = {"pynvml", "argcomplete", "ipykernel", "jupyter_client", "jupyter_core"}
LATE_OURS = {*COMMANDS, "jupyter", "extension", "magic", "cli"}


# What the session's thread runs.
WORK = {"core", "features", "machine", "rules", "log", "gpus", "locks", "proc", "cells", "alarm"}
IMPORTS = (ast.Import, ast.ImportFrom)

# Classes that share a name: `%config ReserveGPU` and `reserve_gpu.dask.ReserveGPU` are public.
# `core/features.py` is the table of `features/`.
NAMESAKES = {"ReserveGPU", "features"}


@cache
def sources() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py"))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def name_of(path: Path) -> str:
    """Return the module's name: `locks.lock`, `magic`, `locks` for its `__init__`."""
    parts = [*path.relative_to(PACKAGE).with_suffix("").parts]
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    """Return the room that a module is in: the one with the longest name that begins its own."""
    while module not in FLOOR:
        module, dot, _ = module.rpartition(".")
        assert dot, "give the new room its floor here and in CONTRIBUTING.md"
    return module


def is_for_types(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
    )


def imported_late(node: ast.AST) -> str | None:
    """Return the module that `Late("...")` imports; None for any other node."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Late":
        return str(node.args[0].value) if isinstance(node.args[0], ast.Constant) else None
    return None


def imports(tree: ast.AST, *, types: bool = True, inner: bool = True) -> Iterator[str]:
    """Yield what a module imports, in full. types: for annotations too. inner: in functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and is_for_types(node) and not types:
            for other in node.orelse:
                yield from imports(other, types=types, inner=inner)
            continue
        if not inner and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        else:
            if inner and (name := imported_late(node)):
                yield f"reserve_gpu.{name}"
            yield from imports(node, types=types, inner=inner)


@cache
def imports_of(path: Path, *, types: bool = True, inner: bool = True) -> tuple[str, ...]:
    """Return what a file imports, see `imports`."""
    return (*imports(tree_of(path), types=types, inner=inner),)


@cache
def ours(path: Path, *, types: bool = True, inner: bool = True) -> frozenset[str]:
    """Return the names of our modules that a file imports."""
    modules = {name_of(source) for source in sources()}
    found = set()
    for name in imports_of(path, types=types, inner=inner):
        first, _, rest = name.partition(".")
        if first != "reserve_gpu":
            continue
        while rest and rest not in modules:
            rest = rest.rpartition(".")[0]
        found.add(rest or "__init__")
    return frozenset(found)


def tops(path: Path, *, types: bool = True, inner: bool = True) -> set[str]:
    """Return the packages that a file imports."""
    return {name.split(".")[0] for name in imports_of(path, types=types, inner=inner)}


def test_imports_go_downward() -> None:
    """A module imports from its own room and from lower ones, for its types as well."""
    for path in sources():
        room = room_of(name_of(path))
        for module in ours(path):
            other = room_of(module)
            assert other == room or FLOOR[other] > FLOOR[room], f"{name_of(path)} imports {module}"


def test_public_is_for_others() -> None:
    """No module of ours imports `public`, and `public` needs no feature, which can be cut off."""
    for path in sources():
        assert path == PUBLIC or "public" not in ours(path), path
    assert not [module for module in ours(PUBLIC) if module.startswith("features")]


def test_the_extension_uses_what_is_public() -> None:
    """The extension for JupyterLab imports of ours the package itself and `public`, and all of it.

    What nobody outside calls is not public.
    """
    used: dict[str, set[str]] = {"reserve_gpu": set(), "public": set()}
    for path in EXTENSION.glob("*.py"):
        names = {name for name in imports(tree_of(path)) if name.split(".")[0] == "reserve_gpu"}
        assert names <= {"reserve_gpu", "reserve_gpu.public"}, path
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                used.get(node.value.id, set()).add(node.attr)
    assert used["reserve_gpu"] <= set(reserve_gpu.__all__)
    functions = {node.name for node in tree_of(PUBLIC).body if isinstance(node, ast.FunctionDef)}
    assert used["public"] == functions


def test_words_are_made_at_the_faces() -> None:
    """Nothing of the work imports what puts it into words, late or for types."""
    asked = {"core.api", "core.between_cells", "core.looking", "core.caps"}
    for path in sources():
        if name_of(path).startswith("core.") and name_of(path) not in asked:
            assert not [module for module in ours(path) if module.startswith("report")]


def test_the_session_imports_nothing_in_functions() -> None:
    """What the session's thread runs imports all at its begin, where the waiting thread does it."""
    for path in sources():
        if name_of(path).split(".")[0] in WORK:
            for function in ast.walk(tree_of(path)):
                if isinstance(function, ast.FunctionDef):
                    inner = [each for each in ast.walk(function) if isinstance(each, IMPORTS)]
                    assert not inner, (path, function.name)


def test_late_names_are_what_types_take_them_for() -> None:
    """Each name that is imported late is the very module that the type checker sees there."""
    there = {name_of(path) for path in sources()}
    for path in sources():
        tree = tree_of(path)
        late: dict[str, str] = {}
        typed: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and is_for_types(node):
                late.update(pair for assign in node.orelse for pair in late_names(assign))
                for imported in node.body:
                    if isinstance(imported, ast.ImportFrom):
                        names = (alias.asname or alias.name for alias in imported.names)
                        modules = (f"{imported.module}.{alias.name}" for alias in imported.names)
                        typed.update(zip(names, modules, strict=True))
        assert len([*filter(None, map(imported_late, ast.walk(tree)))]) == len(late), path
        for name, module in late.items():
            assert module in there, f"{name_of(path)}: {name}"
            assert typed.get(name) == f"reserve_gpu.{module}", f"{name_of(path)}: {name}"


def late_names(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield what is imported late by one assignment: names and modules."""
    if not isinstance(node, ast.Assign):
        return
    target = node.targets[0]
    for name, value in zip(
        target.elts if isinstance(target, ast.Tuple) else [target],
        node.value.elts if isinstance(node.value, ast.Tuple) else [node.value],
        strict=True,
    ):
        if module := imported_late(value):
            yield ast.unparse(name), module


def test_no_circles() -> None:
    """Inside a room no module imports one that imports it, directly or by others."""
    left = {name_of(path): ours(path) for path in sources()}
    while left:
        free = {name for name, needed in left.items() if not needed & (left.keys() - {name})}
        assert free, f"these import each other: {sorted(left)}"
        left = {name: needed for name, needed in left.items() if name not in free}


def test_owners() -> None:
    """IPython, NVML's bindings and flock are each imported by their owners alone."""
    for path in sources():
        for top in tops(path, types=False):
            assert name_of(path) in OWNERS.get(top, {name_of(path)}), (
                f"{name_of(path)} imports {top}"
            )


def test_what_is_slow_is_imported_late() -> None:
    """What takes long to load, or is seldom needed, is imported inside of functions alone."""
    for path in sources():
        slow = tops(path, types=False, inner=False) & LATE
        assert not slow or name_of(path) in OF_JUPYTER, name_of(path)
        room = room_of(name_of(path))
        if room not in {*COMMANDS, "__main__", "cli"}:  # which are imported late themselves
            rooms = {room_of(name) for name in ours(path, types=False, inner=False)}
            assert not rooms & LATE_OURS - {room}, name_of(path)


def test_dependencies_are_declared() -> None:
    """Whatever is imported is the standard library's, ours, or has an owner and is declared."""
    for path in sources():
        for top in tops(path, types=False):
            assert top in sys.stdlib_module_names | OWNERS.keys() | {"reserve_gpu"}, (path, top)


def test_names_are_unique() -> None:
    """No two modules, and no two classes, have one name: whoever finds it has found the thing.

    The folder of a command is called by what people type for it.
    """
    modules = [path.stem for path in sources() if path.stem != "__init__"]
    rooms = {path.parent for path in sources() if path.stem == "__init__"}
    modules += [path.name for path in rooms if path.parent.name != "commands"]
    nodes = [node for path in sources() for node in ast.walk(tree_of(path))]
    classes = [node.name for node in nodes if isinstance(node, ast.ClassDef)]
    for names in (modules, classes):
        assert {name for name in names if names.count(name) > 1} <= NAMESAKES


def test_no_room_is_an_exported_name() -> None:
    """No room is called like something that the package exports: it would hide it."""
    assert not FLOOR.keys() & set(reserve_gpu.__all__)


def test_every_exported_name_is_there() -> None:
    """Each name in `__all__` can be had, and any other raises AttributeError."""
    assert all(getattr(reserve_gpu, name) for name in reserve_gpu.__all__)
    assert set(reserve_gpu.__all__) <= set(dir(reserve_gpu))
    assert not hasattr(reserve_gpu, "nonsense")


WATCH = """
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
import reserve_gpu, MODULES
places = tuple(path for path in sys.path if path)
is_module = lambda o: o.startswith(places) and o.endswith(('.py', '.pyc', '.so'))
print([o for o in opened if not is_module(o) and '__pycache__' not in o])
print(threading.active_count(), os.environ == environ)
print(*{name.split('.')[0] for name in set(sys.modules) - before})
"""


@pytest.mark.promise
@pytest.mark.process
def test_nothing_happens_at_import(machine: Machine) -> None:
    """Importing all that can be imported here opens no file but modules, and starts nothing."""
    programs = {
        "__main__",
        "__init__",
        "dask",
        "commands.check.probes",
        "commands.check.frameworks",
    }
    programs |= {"commands.hosts.provisioner", *OF_JUPYTER}
    names = [f"reserve_gpu.{name_of(path)}" for path in sources() if name_of(path) not in programs]
    done = machine.python(WATCH.replace("MODULES", ", ".join(names)))
    assert done.stderr == ""
    opened, state, modules = done.stdout.splitlines()
    assert opened == "[]"
    assert state == "1 True"
    assert not set(modules.split()) & {"pynvml", "IPython", "asyncio"}
    assert machine.calls() == []
    assert not machine.locks.exists()


FIRST = """
import sys, pynvml
before = set(sys.modules)
import reserve_gpu
reserve_gpu.reserve()
print(*set(sys.modules) - before)
"""
# What only a refusal, a wait, a hint, `reserve-gpu run` or somebody else's record needs.
NOT_AT_FIRST = {"shlex", "queue", "importlib", "subprocess"}
NOT_AT_FIRST |= {
    f"reserve_gpu.report.{module}" for module in ("pictures", "status", "progress", "rules")
}
NOT_AT_FIRST |= {
    f"reserve_gpu.core.{module}" for module in ("caps", "handover", "lease", "quota", "wait")
}
NOT_AT_FIRST |= {"reserve_gpu.machine", "reserve_gpu.rules", "tomllib", "reserve_gpu.notices"}
NOT_AT_FIRST |= {"reserve_gpu.core.feature"}


@pytest.mark.promise
@pytest.mark.process
def test_a_reservation_loads_what_it_needs(machine: Machine) -> None:
    """Who gets a GPU at once does not wait for modules that others need: scripts start soon."""
    done = machine.python(FIRST)
    assert done.stderr == ""
    modules = set(done.stdout.split())
    assert "reserve_gpu.core.attempt" in modules
    assert not modules & NOT_AT_FIRST


COMPILED = """
import sys, pynvml
compiled = []
def heard(event, about):
    # Modules have their file's name here; a tuple's `__new__` is made of a text in any case.
    if event == "compile" and about[1] == "<string>" and not about[0].startswith(b"lambda _cls"):
        compiled.append(about[0])
sys.addaudithook(heard)
import reserve_gpu
reserve_gpu.reserve()
print(compiled)
"""


@pytest.mark.process
def test_a_reservation_compiles_nothing(machine: Machine) -> None:
    """No annotation of a value is a text, which Python would compile each time it is loaded.

    The first compilation alone takes a millisecond.
    """
    done = machine.python(COMPILED)
    assert (done.stderr, done.stdout) == ("", "[]\n")


def test_other_systems_can_import() -> None:
    """Where there is no fcntl, as on Windows, the package can be imported."""
    code = "import sys; sys.modules['fcntl'] = None; import reserve_gpu; print(reserve_gpu.reserve)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, check=False
    )
    assert "function reserve" in done.stdout, done.stderr
