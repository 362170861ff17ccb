"""Which module may import what, and that nothing happens at import."""

from __future__ import annotations

import ast
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.machine import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.machine import Machine

PACKAGE = ROOT / "reserve_gpu"

# Imports go downward only: never within a line, never up.
LAYERS = [
    {"__main__"},
    {"__init__"},
    {"magic", "cli", "installer", "dask"},
    {"kernelspec"},
    {"launch", "commands"},
    {"live", "completion", "frameworks"},
    {"options", "overview", "reservation"},
    {"attempt"},
    {"waiting", "failure"},
    {"claim", "fence", "holding", "table", "checklist"},
    {"terminal", "markup"},
    {"layout", "explanation"},
    {"handover", "line", "refusal", "awaited"},
    {"nvml", "locks", "cuda", "verdict", "who"},
    {"links", "mig"},
    {"bindings", "holders", "changes", "config_file"},
    {"descriptors", "witness", "processes"},
    {"caller", "children", "files", "probes"},
    {"myself", "possible"},
    {"settings"},
    {"choosing", "autoload"},
    {"names", "quantities"},
    {"text"},
    {"device", "errors", "loading"},
]
LEVEL = {module: level for level, modules in enumerate(LAYERS) for module in modules}

# Who alone may import what is slow to load, or not there on every system.
OWNERS = {
    "IPython": {"magic", "commands", "live", "completion"},
    "traitlets": {"magic", "commands"},
    "pynvml": {"bindings"},
    "fcntl": {"locks"},
    "psutil": {"processes"},
    "ctypes": {"cuda", "bindings", "changes", "probes"},
    "rich": {"terminal", "live"},
    "argcomplete": {"cli"},
    "ipykernel": {"kernelspec"},
    "jupyter_client": {"kernelspec"},
    "jupyter_core": {"kernelspec"},
}
# These for the names of types alone.
ONLY_FOR_TYPES = {("__init__", "IPython"), ("table", "rich")}


def sources() -> list[Path]:
    return sorted(PACKAGE.glob("*.py"))


def importable() -> list[Any]:
    """The sources, those marked that need an extra even to be imported."""
    needs = {"dask": pytest.mark.needs("engines")}
    return [
        pytest.param(path, marks=needs[path.stem]) if path.stem in needs else path
        for path in sources()
    ]


def is_for_types(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
    )


def imports(tree: ast.AST, *, types: bool) -> Iterator[str]:
    """What a module imports, anywhere in it and in full; types: also for its annotations."""
    for node in ast.iter_child_nodes(tree):
        if is_for_types(node) and not types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        else:
            yield from imports(node, types=types)


def ours(module: str) -> str | None:
    """The name of our module that `reserve_gpu.NAME...` means, None for others' modules."""
    first, *rest = module.split(".")
    if first != "reserve_gpu":
        return None
    return rest[0] if rest and (PACKAGE / f"{rest[0]}.py").exists() else "__init__"


@pytest.mark.parametrize("path", sources(), ids=lambda path: path.stem)
def test_imports_go_downward(path: Path) -> None:
    """A module imports only lower ones, for its types as well, so there is no cycle."""
    assert path.stem in LEVEL, "give the new module its layer here and in the design"
    tree = ast.parse(path.read_text())
    for module in {ours(name) for name in imports(tree, types=True)} - {None}:
        assert module is not None
        assert LEVEL[module] > LEVEL[path.stem], f"{path.stem} imports {module}"


@pytest.mark.parametrize("path", sources(), ids=lambda path: path.stem)
def test_owners(path: Path) -> None:
    """IPython, NVML's bindings, flock, psutil and rich are each imported by one module alone."""
    tree = ast.parse(path.read_text())
    for name in imports(tree, types=False):
        top = name.split(".")[0]
        assert path.stem in OWNERS.get(top, {path.stem}), f"{path.stem} imports {top}"
    for name in imports(tree, types=True):
        top = name.split(".")[0]
        allowed = OWNERS.get(top, {path.stem}) | {m for m, t in ONLY_FOR_TYPES if t == top}
        assert path.stem in allowed, f"{path.stem} imports {top} for its types"


@pytest.mark.parametrize("path", sources(), ids=lambda path: path.stem)
def test_dependencies_are_declared(path: Path) -> None:
    """Whatever is imported is the standard library's, ours, or a declared dependency's."""
    for name in imports(ast.parse(path.read_text()), types=False):
        top = name.split(".")[0]
        known = {"reserve_gpu", "IPython", "traitlets", "pynvml", "psutil", "rich"}
        # no dependencies: imported if they are there
        known |= {"argcomplete", "ipykernel", "jupyter_client", "jupyter_core"}
        if path.stem == "dask":  # who has no Dask has no use for it
            known |= {"click", "distributed"}
        assert top in sys.stdlib_module_names | known, top


@pytest.mark.parametrize("path", sources(), ids=lambda path: path.stem)
def test_module_is_no_exported_name(path: Path) -> None:
    """No module is called like something that the package exports."""
    import reserve_gpu

    assert path.stem not in reserve_gpu.__all__


WATCH = """
import os, sys, threading
opened = []
def watch(event, arguments):
    if event == 'open' and isinstance(arguments[0], str):
        opened.append(arguments[0])
    elif event in ('os.mkdir', 'os.fork', 'subprocess.Popen', 'os.putenv', 'ctypes.dlopen'):
        opened.append(f'{event} {arguments}')
%s
before, environ = set(sys.modules), dict(os.environ)
sys.addaudithook(watch)
import reserve_gpu%s
places = tuple(path for path in sys.path if path)
print([o for o in opened if not o.startswith(places) or not o.endswith(('.py', '.pyc', '.so'))
       and '__pycache__' not in o])
print(threading.active_count(), os.environ == environ)
print(*{name.split('.')[0] for name in set(sys.modules) - before})
"""


@pytest.mark.parametrize("path", importable(), ids=lambda path: path.stem)
def test_nothing_happens_at_import(machine: Machine, path: Path) -> None:
    """Importing a module opens no file but modules, starts nothing and loads no library."""
    if path.stem in ("__main__", "probes"):
        pytest.skip("it is a program")
    name = "" if path.stem == "__init__" else f".{path.stem}"
    before = {
        "magic": "import IPython.core.magic, IPython.core.magic_arguments",
        "commands": "import IPython.core.magic",
        "live": "import IPython.core.magic, IPython.core.magic_arguments",
        "dask": "import click, distributed",
    }
    done = machine.python(WATCH % (before.get(path.stem, ""), name))
    assert done.stderr == ""
    opened, state, modules = done.stdout.splitlines()
    assert opened == "[]"
    assert state == "1 True"
    loaded = set(modules.split())
    assert "reserve_gpu" in loaded
    assert not loaded & {"pynvml", "psutil", "rich", "ctypes", "IPython", "asyncio", "subprocess"}
    assert machine.calls() == []
    assert not machine.locks.exists()


def test_package_imports_no_module_of_its_own(machine: Machine) -> None:
    """`import reserve_gpu` alone loads none of its modules; its names are found when asked for."""
    done = machine.python(
        "import sys, reserve_gpu\n"
        "print([m for m in sys.modules if m.startswith('reserve_gpu.')])\n"
        "print(all(getattr(reserve_gpu, name) for name in reserve_gpu.__all__))\n"
        "print(hasattr(reserve_gpu, 'nonsense'), set(reserve_gpu.__all__) <= set(dir(reserve_gpu)))"
    )
    assert done.stdout.splitlines() == ["[]", "True", "False True"], done.stderr


@pytest.mark.parametrize("before", ["gc.enable()", "gc.disable()", "gc.freeze()"])
def test_garbage_collector_stays_as_it_was(machine: Machine, before: str) -> None:
    """Loading what a reservation needs leaves the garbage collector on, off or frozen."""
    machine.write("gpu")
    done = machine.python(
        f"import gc; {before}; was = gc.isenabled(), gc.get_freeze_count() > 1000\n"
        "import reserve_gpu; reserve_gpu.reserve(); reserve_gpu.status()\n"
        "print(was == (gc.isenabled(), gc.get_freeze_count() > 1000), was)"
    )
    is_on, is_frozen = before != "gc.disable()", before == "gc.freeze()"
    assert done.stdout == f"True {(is_on, is_frozen)}\n", done.stderr
