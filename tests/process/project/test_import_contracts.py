"""Each contract of import-linter in pyproject.toml forbids an import."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.machine import ROOT

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.full, pytest.mark.needs("lint")]

LINT = "from importlinter.cli import lint_imports_command as lint; lint()"
# For each contract, a file and an import that it forbids there.
PLANTS = {
    "Modules import only from lower layers": "locks/lock.py reserve_gpu.render.tables",
    "No import cycles": "model/clocks.py reserve_gpu.model.holders",
    "Features are independent": "features/job/no_gpu.py reserve_gpu.features.lease.schedule",
    "Commands are independent": "commands/top/live.py reserve_gpu.commands.status.status",
    "The core imports no feature and no command": (
        "request_options.py reserve_gpu.features.lease.schedule"
    ),
    "Only bindings imports pynvml": "gpus/nvml.py pynvml",
    "Only file_control imports fcntl": "locks/lock.py fcntl",
    "Only ipython_shell and the IPython frontend import IPython": (
        "render/progress.py IPython.display"
    ),
    "The JupyterLab extension imports only the public modules": (
        "../jupyterlab_reserve_gpu/look.py reserve_gpu.model.devices"
    ),
}


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Return a folder with a copy of both packages and their contracts."""
    for package in (ROOT / "reserve_gpu", ROOT / "labextension" / "jupyterlab_reserve_gpu"):
        skipped = shutil.ignore_patterns("__pycache__", "labextension")
        shutil.copytree(package, tmp_path / package.name, ignore=skipped)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def contracts(folder: Path, state: str) -> set[str]:
    """Return the names of the contracts in a state: KEPT or BROKEN."""
    command = [sys.executable, "-c", LINT, "--no-cache"]
    environ = {**os.environ, "PYTHONPATH": str(folder), "COLUMNS": "200"}
    done = subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, check=False
    )
    names = {*re.findall(rf"^(.+) {state}\b", done.stdout, re.MULTILINE)}
    assert (done.returncode == 0) == (" BROKEN" not in done.stdout), done.stdout + done.stderr
    return names


def test_all_contracts_are_kept(copy: Path) -> None:
    """Every contract is kept, and PLANTS has an import for each."""
    assert contracts(copy, "KEPT") == PLANTS.keys()


@pytest.mark.parametrize("contract", PLANTS)
def test_forbidden_import_breaks_its_contract(copy: Path, contract: str) -> None:
    """lint-imports fails and names the contract."""
    file, module = PLANTS[contract].split()
    with (copy / "reserve_gpu" / file).open("a") as source:
        source.write(f"\nimport {module}\n")
    assert contract in contracts(copy, "BROKEN")
