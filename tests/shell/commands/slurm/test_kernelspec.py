"""`kernel install --slurm`, with a stand-in for srun."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from reserve_gpu.system import spawn

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.commandline import CommandLine
    from tests.support.here import Here

pytest.importorskip("ipykernel.kernelspec")


def kernel_folder(here: Here) -> Path:
    """Return the folder of the installed kernel."""
    return here.folder / "share" / "jupyter" / "kernels" / "python3-gpu-slurm"


def install_kernel(here: Here, typed: CommandLine, *options: str) -> dict[str, Any]:
    """Install the kernel in the machine's folder, and return the content of its kernel.json."""
    done = typed("kernel", "install", "--slurm", "--prefix", ".", *options)
    assert (done.code, done.stderr) == (0, "")
    spec: dict[str, Any] = json.loads((kernel_folder(here) / "kernel.json").read_text())
    return spec


def split_argv(spec: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return the options of the kernel in the job, and the srun command."""
    argv = spec["argv"]
    start = spawn.python("-m", "reserve_gpu", "kernel", "slurm", "-f", "{connection_file}")
    assert argv[: len(start)] == start
    at = argv.index("--")
    return argv[len(start) : at], argv[at + 1 :]


def test_kernelspec(here: Here, typed: CommandLine, srun: str) -> None:
    """The kernel is ipykernel's, with the provisioner, without encryption, and with logos."""
    from ipykernel.kernelspec import get_kernel_dict

    spec, stock = install_kernel(here, typed), get_kernel_dict()
    assert (spec["display_name"], spec["interrupt_mode"]) == ("Python 3 (GPU, Slurm)", "message")
    assert spec["language"] == stock["language"]
    metadata = spec["metadata"]
    assert metadata.pop("kernel_provisioner") == {"provisioner_name": "reserve-gpu-slurm"}
    assert metadata.pop("reserve_gpu")
    stock = {**stock.get("metadata", {})}
    stock.pop("supported_encryption", None)
    assert metadata == stock
    assert {path.suffix for path in kernel_folder(here).iterdir()} >= {".png", ".json"}


@pytest.mark.parametrize(
    ("options", "inside", "line"),
    [
        ("", [], ["--gres=gpu:1"]),
        ("--gpu-name a100 -n 2", ["--count=2"], ["--gres=gpu:a100:2"]),
        ("--for 90s", [], ["--gres=gpu:1", "--time=2"]),
        (
            "--for 1h --note x -- -A lab",
            ["--note=x"],
            ["--gres=gpu:1", "--time=60", "--comment=x", "-A", "lab"],
        ),
        ("--idle 2h", ["--idle=2h", "--end-kernel"], ["--gres=gpu:1"]),
    ],
)
def test_options_are_split_between_srun_and_the_kernel(
    here: Here, typed: CommandLine, srun: str, options: str, inside: list[str], line: list[str]
) -> None:
    command = [srun, "--ntasks=1", "--nodes=1", "--job-name=jupyter", *line]
    assert split_argv(install_kernel(here, typed, *options.split())) == (inside, command)
