"""The registry of commands."""

from __future__ import annotations

import pytest

from reserve_gpu.commands import registry
from reserve_gpu.commands.registry import COMMANDS


@pytest.mark.parametrize("name", COMMANDS)
def test_each_module_has_the_functions_of_a_command(name: str) -> None:
    if COMMANDS[name].module.startswith("slurm."):
        pytest.importorskip("ipykernel.kernelspec")
    module = registry.load(name)
    assert callable(module.add_arguments)
    assert callable(module.run)
