"""`kernel install --slurm`: what it writes and refuses, for which a stand-in of srun is enough."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.commandline import CommandLine
    from tests.support.here import Here

from tests.support.slurm_spec import folder, install, words

pytest.importorskip("ipykernel.kernelspec")

FIRST = ["--ntasks=1", "--nodes=1", "--job-name=jupyter"]


def test_the_spec(here: Here, typed: CommandLine, srun: str) -> None:
    """It is the stock kernel, with our provisioner, interrupted by messages, and unencrypted."""
    from ipykernel.kernelspec import get_kernel_dict

    spec, stock = install(here, typed), get_kernel_dict()
    assert words(spec) == ([], [srun, *FIRST, "--gres=gpu:1"])
    assert spec["display_name"] == "Python 3 (GPU, Slurm)"
    assert spec["interrupt_mode"] == "message"
    assert spec["language"] == stock["language"]
    metadata = spec["metadata"]
    assert metadata.pop("kernel_provisioner") == {"provisioner_name": "reserve-gpu-slurm"}
    assert metadata.pop("reserve_gpu")
    stock = {**stock.get("metadata", {})}
    stock.pop("supported_encryption", None)
    assert metadata == stock
    logos = {path.suffix for path in folder(here).iterdir()}
    assert logos >= {".png", ".json"}


@pytest.mark.parametrize(
    ("options", "inside", "line"),
    [
        ("-n 3", ["--count=3"], ["--gres=gpu:3"]),
        ("--gpu-name a100", [], ["--gres=gpu:a100:1"]),
        ("--gpu-name a100 -n 2", ["--count=2"], ["--gres=gpu:a100:2"]),
        ("--note thesis", ["--note=thesis"], ["--gres=gpu:1", "--comment=thesis"]),
        ("--memory 2GiB", ["--memory=2GiB"], ["--gres=gpu:1"]),
        ("-- -p gpu --mem=8G", [], ["--gres=gpu:1", "-p", "gpu", "--mem=8G"]),
        ("-n 2 -- --gres=gpu:2", ["--count=2"], ["--gres=gpu:2", "--gres=gpu:2"]),
        ("--for 8h", [], ["--gres=gpu:1", "--time=480"]),
        ("--for 90s", [], ["--gres=gpu:1", "--time=2"]),
        (
            "--for 1h --note x -- -A lab",
            ["--note=x"],
            ["--gres=gpu:1", "--time=60", "--comment=x", "-A", "lab"],
        ),
        ("--idle 2h", ["--idle=2h", "--end-kernel"], ["--gres=gpu:1"]),
    ],
)
def test_what_is_asked_for(
    here: Here, typed: CommandLine, srun: str, options: str, inside: list[str], line: list[str]
) -> None:
    """What Slurm can keep stands among srun's options, the rest among the kernel's in the job."""
    assert words(install(here, typed, *options.split())) == (inside, [srun, *FIRST, *line])


def test_a_note_is_one_word(here: Here, typed: CommandLine, srun: str) -> None:
    """A note of several words is one option of srun's."""
    _, line = words(install(here, typed, "--note", "don't touch; $HOME"))
    assert line[-1] == "--comment=don't touch; $HOME"


def test_names(here: Here, typed: CommandLine, srun: str) -> None:
    """What is asked for stands in what notebooks show; a name and such a text can be given."""
    spec = install(here, typed, "-n", "2", "--gpu-name", "a100")
    assert spec["display_name"] == "Python 3 (GPU, Slurm: count 2, name a100)"
    names = ("--name", "big", "--display-name", "Big")
    done = typed("kernel", "install", "--slurm", "--prefix", ".", *names, "--", "-p", "big")
    assert f"Installed the kernel 'Big' as big, in {folder(here, 'big')}\n" == done.stdout


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("--slurm --hosts lab", "Give --slurm or --hosts, not both: Slurm chooses the machine."),
        ("-- -p gpu", "Only --slurm takes options for srun after --. Add --slurm."),
        ("--slurm --wait 1h", "up to 45 s"),
        ("--slurm nonsense", "is not a GPU name"),
        ("--slurm --memory much", "not a valid size"),
        ("--slurm --for soon", "not a valid duration"),
    ],
)
def test_what_is_refused(here: Here, typed: CommandLine, srun: str, line: str, text: str) -> None:
    """A line that makes no sense is refused in one line, before anything is written."""
    options, sign, given = line.partition("-- ")
    done = typed("kernel", "install", "--prefix", ".", *f"{options}{sign}{given}".split())
    assert (done.code, done.stdout) == (2, "")
    assert text in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (here.folder / "share").exists()


def test_without_slurm(here: Here, typed: CommandLine) -> None:
    """Where no srun is in PATH one line says so, and nothing is written."""
    os.environ["PATH"] = str(here.folder / "none")
    done = typed("kernel", "install", "--slurm", "--prefix", ".")
    assert (done.code, done.stdout) == (2, "")
    assert done.stderr.removesuffix("\n") == (
        "srun was not found on PATH. Install the kernel on a machine where you use srun."
    )
    assert not (here.folder / "share").exists()


def test_another_s_kernel_is_left_alone(here: Here, typed: CommandLine, srun: str) -> None:
    """A kernel of the same name that is not ours is not replaced."""
    folder(here).mkdir(parents=True)
    (folder(here) / "kernel.json").write_text("{}")
    assert typed("kernel", "install", "--slurm", "--prefix", ".").code == 2
    assert (folder(here) / "kernel.json").read_text() == "{}"


@pytest.mark.parametrize("content", [None, "{", ""])
def test_a_connection_file_that_tells_nothing(
    here: Here, typed: CommandLine, content: str | None
) -> None:
    """Where no client has written a connection file, one line says so."""
    if content is not None:
        (here.folder / "file.json").write_text(content)
    done = typed("kernel", "slurm", "-f", "file.json", "--", "srun")
    assert (done.code, done.stdout) == (2, "")
    assert done.stderr.startswith("The connection file can't be read: ")
    assert done.stderr.count("\n") == 1


def test_no_command_for_a_job(typed: CommandLine) -> None:
    """Without the command that starts a job one line says how to get one."""
    done = typed("kernel", "slurm", "-f", "file.json")
    assert (done.code, done.stdout) == (2, "")
    line = "reserve-gpu kernel install --slurm"
    assert done.stderr == f"The srun command after -- is missing. Reinstall the kernel: {line}\n"
