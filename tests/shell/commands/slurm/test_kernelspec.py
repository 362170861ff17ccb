"""`kernel install --slurm`, with a stand-in for srun."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest

from reserve_gpu.system import spawn

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.commandline import CommandLine
    from tests.support.here import Here

pytest.importorskip("ipykernel.kernelspec")


def kernel_folder(here: Here, name: str = "python3-gpu-slurm") -> Path:
    """Return the folder of an installed kernel."""
    return here.folder / "share" / "jupyter" / "kernels" / name


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
        ("--gpu-name a100", [], ["--gres=gpu:a100:1"]),
        ("--gpu-name a100 -n 2", ["--count=2"], ["--gres=gpu:a100:2"]),
        ("--memory 2GiB", ["--memory=2GiB"], ["--gres=gpu:1"]),
        ("-- -p gpu --mem=8G", [], ["--gres=gpu:1", "-p", "gpu", "--mem=8G"]),
        ("-n 2 -- --gres=gpu:2", ["--count=2"], ["--gres=gpu:2", "--gres=gpu:2"]),
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


def test_note_is_one_word(here: Here, typed: CommandLine, srun: str) -> None:
    _, line = split_argv(install_kernel(here, typed, "--note", "don't touch; $HOME"))
    assert line[-1] == "--comment=don't touch; $HOME"


def test_names(here: Here, typed: CommandLine, srun: str) -> None:
    """The display name contains the request, unless the user gives a name."""
    spec = install_kernel(here, typed, "-n", "2", "--gpu-name", "a100")
    assert spec["display_name"] == "Python 3 (GPU, Slurm: count 2, name a100)"
    names = ("--name", "big", "--display-name", "Big")
    done = typed("kernel", "install", "--slurm", "--prefix", ".", *names, "--", "-p", "big")
    assert str(kernel_folder(here, "big")) in done.stdout
    assert (
        json.loads((kernel_folder(here, "big") / "kernel.json").read_text())["display_name"]
        == "Big"
    )


@pytest.mark.parametrize(
    "options", ["--slurm --hosts lab", "-- -p gpu", "--slurm --wait 1h", "--slurm --memory much"]
)
def test_invalid_request_writes_nothing(
    here: Here, typed: CommandLine, srun: str, options: str
) -> None:
    done = typed("kernel", "install", "--prefix", ".", *options.split())
    assert (done.code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "srun was not found" not in done.stderr
    assert not (here.folder / "share").exists()


def test_missing_srun_is_an_error(here: Here, typed: CommandLine) -> None:
    os.environ["PATH"] = str(here.folder / "none")
    done = typed("kernel", "install", "--slurm", "--prefix", ".")
    assert (done.code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "srun" in done.stderr
    assert not (here.folder / "share").exists()


def test_other_kernel_with_the_same_name_stays(here: Here, typed: CommandLine, srun: str) -> None:
    kernel_folder(here).mkdir(parents=True)
    (kernel_folder(here) / "kernel.json").write_text("{}")
    assert typed("kernel", "install", "--slurm", "--prefix", ".").code == 2
    assert (kernel_folder(here) / "kernel.json").read_text() == "{}"


@pytest.mark.parametrize("content", [None, "{", ""])
def test_unreadable_connection_file(here: Here, typed: CommandLine, content: str | None) -> None:
    if content is not None:
        (here.folder / "file.json").write_text(content)
    done = typed("kernel", "slurm", "-f", "file.json", "--", "srun")
    assert (done.code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "connection file" in done.stderr
