"""%reserve_gpu in real IPython shells, most of them in the test process."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

import pytest

from reserve_gpu.ipython.parser import OTHERS, magic_parser
from reserve_gpu.request_options import REQUEST
from tests.support.locked import held
from tests.support.reserving import of_gpu, variables

if TYPE_CHECKING:
    from tests.support.here import Here
    from tests.support.machine import Cell
    from tests.support.shell import Shell

from tests.support.magic import without_container

# Two GPUs whose UUIDs begin alike, with a letter in a bus id, and two that need nothing said.
FOUR = """
gpu
  name GeForce GTX 1050 Ti
  uuid GPU-aaaa1111-0000-0000-0000-000000000000
  bus 0000:0a:00.0
  vbios 86.07.22.00.A8
  memory 4038
gpu
  name GeForce GTX 1080
  uuid GPU-aaaa2222-0000-0000-0000-000000000000
  bus 0001:0b:00.0
  memory 8192
gpu
  memory 16384
gpu
  memory 32768
"""

ONE_DEVICE = """\
Reserving GPU0: 0000:01:00.0 16x GeForce GTX 1050 Ti (VBIOS 86.07.22.00.A8)
CUDA_DEVICE_MEMORY = '4038'
CUDA_DEVICE_ORDER = 'PCI_BUS_ID'
CUDA_VISIBLE_DEVICES = '0'
"""
TWO_DEVICES = """\
Reserving GPU1: 0000:02:00.0 16x GeForce GTX 1050 Ti (VBIOS 86.07.22.00.A8)
Reserving GPU0: 0000:01:00.0 16x GeForce GTX 1050 Ti (VBIOS 86.07.22.00.A8)
CUDA_DEVICE_MEMORY = '4038,4038'
CUDA_DEVICE_ORDER = 'PCI_BUS_ID'
CUDA_VISIBLE_DEVICES = '1,0'
"""


def run(shell: Shell, code: str) -> Cell:
    """Run a cell; what it shows is less the warning that is due where tests run in a container."""
    cell = shell.run(code)
    cell.stderr = without_container(cell.stderr)
    return cell


def visible() -> str | None:
    return os.environ.get("CUDA_VISIBLE_DEVICES")


# -- what is printed -------------------------------------------------------------------------------


@pytest.mark.ipython
def test_load_ext_gives_the_magic(here: Here) -> None:
    """After %load_ext, %reserve_gpu prints the device and its variables to the letter."""
    shell = here.shell()
    shell.run("%unload_ext reserve_gpu")
    cell = run(shell, "%load_ext reserve_gpu\n%reserve_gpu")
    assert (cell.stdout, cell.stderr, cell.error) == (ONE_DEVICE, "", None)


def test_a_kernel_of_another_make(here: Here) -> None:
    """In a kernel whose shell lacks what ipykernel's has the magic works, as xeus-python's does."""
    shell = here.shell(is_notebook=True)
    del shell.shell.get_parent
    assert "CUDA_VISIBLE_DEVICES = '0'" in shell.run("%reserve_gpu").stdout
    assert shell.run("%reserve_gpu --status").error is None
    with here.rival("1"):
        assert "NoFreeDeviceError" in str(shell.run("%reserve_gpu 1").error)


def test_others_take_away_their_own_matcher(here: Here) -> None:
    """Code that takes the last matcher of the completer away again does not take ours."""
    shell = here.shell()
    matchers = getattr(shell.shell.Completer, "custom_matchers", None)
    if not matchers:
        pytest.skip("the way of IPython before 8.6")
    before = [*matchers]
    matchers.append(print)
    shell.run("%load_ext reserve_gpu\n%reload_ext reserve_gpu")
    assert matchers.pop() is print
    assert len(matchers) == len(before)


def test_two_devices_get_a_line_each(here: Here) -> None:
    """Several devices have a line each and share the variables, in the order that was asked for."""
    cell = run(here.shell(), "%reserve_gpu 1,0")
    assert (cell.stdout, cell.stderr, cell.error) == (TWO_DEVICES, "", None)


def test_what_the_driver_does_not_say_is_left_out(here: Here) -> None:
    """An unreported link width leaves no gap in the line, an unreported memory sets no variable."""
    here.write("gpu\n name X\n width none\ngpu\n name Y\n")
    here.add("fail nvmlDeviceGetMemoryInfo 0 4\nfail nvmlDeviceGetMemoryInfo_v2 0 4")
    os.environ["CUDA_DEVICE_MEMORY"] = "1"
    first, second, *rest = run(here.shell(), "%reserve_gpu 0,1").stdout.splitlines()
    assert first.startswith("Reserving GPU0: 0000:01:00.0 X (VBIOS ")
    assert second.startswith("Reserving GPU1: 0000:02:00.0 16x Y (VBIOS ")
    assert rest == ["CUDA_DEVICE_ORDER = 'PCI_BUS_ID'", "CUDA_VISIBLE_DEVICES = '0,1'"]
    assert "CUDA_DEVICE_MEMORY" not in os.environ


def test_a_named_busy_device_warns_on_stderr(here: Here) -> None:
    """A busy device that is named is reserved, with one warning line that names the process."""
    here.use("busy")
    cell = run(here.shell(), "%reserve_gpu 0")
    assert (cell.stdout, visible()) == (ONE_DEVICE, "0")
    (warning,) = cell.stderr.splitlines()
    assert warning.startswith("Warning: You asked for GPU0: it is busy")
    assert "4321000" in warning


def test_nothing_free(here: Here) -> None:
    """Where nothing is free the cell fails with the reason for each device, and no traceback."""
    here.use("busy")
    cell = here.shell().run("%reserve_gpu\nprint('went on')")
    assert (cell.error, cell.stdout) == ("NoFreeDeviceError", "")
    assert cell.traceback == ["No free GPU: 2 busy."]
    assert [of_gpu(cell.shown, number).partition(":")[0] for number in "01"] == ["busy", "busy"]
    assert "4321000" in of_gpu(cell.shown)
    assert "\nNo GPU is visible to this notebook.\nGPU  state " in cell.shown
    text = cell.all
    assert not any(sign in text for sign in ("Traceback", "File ", "---->", "Error:", "\x1b"))


def test_who_has_it_is_named(here: Here) -> None:
    """A GPU that somebody has reserved is said to be, with the notebook and its pid."""
    with here.rival("0"), here.rival("1"):
        cell = here.shell().run("%reserve_gpu")
    assert of_gpu(cell.shown).startswith("reserved: ")
    assert f"rival.ipynb (pid {os.getpid()})" in of_gpu(cell.shown)


def test_a_gpu_that_fails_is_told_to_its_holder(here: Here) -> None:
    """Each %reserve_gpu tells the holder that its GPU fails, and how to get a different GPU."""
    shell = here.shell()
    shell.run("%reserve_gpu")
    before = here.scenario.read_text()
    here.add("fail nvmlDeviceGetHandleByIndex_v2 0 999")
    for _ in range(2):
        again = shell.run("%reserve_gpu")
        assert again.stdout == ONE_DEVICE
        assert again.stderr == (
            "Warning: This kernel holds GPU0, but the NVIDIA driver currently can't use it: "
            "Unknown Error (nvmlDeviceGetHandleByIndex). Send the output of nvidia-smi to the "
            "administrator. To get another GPU, run:\n%reserve_gpu --release\n%reserve_gpu\n"
        )
    here.write(f"{before}\nfail nvmlInitWithFlags * 18")  # which says nothing of that GPU
    assert shell.run("%reserve_gpu").stderr == ""
    here.write(before)
    assert shell.run("%reserve_gpu").stderr == ""
    here.add("fail nvmlDeviceGetHandleByIndex_v2 0 999")
    shell.run("%reserve_gpu --release")
    assert "Reserving GPU1" in shell.run("%reserve_gpu").stdout


# -- what a request changes ------------------------------------------------------------------------


# Each with the GPUs that the request releases, in the order in which a kernel runs them.
REPLACEMENTS = [
    ("0 2", ""),
    ("1 2", "Released GPU0."),
    ("0 3", "Released GPU1 and GPU2."),
    ("3", "Released GPU0."),
    ("3", ""),
    ("--memory 1GB", ""),
    ("--memory 1GB 0", "Released GPU3."),
]


def test_replaced_gpus_are_named(here: Here) -> None:
    """A request that replaces GPUs prints which ones it released, before the new ones."""
    here.write(FOUR)
    shell = here.shell()
    for line, released in REPLACEMENTS:
        first, *rest = shell.run(f"%reserve_gpu {line}").stdout.splitlines()
        assert (first if first.startswith("Released") else "") == released, line
        assert rest[-1].startswith(("CUDA_VISIBLE_DEVICES", "XLA_")), line
        assert not [text for text in rest if text.startswith("Released")], line


@pytest.mark.ipython
def test_fails_closed_and_recovers(here: Here) -> None:
    """Nothing free: no GPU is visible, until one can be had or --release undoes the failure."""
    before = {"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_MEMORY": "7"}
    os.environ.update(before)
    here.write("gpu\n  compute 4321000 3500\n")
    shell = here.shell()
    for _ in range(2):  # the second failure does not take the first one's '' for the limit
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
    ("line", "what"),
    [
        ("import os; os.environ['CUDA_VISIBLE_DEVICES'] = '0'", "VISIBLE_DEVICES was set to '0'"),
        ("import os; del os.environ['CUDA_VISIBLE_DEVICES']", "VISIBLE_DEVICES was unset"),
        ("%env CUDA_DEVICE_ORDER=FASTEST_FIRST", "DEVICE_ORDER was set to 'FASTEST_FIRST'"),
    ],
)
def test_a_variable_that_a_cell_changes(here: Here, line: str, what: str) -> None:
    """Whoever changes what CUDA reads is told once, at the end of that cell, and how to go on."""
    shell = here.shell()
    shell.run("%reserve_gpu 1")
    told = f"CUDA_{what} after the reservation of GPU1."
    assert told in shell.run(line).all
    assert told not in shell.run("1").all
    again = shell.run("%reserve_gpu")
    assert f"CUDA_{what} after the reservation; the variables are set for GPU1 again" in again.all
    for name, value in variables().items():
        assert f"{name} = {value!r}" in again.stdout
    assert told in shell.run(line).all


def test_release_gives_the_variables_back(here: Here) -> None:
    """--release says what it released and restores each variable; twice is no error."""
    os.environ["CUDA_VISIBLE_DEVICES"] = "1"
    shell = here.shell()
    shell.run("%reserve_gpu")
    assert held(here) == [1]
    first, second = (run(shell, "%reserve_gpu --release") for _ in range(2))
    unset = "CUDA_DEVICE_MEMORY is not set\nCUDA_DEVICE_ORDER is not set\n"
    assert first.stdout == f"Released GPU1.\n{unset}CUDA_VISIBLE_DEVICES = '1'\n"
    assert second.stdout.startswith("This kernel holds no GPU.\n")
    assert (second.error, second.stderr) == (None, "")
    assert (variables(), held(here)) == ({"CUDA_VISIBLE_DEVICES": "1"}, [])


def test_release_says_of_all_that_was_set(here: Here) -> None:
    """Of a part the caps are gone too, and a user's own value stands there again."""
    os.environ["CUPY_GPU_MEMORY_LIMIT"] = "50%"
    shell = here.shell()
    shell.run("%reserve_gpu --memory 2GB")
    released = run(shell, "%reserve_gpu --release").stdout
    assert "XLA_CLIENT_MEM_FRACTION is not set\n" in released
    assert "CUPY" not in released
    assert os.environ["CUPY_GPU_MEMORY_LIMIT"] == "50%"


@pytest.mark.parametrize(
    ("wish", "kept", "order"),
    [
        ("3", [3], "3"),
        ("-n 1", [1], "1"),
        ("3,1", [1, 3], "3,1"),
        ("", [1, 3], "1,3"),
    ],
)
def test_a_smaller_wish(here: Here, wish: str, kept: list[int], order: str) -> None:
    """A cell that asks for less than is held keeps that and releases the rest; a bare one not."""
    here.write(FOUR)
    shell = here.shell()
    shell.run("%reserve_gpu 1,3")
    cell = run(shell, f"%reserve_gpu {wish}")
    assert (cell.error, cell.stderr) == (None, "")
    assert cell.stdout.endswith(f"\nCUDA_VISIBLE_DEVICES = '{order}'\n")
    assert (visible(), held(here)) == (order, kept)


def test_the_end_of_a_cell_mends_a_deleted_lock(here: Here) -> None:
    """After a cell in which somebody deleted the lock file, a line says that it is locked anew."""
    shell = here.shell()
    shell.run("%reserve_gpu 1")
    lock = here.locks / f"{here.uuid('1')}.lock"
    assert run(shell, "1").stderr == ""
    lock.unlink()
    cell = run(shell, "print('worked')")
    assert (cell.stdout, cell.error) == ("worked\n", None)
    (warning,) = cell.stderr.splitlines()
    assert warning.startswith(f"Warning: The lock file of GPU1 ({lock}) was deleted or replaced.")
    assert held(here) == [1]
    assert run(shell, "1").stderr == ""


@pytest.mark.ipython
def test_the_end_of_a_cell_tells_of_a_lost_lock(here: Here) -> None:
    """Where another process took the GPU after its lock was deleted, each cell's end says whose."""
    shell = here.shell()
    shell.run("%reserve_gpu 1")
    (here.locks / f"{here.uuid('1')}.lock").unlink()
    with here.rival("1"):
        for _ in range(2):
            cell = run(shell, "print('worked')")
            assert (cell.stdout, cell.error) == ("worked\n", None)
            (warning,) = cell.stderr.splitlines()
            assert "the device is now reserved by" in warning
            assert "rival.ipynb" in warning


def test_going_on_with_what_is_held(here: Here) -> None:
    """--optional says which GPU stays where the kernel holds one, else that there is none."""
    shell = here.shell()
    shell.run("%reserve_gpu 1")
    with here.rival("0"):
        cell = shell.run("%reserve_gpu 0 --optional")
        assert cell.stdout == "Continuing with GPU1, as before.\n"
        assert (cell.error, visible()) == (None, "1")
        shell.run("%reserve_gpu --release")
        cell = shell.run("%reserve_gpu 0 --optional")
        assert cell.stdout == "Continuing without a GPU.\n"
        assert (cell.error, visible()) == (None, "")


# -- arguments -------------------------------------------------------------------------------------

NAMES = [
    ("2", "2", "16384"),
    ("GPU3", "3", "32768"),
    ("1,3", "1,3", "8192,32768"),
    ("3 1", "3,1", "32768,8192"),
    ("1, 3", "1,3", "8192,32768"),
    ("1 ,0", "1,0", "8192,4038"),
    ("'3, 2'", "3,2", "32768,16384"),
    ("GPU-aaaa2222-0000-0000-0000-000000000000", "1", "8192"),
    ("GPU-aaaa2", "1", "8192"),
    ("gpu-AAAA1", "0", "4038"),
    ("0000:0a:00.0", "0", "4038"),
    ("0A:00.0", "0", "4038"),
    ("00000001:0B:00.0", "1", "8192"),
    ("3 0a:00.0 GPU-aaaa2", "3,0,1", "32768,4038,8192"),
]


def test_devices_by_name(here: Here) -> None:
    """An index, a list, a UUID, its unique prefix, a bus id mean that device, order kept."""
    here.write(FOUR)
    shell = here.shell()
    for name, numbers, memory in NAMES:
        cell = run(shell, f"%reserve_gpu {name}")
        assert cell.error is None, (name, cell.stderr)
        assert (visible(), os.environ["CUDA_DEVICE_MEMORY"]) == (numbers, memory), name
        assert cell.stdout.count("Reserving ") == len(numbers.split(",")), name


# Each with a part of the one line that it must be answered with.
RUBBISH = [
    ("4", "GPU4"),
    ("9999", "GPU9999"),
    ("99999999999999999999", "99999999999999999999"),
    ("-1", "-1"),
    ("1,-1", "-1"),
    ("1,1", "twice"),
    ("1 GPU1", "twice"),
    ("0 0a:00.0", "twice"),
    ("2 GPU-aaaa1 0", "twice"),
    ("GPU-aaaa", "several"),
    ("GPU-ffff", "GPU-ffff"),
    ("GPU-", "GPU-"),
    ("0f:00.0", "0f:00.0"),
    ("0b:00.0", "0b:00.0"),  # of domain 1, and none was given
    ("0:0", "0:0"),
    ("1gpu2", "1gpu2"),
    ("1.5", "1.5"),
    ("3-1", "3-1"),
    ("status", "'status' is not a GPU name"),
    ("0 --wiat=1h", "Unknown option --wiat. Did you mean --wait?"),
    ("-w 1h", "Unknown option -w. Did you mean --wait 1h?"),
    ("-z 1h", "Unknown option -z. Choose from: --count, --min-memory, "),
    ("--note until May 3", 'after --note until. Put the value in quotes: --note "until May 3"'),
    ("--note=my thesis", 'Put the value in quotes: --note "my thesis"'),
    ("--note my 'first $x' --wait", "--note 'my first $x'"),
    ("--note Bob's thesis", 'thesis. Put text with an apostrophe in double quotes: "it\'s"'),
    ("--memory 10 GB", "Unexpected 'GB' after --memory 10. Leave out the space: --memory 10GB"),
    ("--min-memory=10 GB 0", "Leave out the space: --min-memory 10GB"),
    ("--memory 50 %", "--memory 50%"),
    ("--for 4 hours", "Unexpected 'hours' after --for 4. Leave out the space: --for 4hours"),
    ("--wait 1h 30 min", "Leave out the space: --wait 1h30min"),
    ("--for tomorrow 9am", 'For an end time: --until "tomorrow 9am"'),
    ("--until 9am tomorrow", 'Put the value in quotes: --until "tomorrow 9am"'),
    ("--name A100 80GB", 'Put the value in quotes: --name "A100 80GB"'),
    ("--gpu 0", "Unknown option --gpu. Name GPUs without an option: 0"),
    ("--id=3", "Unknown option --id. Name GPUs without an option: 3"),
    ("-g", "Unknown option -g. Name GPUs without an option, such as 0 or 1,3"),
    ("--gpus 2", "Unknown option --gpus. Did you mean -n 2?"),
    ("--gpus 0,1", "Unknown option --gpus. Name GPUs without an option: 0,1"),
    ("--gpus all", "Unknown option --gpus. For all 4 GPUs: 0-3 or -n 4"),
    ("--gpus 0", "Unknown option --gpus. Name GPUs without an option: 0"),
    ("--mem 10", "Unknown option --mem. Did you mean --memory?"),
    ("--timeout 5m", "Unknown option --timeout. Did you mean --wait 5m?"),
    ("--extend 2h", "Unknown option --extend. Did you mean --for 2h?"),
    ("extend 2h", "'extend' is not a GPU name. Did you mean --for 2h?"),
    (
        "0:3",
        "No GPU is named 0:3, because GPU0 has no MIG instances. For a range of GPUs, write 0-3.",
    ),
    ("--mem 10GB", "Unknown option --mem. Did you mean --memory 10GB?"),
    ("-t soon", "Unknown option -t. Did you mean --for?"),
    ("*", "'*' is not a GPU name. For all 4 GPUs: 0-3 or -n 4"),
    ("count=2", "'count=2' is not a GPU name. Did you mean --count 2?"),
    ("gpu 0", "'gpu' is not a GPU name. Did you mean 0?"),
    ("2 GPUs", "'GPUs' is not a GPU name. Did you mean -n 2?"),
    ("A100", "'A100' is not a GPU name. Did you mean --name A100?"),
    ("0 --optional 1", "Name all GPUs in one place: 0,1"),
    ("--for tomorrow", "'tomorrow' is a time, not a duration. Use --until tomorrow"),
    ("--wait=forever", "To wait without a limit, leave it out: --wait"),
    ("--count", "--count needs a value: number of GPUs"),
    ("--help=1", "--help takes no value. See %reserve_gpu?"),
    ("--min-memory 16", "16 MiB or 16 GB? Write 16GB or 16MiB."),
    ("0;1", "0;1"),
    ("\N{ARABIC-INDIC DIGIT ONE}", "\N{ARABIC-INDIC DIGIT ONE}"),
    ("\N{SUPERSCRIPT TWO}", "\N{SUPERSCRIPT TWO}"),
    ("all", "'all' is not a GPU name. For all 4 GPUs: 0-3 or -n 4"),
    ("''", "GPU"),
    (",", "GPU"),
    ("'1", "quot"),
    ("1\\", "escape"),
    ("--nonsense", "--nonsense"),
    ("1 --nonsense", "--nonsense"),
    ("--release=1", "--release"),
    ("--release 1", "--release takes no GPU names: it releases everything that this kernel holds."),
    ("\x1b[31mred", "is not a GPU name"),
    ("-n 0", "0"),
    ("-n two", "two"),
    ("-n 1.5", "1.5"),
    ("-n 5", "There are 4 GPUs here; you asked for 5"),
    ("-n", "-n"),
    ("1 -n 2", "2"),
    ("--min-memory lots", "lots"),
    ("--min-memory -1", "-1"),
    ("--min-memory 1TB", "none has 1TB (931.3 GiB)"),
    ("--name Voodoo", "Voodoo"),
    ("status", "'status' is not a GPU name. Did you mean --status?"),
    ("--exclude 1", "Unknown option --exclude. Choose from: "),
    ("x" * 3000, "is not a GPU name"),
]


@pytest.mark.parametrize(
    "before",
    [
        pytest.param({}, id="unset"),
        pytest.param(
            {
                "CUDA_VISIBLE_DEVICES": "0,1,2,3",
                "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
                "CUDA_DEVICE_MEMORY": "77",
            },
            id="set",
        ),
    ],
)
def test_rubbish_is_one_line_and_changes_nothing(here: Here, before: dict[str, str]) -> None:
    """A bad argument is one line on stderr that stops a run; no variable is touched."""
    here.write(FOUR)
    os.environ.update(before)
    shell = here.shell()
    for line, part in RUBBISH:
        cell = run(shell, f"%reserve_gpu {line}")
        assert cell.error == "UsageError", (line, cell)
        assert cell.stderr.startswith("UsageError: "), line
        assert len(cell.stderr.splitlines()) == 1, line
        assert part in cell.stderr, line
        assert "\x1b" not in cell.stderr, line
        assert len(cell.stderr) < 400, line
        assert cell.stdout == "", line
        assert (variables(), held(here)) == (before, []), line


SUGGESTED = re.compile(
    r"(?:the space|in quotes|end time|option|one place): (.+)|Did you mean (.+)\?|Use (--.+) \(in"
)


def test_suggestions_work(here: Here) -> None:
    """A suggested argument is accepted in place of the mistake, or only lacks a value."""
    here.write(FOUR)
    shell = here.shell()
    suggested = [
        next(filter(None, match.groups()))
        for line, _ in RUBBISH
        if (match := SUGGESTED.search(run(shell, f"%reserve_gpu {line}").stderr))
    ]
    assert len(suggested) > 20
    for line in (*suggested, "0-3", "-n 4"):
        cell = run(shell, f"%reserve_gpu {line}")
        is_understood = " needs a value: " in cell.stderr or "in its name" in cell.stderr
        assert cell.error is None or is_understood, (line, cell.stderr)


def test_rubbish_leaves_a_reservation_alone(here: Here) -> None:
    """A bad argument after a good one changes neither the reservation nor its variables."""
    shell = here.shell()
    good = shell.run("%reserve_gpu 1")
    before = variables()
    release = shell.run("%reserve_gpu --release 0")
    assert release.stderr.endswith(
        "releases everything that this kernel holds. This kernel holds GPU1.\n"
    )
    for line in ("7", "0,0", "'x", "--release 0"):
        assert shell.run(f"%reserve_gpu {line}").error == "UsageError"
        assert (variables(), held(here)) == (before, [1])
    assert shell.run("%reserve_gpu").stdout == good.stdout


def test_a_comment_is_no_argument(here: Here) -> None:
    """What stands behind # is a comment, as in Python."""
    here.shell().run("%reserve_gpu 1  # the one with the fan")
    assert visible() == "1"


# -- the manual page -------------------------------------------------------------------------------


def test_the_manual_page(here: Here) -> None:
    """%reserve_gpu? and --help are a sentence, each option, and five examples that parse."""
    os.environ["COLUMNS"] = "80"
    shell = here.shell()
    page = shell.run("%reserve_gpu --help").stdout.rstrip("\n")
    assert page in shell.run("%reserve_gpu?").stdout.partition("Docstring:\n")[2]
    assert page.startswith("Reserve a GPU for this kernel, and set the CUDA variables")
    for option in (*REQUEST, *OTHERS):
        flag = option.flags[-1] if option.flags != ("devices",) else "DEVICE"
        assert re.search(rf"^  (-\w \w+, )?{flag}( .*)?$", page, re.MULTILINE), flag
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
def test_config_shows_and_changes_the_settings(here: Here) -> None:
    """`%config ReserveGPU` shows both settings, and what it sets holds for the next reservation."""
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


def test_what_a_kernel_starts_has_its_settings(here: Here) -> None:
    """What %config sets is in the environment of what the shell starts, until it is set to ''."""
    shell = here.shell()
    shell.run("%config ReserveGPU.lock_directory = '/tmp/other'")
    shell.run("%config ReserveGPU.idle_memory = 500")
    names = ("RESERVE_GPU_LOCK_DIR", "RESERVE_GPU_IDLE_MEMORY")
    assert [os.environ.get(name) for name in names] == ["/tmp/other", "500"]
    shell.run("%config ReserveGPU.lock_directory = ''\n%config ReserveGPU.idle_memory = ''")
    assert [os.environ.get(name) for name in names] == [None, None]


@pytest.mark.parametrize("where", ["environment", "configuration", "%config"])
def test_a_bad_threshold_is_no_traceback(here: Here, where: str) -> None:
    """A threshold that is no size is said in one line by the next reservation, not before."""
    shell = here.shell()
    if where == "environment":
        os.environ["RESERVE_GPU_IDLE_MEMORY"] = "lots"
    elif where == "configuration":
        shell.shell.config.ReserveGPU.idle_memory = "lots"
    is_here = where == "%config"
    change = "config ReserveGPU.idle_memory = 'lots'" if is_here else "reload_ext reserve_gpu"
    cell = run(shell, f"%{change}")
    assert (cell.stdout, cell.stderr, cell.error) == ("", "", None)
    cell = run(shell, "%reserve_gpu")
    assert (cell.stdout, cell.error) == ("", "UsageError")
    assert len(cell.stderr.splitlines()) == 1
    assert "'lots'" in cell.stderr


def test_the_environment_prevails_over_a_configuration(here: Here) -> None:
    """An environment variable that is set when the extension is loaded prevails over a file."""
    shell = here.shell()
    shell.shell.config.ReserveGPU.idle_memory = "1MiB"
    shell.shell.config.ReserveGPU.lock_directory = str(here.folder / "other")
    os.environ["RESERVE_GPU_IDLE_MEMORY"] = "900MiB"
    shell.run("%reload_ext reserve_gpu\n%reserve_gpu")
    assert os.environ["RESERVE_GPU_IDLE_MEMORY"] == "900MiB"
    assert held(here) == [0]
    assert not (here.folder / "other").exists()


@pytest.mark.ipython
def test_unload_and_reload_keep_the_reservation(here: Here) -> None:
    """Unloading takes magic and settings away, reloading brings both back; the GPU is kept."""
    shell = here.shell()
    taken = shell.run("%reserve_gpu 1")
    assert shell.run("%reload_ext reserve_gpu\n%reserve_gpu").stdout == taken.stdout
    before = variables()
    shell.run("%unload_ext reserve_gpu")
    cell = shell.run("import reserve_gpu\n%reserve_gpu")
    assert cell.error == "UsageError"
    assert "not found" in cell.stderr
    assert shell.run("%config ReserveGPU").error == "UsageError"
    assert (variables(), held(here)) == (before, [1])
    shell.run("%load_ext reserve_gpu")
    assert shell.run("%reserve_gpu").stdout == taken.stdout
    assert shell.run("%config ReserveGPU.idle_memory").error is None


def test_loading_again_tells_nothing_twice(here: Here) -> None:
    """An extension that was loaded again looks after its locks once at the end of a cell."""
    shell = here.shell()
    shell.run("%reload_ext reserve_gpu\n%reserve_gpu 1")
    (here.locks / f"{here.uuid('1')}.lock").unlink()
    with here.rival("1"):
        assert run(shell, "1").stderr.count("the device is now reserved by") == 1
        shell.run("%unload_ext reserve_gpu")
        assert run(shell, "1").stderr == ""


def test_namespace_stays_the_persons(here: Here) -> None:
    """%reserve_gpu puts nothing into the user's namespace, and its value is None."""
    shell = here.shell()
    names = set(shell.shell.user_ns)
    shell.run("%load_ext reserve_gpu\n%reserve_gpu\n%reserve_gpu --release")
    assert {name for name in set(shell.shell.user_ns) - names if not name.startswith("_i")} == set()
    assert shell.run("value = %reserve_gpu\nprint(value)").stdout.endswith("\nNone\n")
