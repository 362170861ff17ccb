"""%reserve_gpu in IPython shells in the test process."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

import pytest

from tests.support.locked import held
from tests.support.magic import FOUR_GPUS, run_cell
from tests.support.reserving import variables

if TYPE_CHECKING:
    from tests.support.here import Here


def visible() -> str | None:
    """Return the visible devices of this process."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


# -- reserving -------------------------------------------------------------------------------------


@pytest.mark.ipython
def test_load_ext_adds_the_magic(here: Here) -> None:
    """After %load_ext, %reserve_gpu prints the GPU and the variables."""
    shell = here.shell()
    shell.run("%unload_ext reserve_gpu")
    cell = run_cell(shell, "%load_ext reserve_gpu\n%reserve_gpu")
    assert (cell.stderr, cell.error) == ("", None)
    assert "GPU0" in cell.stdout
    for name, value in variables().items():
        assert f"{name} = {value!r}" in cell.stdout
    assert visible() == "0"


def test_replaced_gpus_are_named(here: Here) -> None:
    """A request that replaces GPUs names the released ones first."""
    here.write(FOUR_GPUS)
    shell = here.shell()
    for line, released in (
        ("0 2", []),
        ("1 2", ["GPU0"]),
        ("0 3", ["GPU1", "GPU2"]),
    ):
        first, *rest = shell.run(f"%reserve_gpu {line}").stdout.splitlines()
        named = re.findall("GPU[0-9]", first) if first.startswith("Released") else []
        assert named == released, line
        assert not any(text.startswith("Released") for text in rest), line


@pytest.mark.ipython
def test_failed_request_hides_every_gpu(here: Here) -> None:
    """After a failure, no GPU is visible until a request succeeds or --release undoes it."""
    before = {"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_MEMORY": "7"}
    os.environ.update(before)
    here.write("gpu\n  compute 4321000 3500\n")
    shell = here.shell()
    for _ in range(2):  # the second failure does not treat the empty value as the user's limit
        assert shell.run("%reserve_gpu").error == "NoFreeDeviceError"
        assert variables() == {"CUDA_VISIBLE_DEVICES": ""}
    shell.run("%reserve_gpu --release")
    assert variables() == before
    shell.run("%reserve_gpu")
    here.write("gpu\n  memory 4038\n")
    assert shell.run("%reserve_gpu").error is None
    assert variables() == {
        "CUDA_VISIBLE_DEVICES": "0",
        "CUDA_DEVICE_MEMORY": "4038",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }
    shell.run("%reserve_gpu --release")
    assert variables() == before


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("import os; os.environ['CUDA_VISIBLE_DEVICES'] = '0'", "VISIBLE_DEVICES was set to '0'"),
        ("%env CUDA_DEVICE_ORDER=FASTEST_FIRST", "DEVICE_ORDER was set to 'FASTEST_FIRST'"),
    ],
)
def test_changed_variable_is_reported_once(here: Here, line: str, words: str) -> None:
    """A changed variable is reported at the end of the cell; %reserve_gpu sets it again."""
    shell = here.shell()
    shell.run("%reserve_gpu 1")
    before = variables()
    assert words in shell.run(line).all
    assert words not in shell.run("1").all
    assert words in shell.run("%reserve_gpu").all
    assert variables() == before
    assert words in shell.run(line).all


def test_deleted_lock_file_is_locked_again(here: Here) -> None:
    """At the end of a cell in which a lock file was deleted, it is locked again with a warning."""
    shell = here.shell()
    shell.run("%reserve_gpu 1")
    lock = here.locks / f"{here.uuid('1')}.lock"
    assert run_cell(shell, "1").stderr == ""
    lock.unlink()
    cell = run_cell(shell, "print('worked')")
    assert (cell.stdout, cell.error) == ("worked\n", None)
    (warning,) = cell.stderr.splitlines()
    assert f"GPU1 ({lock})" in warning
    assert held(here) == [1]
    assert run_cell(shell, "1").stderr == ""


# -- arguments -------------------------------------------------------------------------------------


def test_names_of_devices(here: Here) -> None:
    """Spaces, commas and quotes separate names; the order of the names is kept."""
    here.write(FOUR_GPUS)
    shell = here.shell()
    for name, numbers, memory in (
        ("3 1", "3,1", "32768,8192"),
        ("1, 3", "1,3", "8192,32768"),
        ("'3, 2'", "3,2", "32768,16384"),
        ("1  # a comment", "1", "8192"),
    ):
        cell = run_cell(shell, f"%reserve_gpu {name}")
        assert cell.error is None, (name, cell.stderr)
        assert (visible(), os.environ["CUDA_DEVICE_MEMORY"]) == (numbers, memory), name


def test_mistake_keeps_the_reservation(here: Here) -> None:
    shell = here.shell()
    good = shell.run("%reserve_gpu 1")
    before = variables()
    for words in ("'x", "--release 0", "\x1b[31mred", "x" * 3000):
        cell = shell.run(f"%reserve_gpu {words}")
        assert (cell.error, cell.stdout) == ("UsageError", "")
        assert "\x1b" not in cell.stderr
        assert len(cell.stderr) < 400
        assert (variables(), held(here)) == (before, [1])
    assert shell.run("%reserve_gpu").stdout == good.stdout


def test_help(here: Here) -> None:
    """The help fits within 80 columns."""
    os.environ["COLUMNS"] = "80"
    shell = here.shell()
    page = shell.run("%reserve_gpu --help").stdout.rstrip("\n")
    assert page in shell.run("%reserve_gpu?").stdout.partition("Docstring:\n")[2]
    assert max(map(len, page.splitlines())) <= 80
    assert held(here) == []


# -- settings --------------------------------------------------------------------------------------


@pytest.mark.ipython
def test_config_magic(here: Here) -> None:
    """`%config ReserveGPU` shows both settings, and changes them for the next reservation."""
    here.write("gpu\n memory 4096\n used 700")
    other, shell = here.folder / "other", here.shell()
    shown = shell.run("%config ReserveGPU").stdout
    assert "ReserveGPU.idle_memory" in shown
    assert str(here.locks) in shown
    assert shell.run("%reserve_gpu").error == "NoFreeDeviceError"
    shell.run("%config ReserveGPU.idle_memory = '800MiB'")
    shell.run(f"%config ReserveGPU.lock_directory = {str(other)!r}")
    assert shell.run("%reserve_gpu").error is None
    assert visible() == "0"
    assert [path.name for path in other.glob("GPU-*")]
    shell.run("%reserve_gpu --release\n%config ReserveGPU.idle_memory = ''")
    assert shell.run("%reserve_gpu").error == "NoFreeDeviceError"


def test_environment_overrides_the_configuration(here: Here) -> None:
    """A variable that is set when the extension is loaded overrides the configuration file."""
    shell = here.shell()
    shell.shell.config.ReserveGPU.idle_memory = "1MiB"
    shell.shell.config.ReserveGPU.lock_directory = str(here.folder / "other")
    os.environ["RESERVE_GPU_IDLE_MEMORY"] = "900MiB"
    shell.run("%reload_ext reserve_gpu\n%reserve_gpu")
    assert os.environ["RESERVE_GPU_IDLE_MEMORY"] == "900MiB"
    assert held(here) == [0]
    assert not (here.folder / "other").exists()


# -- loading and unloading -------------------------------------------------------------------------


@pytest.mark.ipython
def test_unloading_keeps_the_reservation(here: Here) -> None:
    """Unloading removes the magic and the settings, and reloading adds both again."""
    shell = here.shell()
    reserved = shell.run("%reserve_gpu 1")
    assert shell.run("%reload_ext reserve_gpu\n%reserve_gpu").stdout == reserved.stdout
    before = variables()
    shell.run("%unload_ext reserve_gpu")
    cell = shell.run("import reserve_gpu\n%reserve_gpu")
    assert cell.error == "UsageError"
    assert "not found" in cell.stderr
    assert shell.run("%config ReserveGPU").error == "UsageError"
    assert (variables(), held(here)) == (before, [1])
    shell.run("%load_ext reserve_gpu")
    assert shell.run("%reserve_gpu").stdout == reserved.stdout
    assert shell.run("%config ReserveGPU.idle_memory").error is None
