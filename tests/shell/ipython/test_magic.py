"""%reserve_gpu in IPython shells in the test process."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

import pytest

from reserve_gpu.ipython.parser import magic_parser
from tests.support.locked import held
from tests.support.magic import FOUR_GPUS, MISTAKES, run_cell
from tests.support.reserving import of_gpu, variables

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


def test_shell_without_the_attributes_of_ipykernel(here: Here) -> None:
    """The magic works in a kernel whose shell lacks `get_parent`, such as xeus-python."""
    shell = here.shell(is_notebook=True)
    del shell.shell.get_parent
    assert shell.run("%reserve_gpu").error is None
    assert visible() == "0"
    assert shell.run("%reserve_gpu --status").error is None
    with here.rival("1"):
        assert "NoFreeDeviceError" in str(shell.run("%reserve_gpu 1").error)


def test_unknown_properties_are_left_out(here: Here) -> None:
    """An unknown link width leaves no gap in the line, and unknown memory sets no variable."""
    here.write("gpu\n name X\n width none\ngpu\n name Y\n")
    here.add("fail nvmlDeviceGetMemoryInfo 0 4\nfail nvmlDeviceGetMemoryInfo_v2 0 4")
    os.environ["CUDA_DEVICE_MEMORY"] = "1"
    first, second, *rest = run_cell(here.shell(), "%reserve_gpu 0,1").stdout.splitlines()
    assert "0000:01:00.0 X (" in first
    assert "0000:02:00.0 16x Y (" in second
    assert [line.partition(" ")[0] for line in rest] == [
        "CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES",
    ]  # fmt: skip
    assert "CUDA_DEVICE_MEMORY" not in os.environ


def test_busy_gpu_is_reserved_with_a_warning(here: Here) -> None:
    """A named busy GPU is reserved, and one line names its process."""
    here.use("busy")
    cell = run_cell(here.shell(), "%reserve_gpu 0")
    assert (cell.error, visible()) == (None, "0")
    (warning,) = cell.stderr.splitlines()
    assert "busy" in warning
    assert "4321000" in warning


def test_no_free_gpu(here: Here) -> None:
    """Without a free GPU, the cell fails without a traceback, and shows the reason for each GPU."""
    here.use("busy")
    cell = here.shell().run("%reserve_gpu\nprint('continued')")
    assert (cell.error, cell.stdout, len(cell.traceback)) == ("NoFreeDeviceError", "", 1)
    assert [of_gpu(cell.shown, number).partition(":")[0] for number in "01"] == ["busy", "busy"]
    assert "4321000" in of_gpu(cell.shown)
    assert not any(sign in cell.all for sign in ("Traceback", "File ", "---->", "Error:", "\x1b"))


def test_holder_of_a_failing_gpu_is_warned(here: Here) -> None:
    """Each %reserve_gpu warns while the GPU fails; after a release, another GPU is reserved."""
    shell = here.shell()
    first = shell.run("%reserve_gpu")
    scenario = here.scenario.read_text()
    here.add("fail nvmlDeviceGetHandleByIndex_v2 0 999")
    for _ in range(2):
        again = shell.run("%reserve_gpu")
        assert again.stdout == first.stdout
        assert "GPU0" in again.stderr
        assert "nvmlDeviceGetHandleByIndex" in again.stderr
    here.write(f"{scenario}\nfail nvmlInitWithFlags * 18")  # does not concern that GPU alone
    assert shell.run("%reserve_gpu").stderr == ""
    here.write(scenario)
    assert shell.run("%reserve_gpu").stderr == ""
    here.add("fail nvmlDeviceGetHandleByIndex_v2 0 999")
    shell.run("%reserve_gpu --release\n%reserve_gpu")
    assert visible() == "1"


def test_replaced_gpus_are_named(here: Here) -> None:
    """A request that replaces GPUs names the released ones first."""
    here.write(FOUR_GPUS)
    shell = here.shell()
    for line, released in (
        ("0 2", []),
        ("1 2", ["GPU0"]),
        ("0 3", ["GPU1", "GPU2"]),
        ("3", ["GPU0"]),
        ("3", []),
        ("--memory 1GB", []),
        ("--memory 1GB 0", ["GPU3"]),
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
        ("import os; del os.environ['CUDA_VISIBLE_DEVICES']", "VISIBLE_DEVICES was unset"),
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


def test_release_restores_the_variables(here: Here) -> None:
    """--release restores the variables, and a second --release is not an error."""
    os.environ["CUDA_VISIBLE_DEVICES"] = "1"
    shell = here.shell()
    shell.run("%reserve_gpu")
    assert held(here) == [1]
    first, second = (run_cell(shell, "%reserve_gpu --release") for _ in range(2))
    assert "GPU1" in first.stdout
    assert "GPU1" not in second.stdout
    assert (second.error, second.stderr) == (None, "")
    assert (variables(), held(here)) == ({"CUDA_VISIBLE_DEVICES": "1"}, [])


def test_release_of_a_part_restores_the_memory_caps(here: Here) -> None:
    """The caps of frameworks are unset, and a cap that the user has set stays."""
    os.environ["CUPY_GPU_MEMORY_LIMIT"] = "50%"
    shell = here.shell()
    shell.run("%reserve_gpu --memory 2GB")
    assert "XLA_CLIENT_MEM_FRACTION" in os.environ
    released = run_cell(shell, "%reserve_gpu --release").stdout
    assert "XLA_CLIENT_MEM_FRACTION" in released
    assert "XLA_CLIENT_MEM_FRACTION" not in os.environ
    assert "CUPY" not in released
    assert os.environ["CUPY_GPU_MEMORY_LIMIT"] == "50%"


@pytest.mark.parametrize(
    ("words", "kept", "order"),
    [("3", [3], "3"), ("-n 1", [1], "1"), ("3,1", [1, 3], "3,1"), ("", [1, 3], "1,3")],
)
def test_smaller_request_releases_the_rest(
    here: Here, words: str, kept: list[int], order: str
) -> None:
    """A request for fewer GPUs keeps some of them; a request without arguments keeps all."""
    here.write(FOUR_GPUS)
    shell = here.shell()
    shell.run("%reserve_gpu 1,3")
    cell = run_cell(shell, f"%reserve_gpu {words}")
    assert (cell.error, cell.stderr) == (None, "")
    assert (visible(), held(here)) == (order, kept)


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


@pytest.mark.ipython
def test_lost_lock_is_reported_after_each_cell(here: Here) -> None:
    """The warning names the new holder, once per cell, until the extension is unloaded."""
    shell = here.shell()
    shell.run("%reload_ext reserve_gpu\n%reserve_gpu 1")
    (here.locks / f"{here.uuid('1')}.lock").unlink()
    with here.rival("1"):
        for _ in range(2):
            cell = run_cell(shell, "print('worked')")
            assert (cell.stdout, cell.error) == ("worked\n", None)
            (warning,) = cell.stderr.splitlines()
            assert "rival.ipynb" in warning
        shell.run("%unload_ext reserve_gpu")
        assert run_cell(shell, "1").stderr == ""


def test_optional(here: Here) -> None:
    """--optional keeps the GPU that the kernel holds; without one, no GPU is visible."""
    shell = here.shell()
    shell.run("%reserve_gpu 1")
    with here.rival("0"):
        cell = shell.run("%reserve_gpu 0 --optional")
        assert (cell.error, visible()) == (None, "1")
        assert "GPU1" in cell.stdout
        shell.run("%reserve_gpu --release")
        assert shell.run("%reserve_gpu 0 --optional").error is None
        assert visible() == ""


# -- arguments -------------------------------------------------------------------------------------


def test_names_of_devices(here: Here) -> None:
    """Spaces, commas and quotes separate names; the order of the names is kept."""
    here.write(FOUR_GPUS)
    shell = here.shell()
    for name, numbers, memory in (
        ("2", "2", "16384"),
        ("3 1", "3,1", "32768,8192"),
        ("1, 3", "1,3", "8192,32768"),
        ("1 ,0", "1,0", "8192,4038"),
        ("'3, 2'", "3,2", "32768,16384"),
        ("1  # a comment", "1", "8192"),
        ("3 0a:00.0 GPU-aaaa2", "3,0,1", "32768,4038,8192"),
    ):
        cell = run_cell(shell, f"%reserve_gpu {name}")
        assert cell.error is None, (name, cell.stderr)
        assert (visible(), os.environ["CUDA_DEVICE_MEMORY"]) == (numbers, memory), name


def test_mistake_keeps_the_reservation(here: Here) -> None:
    shell = here.shell()
    good = shell.run("%reserve_gpu 1")
    before = variables()
    for words in ("7", "0,0", "'x", "--release 0", "\x1b[31mred", "x" * 3000):
        cell = shell.run(f"%reserve_gpu {words}")
        assert (cell.error, cell.stdout) == ("UsageError", "")
        assert "\x1b" not in cell.stderr
        assert len(cell.stderr) < 400
        assert (variables(), held(here)) == (before, [1])
    assert shell.run("%reserve_gpu").stdout == good.stdout


SUGGESTED = re.compile(
    r"(?:the space|in quotes|end time|option|one place): (.+)|Did you mean (.+)\?|Use (--.+) \(in"
)


def test_suggestions_work(here: Here) -> None:
    """A suggested argument is accepted in place of the mistake, or only lacks a value."""
    here.write(FOUR_GPUS)
    shell = here.shell()
    suggested = [
        next(filter(None, match.groups()))
        for line in MISTAKES
        if (match := SUGGESTED.search(run_cell(shell, f"%reserve_gpu {line}").stderr))
    ]
    assert len(suggested) > 20
    for line in (*suggested, "0-3", "-n 4"):
        cell = run_cell(shell, f"%reserve_gpu {line}")
        is_understood = " needs a value: " in cell.stderr or "in its name" in cell.stderr
        assert cell.error is None or is_understood, (line, cell.stderr)


def test_help(here: Here) -> None:
    """The help has five examples that parse, within 80 columns."""
    os.environ["COLUMNS"] = "80"
    shell = here.shell()
    page = shell.run("%reserve_gpu --help").stdout.rstrip("\n")
    assert page in shell.run("%reserve_gpu?").stdout.partition("Docstring:\n")[2]
    examples = re.findall(
        r"^  %reserve_gpu(.*?)   .*", page.partition("examples:\n")[2], re.MULTILINE
    )
    assert len(examples) == 5
    for example in examples:
        magic_parser().parse_args(example.split())
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


def test_child_processes_inherit_the_settings(here: Here) -> None:
    """%config sets environment variables, and an empty value unsets them."""
    shell = here.shell()
    shell.run("%config ReserveGPU.lock_directory = '/tmp/other'")
    shell.run("%config ReserveGPU.idle_memory = 500")
    names = ("RESERVE_GPU_LOCK_DIR", "RESERVE_GPU_IDLE_MEMORY")
    assert [os.environ.get(name) for name in names] == ["/tmp/other", "500"]
    shell.run("%config ReserveGPU.lock_directory = ''\n%config ReserveGPU.idle_memory = ''")
    assert [os.environ.get(name) for name in names] == [None, None]


@pytest.mark.parametrize("source", ["environment", "configuration", "%config"])
def test_invalid_threshold_fails_the_next_reservation(here: Here, source: str) -> None:
    """An invalid idle memory is one line at the next reservation, not before."""
    shell = here.shell()
    change = "%reload_ext reserve_gpu"
    if source == "environment":
        os.environ["RESERVE_GPU_IDLE_MEMORY"] = "lots"
    elif source == "configuration":
        shell.shell.config.ReserveGPU.idle_memory = "lots"
    else:
        change = "%config ReserveGPU.idle_memory = 'lots'"
    cell = run_cell(shell, change)
    assert (cell.stdout, cell.stderr, cell.error) == ("", "", None)
    cell = run_cell(shell, "%reserve_gpu")
    assert (cell.stdout, cell.error, cell.stderr.count("\n")) == ("", "UsageError", 1)
    assert "'lots'" in cell.stderr


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


def test_matchers_of_other_extensions_stay(here: Here) -> None:
    """Reloading keeps the last completion matcher, which another extension has added."""
    shell = here.shell()
    matchers = getattr(shell.shell.Completer, "custom_matchers", None)
    if not matchers:
        pytest.skip("IPython before 8.6 has no list of matchers")
    before = [*matchers]
    matchers.append(print)
    shell.run("%load_ext reserve_gpu\n%reload_ext reserve_gpu")
    assert matchers.pop() is print
    assert len(matchers) == len(before)


def test_namespace_of_the_user_is_unchanged(here: Here) -> None:
    """%reserve_gpu adds no name to the user's namespace, and its value is None."""
    shell = here.shell()
    names = set(shell.shell.user_ns)
    shell.run("%load_ext reserve_gpu\n%reserve_gpu\n%reserve_gpu --release")
    assert {name for name in set(shell.shell.user_ns) - names if not name.startswith("_i")} == set()
    assert shell.run("value = %reserve_gpu\nprint(value)").stdout.endswith("\nNone\n")
