"""%reserve_gpu in real IPython shells."""

from __future__ import annotations

import json
import re
import shutil
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from reserve_gpu.options import MAGIC, REQUEST, magic_parser
from tests.machine import ROOT

if TYPE_CHECKING:
    import subprocess

    from tests.machine import Machine

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

# Runs the cells of its first argument one after the other, also after an error.
RUNNER = """
import json, os, sys
from IPython.utils.capture import capture_output
answers = []
for cell in json.loads(sys.argv[1]):
    with capture_output() as shown:
        result = get_ipython().run_cell(cell)
    error = result.error_before_exec or result.error_in_exec
    answers.append({
        "stdout": shown.stdout, "stderr": shown.stderr, "error": error and type(error).__name__,
        "cuda": {k: v for k, v in os.environ.items() if k.startswith("CUDA_")},
    })
print(json.dumps(answers))
"""


@dataclass
class Shown:
    """What a cell showed, and the CUDA variables after it."""

    stdout: str
    stderr: str
    error: str | None
    cuda: dict[str, str]

    @property
    def visible(self) -> str | None:
        return self.cuda.get("CUDA_VISIBLE_DEVICES")


def ipython(machine: Machine, *arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run IPython with these arguments and nothing loaded."""
    done = machine.command(
        *(sys.executable, "-m", "IPython", "--no-banner", "--colors=NoColor", "--no-term-title"),
        *arguments,
        **extra,
    )
    done.stderr = without_container(done.stderr)
    return done


def loaded(machine: Machine, *lines: str, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run lines in IPython with the extension loaded, up to the first error."""
    return ipython(machine, "--ext=reserve_gpu", "-c", "\n".join(lines), **extra)


def without_container(text: str) -> str:
    """The text less the warning that is due where the tests themselves run in a container."""
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("Warning: this container"))


def run_cells(machine: Machine, *cells: str, **extra: str) -> list[Shown]:
    """Run cells in one fresh IPython with the extension loaded, each whether or not one failed."""
    script = machine.folder / "runner.py"
    script.write_text(RUNNER)
    done = ipython(machine, "--ext=reserve_gpu", str(script), json.dumps(cells), **extra)
    assert done.stdout, done.stderr
    shown = [Shown(**answer) for answer in json.loads(done.stdout)]
    for one in shown:
        one.stderr = without_container(one.stderr)
    return shown


def configure(machine: Machine, *lines: str) -> None:
    """Give the machine's user the example configuration, with more lines at its end."""
    profile = machine.home / ".ipython" / "profile_default"
    profile.mkdir(parents=True)
    target = shutil.copy(ROOT / "ipython_config.py", profile)
    with open(target, "a", encoding="utf-8") as file:
        file.write("\n".join(["", *lines, ""]))


# -- loading and output ----------------------------------------------------------------------------


def test_load_ext_gives_the_magic(machine: Machine) -> None:
    """After %load_ext, %reserve_gpu prints the device and its variables to the letter."""
    done = ipython(machine, "-c", "%load_ext reserve_gpu\n%reserve_gpu")
    assert (done.stdout, done.stderr, done.returncode) == (ONE_DEVICE, "", 0)


def test_example_configuration_gives_the_magic(machine: Machine) -> None:
    """With the repository's ipython_config.py in the profile the magic is there at the start."""
    configure(machine)
    done = ipython(machine, "-c", "%reserve_gpu")
    assert (done.stdout, done.stderr, done.returncode) == (ONE_DEVICE, "", 0)


def test_ext_gives_the_magic_and_two_devices_get_a_line_each(machine: Machine) -> None:
    """With --ext too; several devices have a line each and share the variables, in order."""
    done = loaded(machine, "%reserve_gpu 1,0")
    assert (done.stdout, done.stderr, done.returncode) == (TWO_DEVICES, "", 0)


def test_without_the_extension_there_is_no_magic(machine: Machine) -> None:
    """Nothing adds the magic to a shell that did not ask for it."""
    done = ipython(machine, "-c", "import reserve_gpu\n%reserve_gpu")
    assert "not found" in done.stderr


def test_what_the_driver_does_not_say_is_left_out(machine: Machine) -> None:
    """An unreported link width leaves no gap in the line, an unreported memory sets no variable."""
    machine.write("gpu\n name X\n width none\n memory none\ngpu\n name Y")
    done = loaded(machine, "%reserve_gpu 0,1", CUDA_DEVICE_MEMORY="1")
    first, second, *rest = done.stdout.splitlines()
    assert first.startswith("Reserving GPU0: 0000:01:00.0 X (VBIOS ")
    assert second.startswith("Reserving GPU1: 0000:02:00.0 16x Y (VBIOS ")
    assert rest == ["CUDA_DEVICE_ORDER = 'PCI_BUS_ID'", "CUDA_VISIBLE_DEVICES = '0,1'"]


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


def test_devices_by_name(machine: Machine) -> None:
    """An index, a list, a UUID, its unique prefix, a bus id mean that device, order kept."""
    machine.write(FOUR)
    answers = run_cells(machine, *(f"%reserve_gpu {name}" for name, _, _ in NAMES))
    for (name, visible, memory), shown in zip(NAMES, answers, strict=True):
        assert shown.error is None, (name, shown.stderr)
        assert (shown.visible, shown.cuda["CUDA_DEVICE_MEMORY"]) == (visible, memory), name
        assert shown.stdout.count("Reserving ") == len(visible.split(",")), name


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
    ("1-3", "1-3"),
    ("0;1", "0;1"),
    ("\N{ARABIC-INDIC DIGIT ONE}", "\N{ARABIC-INDIC DIGIT ONE}"),
    ("\N{SUPERSCRIPT TWO}", "\N{SUPERSCRIPT TWO}"),
    ("all", "all"),
    ("''", "GPU"),
    (",", "GPU"),
    ("'1", "quot"),
    ("1\\", "escape"),
    ("--nonsense", "--nonsense"),
    ("1 --nonsense", "--nonsense"),
    ("--release=1", "--release"),
    ("--release 1", "--release"),
    ("\x1b[31mred", "names no GPU"),
    ("-n 0", "0"),
    ("-n two", "two"),
    ("-n 1.5", "1.5"),
    ("-n 5", "5 GPUs"),
    ("-n", "-n"),
    ("1 -n 2", "2"),
    ("--min-memory lots", "lots"),
    ("--min-memory -1", "-1"),
    ("--min-memory 1TB", "GiB"),
    ("--name Voodoo", "Voodoo"),
    ("--exclude 9", "GPU9"),
    ("--exclude x", "x"),
    ("1 --exclude 1", "excluded"),
    ("x" * 3000, "names no GPU"),
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
def test_rubbish_is_one_line_and_changes_nothing(machine: Machine, before: dict[str, str]) -> None:
    """A bad argument is one line on stderr that stops a run; no variable is touched."""
    machine.write(FOUR)
    cells = [f"%reserve_gpu {line}" for line, _ in RUBBISH]
    for (line, part), shown in zip(RUBBISH, run_cells(machine, *cells, **before), strict=True):
        assert shown.error == "UsageError", (line, shown)
        assert shown.stderr.startswith("UsageError: "), line
        assert len(shown.stderr.splitlines()) == 1, line
        assert part in shown.stderr, line
        assert "\x1b" not in shown.stderr, line
        assert len(shown.stderr) < 400, line
        assert shown.stdout == "", line
        assert shown.cuda == before, line


def test_rubbish_leaves_a_reservation_alone(machine: Machine) -> None:
    """A bad argument after a good one changes neither the reservation nor its variables."""
    good, *others = run_cells(
        machine,
        "%reserve_gpu 1",
        "%reserve_gpu 7",
        "%reserve_gpu 0,0",
        "%reserve_gpu 'x",
        "%reserve_gpu",
    )
    assert good.visible == "1"
    assert [shown.cuda for shown in others] == [good.cuda] * 4
    assert others[-1].stdout == good.stdout


def test_release_gives_the_variables_back(machine: Machine) -> None:
    """--release says what it let go of and restores each variable; twice is no error."""
    taken, first, second = run_cells(
        machine, "%reserve_gpu", "%reserve_gpu --release", "%reserve_gpu --release",
        CUDA_VISIBLE_DEVICES="1",
    )  # fmt: skip
    assert taken.visible == "1"
    assert "GPU1" in first.stdout
    assert "CUDA_VISIBLE_DEVICES = '1'" in first.stdout
    assert first.cuda == second.cuda == {"CUDA_VISIBLE_DEVICES": "1"}
    assert (second.error, second.stderr) == (None, "")
    assert "GPU1" not in second.stdout


def test_named_busy_device_warns_on_stderr(machine: Machine) -> None:
    """A busy device that is named is reserved, with one warning line that names the process."""
    machine.use("busy")
    (shown,) = run_cells(machine, "%reserve_gpu 0")
    assert shown.visible == "0"
    assert shown.stdout == ONE_DEVICE
    (warning,) = shown.stderr.splitlines()
    assert "GPU0" in warning
    assert "4321" in warning


def test_failure_stops_ipython(machine: Machine) -> None:
    """Where nothing is free `ipython -c` says why, without a traceback, and exits with 1."""
    machine.use("busy")
    done = loaded(machine, "%reserve_gpu", "print('went on')")
    assert done.returncode == 1
    shown = (done.stdout + done.stderr).splitlines()
    assert shown[0] == "No free GPU devices: 2 of 2 are in use."
    assert [line.split(":")[0] for line in shown[1:3]] == ["  GPU0", "  GPU1"]
    assert shown[-1] == "CUDA_VISIBLE_DEVICES = ''"
    assert "went on" not in shown
    assert "Traceback" not in done.stdout + done.stderr


# -- help and settings -----------------------------------------------------------------------------


def test_question_mark_shows_the_usage(machine: Machine) -> None:
    """`%reserve_gpu?` shows every option that the parser knows."""
    done = loaded(machine, "%reserve_gpu?")
    assert "%reserve_gpu [" in done.stdout
    assert "DEVICE" in done.stdout
    assert "--release" in done.stdout
    assert "PCI bus id" in done.stdout


def test_config_shows_and_changes_the_settings(machine: Machine) -> None:
    """`%config ReserveGPU` shows both settings, and what it sets holds for the next reservation."""
    machine.write("gpu\n memory 4096\n used 700")
    other = machine.folder / "other"
    listed, default, _, _, after, _, back = run_cells(
        machine,
        "%config ReserveGPU",
        "%reserve_gpu",
        "%config ReserveGPU.idle_memory = '800MiB'",
        f"%config ReserveGPU.lock_directory = {str(other)!r}",
        "%reserve_gpu",
        "%reserve_gpu --release\n%config ReserveGPU.idle_memory = ''",
        "%reserve_gpu",
    )
    assert "ReserveGPU.idle_memory" in listed.stdout
    assert str(machine.locks) in listed.stdout
    assert default.error == "NoFreeDeviceError"
    assert after.error is None
    assert after.visible == "0"
    assert [path.name for path in other.glob("GPU-*")]
    assert back.error == "NoFreeDeviceError"


def test_what_a_kernel_starts_has_its_settings(machine: Machine) -> None:
    """A child process of a shell uses the lock directory and threshold that %config set there."""
    cells = [
        f"%config ReserveGPU.lock_directory = {str(machine.folder / 'other')!r}",
        "%config ReserveGPU.idle_memory = '800MiB'",
        "!echo $RESERVE_GPU_LOCK_DIR $RESERVE_GPU_IDLE_MEMORY",
    ]
    assert loaded(machine, *cells).stdout.split() == [str(machine.folder / "other"), "800MiB"]


def test_bad_threshold_is_refused(machine: Machine) -> None:
    """A threshold that is no size is refused in one line and the one before stays."""
    _, refused, kept = run_cells(
        machine,
        "%config ReserveGPU.idle_memory = '2GB'",
        "%config ReserveGPU.idle_memory = 'lots'",
        "import os; print(os.environ['RESERVE_GPU_IDLE_MEMORY'])",
    )
    assert len((refused.stdout + refused.stderr).splitlines()) == 1
    assert "'lots'" in refused.stdout + refused.stderr
    assert kept.stdout == "2GB\n"


def test_settings_come_from_the_configuration_file(machine: Machine) -> None:
    """A configuration file sets both; an environment variable prevails over it."""
    machine.write("gpu\n memory 4096\n used 700")
    other = machine.folder / "other"
    configure(
        machine,
        "c.ReserveGPU.idle_memory = '800MiB'",
        f"c.ReserveGPU.lock_directory = {str(other)!r}",
    )
    assert ipython(machine, "-c", "%reserve_gpu", RESERVE_GPU_LOCK_DIR="").returncode == 0
    assert other.is_dir()
    assert not machine.locks.exists()
    assert ipython(machine, "-c", "%reserve_gpu").returncode == 0
    assert machine.locks.is_dir()
    assert ipython(machine, "-c", "%reserve_gpu", RESERVE_GPU_IDLE_MEMORY="1MiB").returncode == 1


@pytest.mark.parametrize("where", ["environment", "file"])
def test_bad_threshold_outside_is_no_traceback(machine: Machine, where: str) -> None:
    """A bad threshold in the environment or a configuration file is said without a traceback."""
    if where == "file":
        configure(machine, "c.ReserveGPU.idle_memory = 'lots'")
        done = ipython(machine, "-c", "%reserve_gpu")
    else:
        done = loaded(machine, "%reserve_gpu", RESERVE_GPU_IDLE_MEMORY="lots")
    assert "Traceback" not in done.stdout + done.stderr
    assert "'lots'" in done.stdout + done.stderr
    assert "Reserving" not in done.stdout


# -- loading, unloading, and what stays untouched --------------------------------------------------


def test_unload_and_reload_keep_the_reservation(machine: Machine) -> None:
    """Unloading takes magic and settings away, reloading brings both back; the GPU is kept."""
    taken, reloaded, _, gone, settings, _, again, settings_again = run_cells(
        machine,
        "%reserve_gpu 1",
        "%reload_ext reserve_gpu\n%reserve_gpu",
        "%unload_ext reserve_gpu",
        "%reserve_gpu",
        "%config ReserveGPU",
        "%load_ext reserve_gpu",
        "%reserve_gpu",
        "%config ReserveGPU.idle_memory",
    )
    assert reloaded.stdout == again.stdout == taken.stdout
    assert (gone.error, settings.error) == ("UsageError", "UsageError")
    assert gone.cuda == taken.cuda == again.cuda
    assert settings_again.error is None


def test_unloaded_shell_still_holds_its_gpu(machine: Machine) -> None:
    """While a shell that unloaded the extension lives, nobody else gets its GPU."""
    lines = [
        "import os, reserve_gpu",
        "%reserve_gpu 0",
        "%unload_ext reserve_gpu",
        "os.system(ask)",
    ]
    ask = f"{sys.executable} -c 'import reserve_gpu; print(reserve_gpu.reserve().environ)'"
    done = loaded(machine, f"ask = {ask!r}", *lines, CUDA_VISIBLE_DEVICES="0,1")
    assert "Reserving GPU0" in done.stdout
    # what the shell starts is fenced in by its CUDA_VISIBLE_DEVICES='0', and '0' is held
    assert "reserved by" in done.stderr


def test_loading_is_light(machine: Machine) -> None:
    """Loading the extension imports hardly more than itself, and calls no driver."""
    done = machine.python(
        "import sys, IPython\n"
        "from IPython.core.interactiveshell import InteractiveShell\n"
        "shell = InteractiveShell.instance()\n"
        "before = set(sys.modules)\n"
        "shell.run_line_magic('load_ext', 'reserve_gpu')\n"
        "print(*set(sys.modules) - before)"
    )
    fresh = set(done.stdout.split())
    ours = {name for name in fresh if name.startswith("reserve_gpu")}
    assert ours == {"reserve_gpu", "reserve_gpu.magic", "reserve_gpu.settings"}
    assert not fresh & {"pynvml", "psutil", "rich", "ctypes", "subprocess", "asyncio"}
    assert machine.calls() == []


@pytest.mark.parametrize("how", ["by hand", "by itself"])
def test_the_rest_is_loaded_after_a_cell_that_loads(machine: Machine, how: str) -> None:
    """A shell loads what a reservation needs after the cell that loads the extension, or never."""
    load = {
        "by hand": "shell.run_cell('%load_ext reserve_gpu')",
        "by itself": "shell.run_line_magic('load_ext', 'reserve_gpu'); shell.run_cell('1')",
    }
    done = machine.python(
        "import sys\n"
        "from IPython.core.interactiveshell import InteractiveShell\n"
        "shell = InteractiveShell.instance()\n"
        "before = set(sys.modules)\n"
        f"{load[how]}\n"
        "print(*set(sys.modules) - before)"
    )
    fresh = set(done.stdout.split())
    needed = {"reserve_gpu.commands", "reserve_gpu.attempt", "reserve_gpu.nvml"}
    assert fresh & needed == (needed if how == "by hand" else set())
    assert not fresh & {"pynvml", "psutil", "rich", "ctypes"}
    assert machine.calls() == []


def test_namespace_stays_the_persons(machine: Machine) -> None:
    """%reserve_gpu puts nothing into the user's namespace, and its value is None."""
    done = loaded(
        machine,
        "import reserve_gpu as _seen; before = None; after = None; before = set(globals())",
        "%reserve_gpu",
        "after = set(globals())",
        "print(after - before)",
        "value = %reserve_gpu",
        "print(value)",
    )
    assert done.stdout.splitlines()[-1] == "None"
    assert "set()" in done.stdout.splitlines()


def test_a_comment_is_no_argument(machine: Machine) -> None:
    """What stands behind # is a comment, as in Python."""
    done = machine.ipython("%reserve_gpu 1  # the one with the fan")
    assert "CUDA_VISIBLE_DEVICES = '1'" in done.stdout


def test_going_on_with_what_is_held(machine: Machine) -> None:
    """--optional says which GPU stays, where the kernel holds one."""
    done = machine.ipython("%reserve_gpu 1", "%reserve_gpu -n 3 --optional")
    assert "Going on with GPU1" in done.stdout
    assert "without" not in done.stdout


def test_sharing_warns_of_what_was_taken_alone(machine: Machine) -> None:
    """--share warns of the use of the GPU that was taken, not of those that were not."""
    machine.use("busy")
    done = machine.ipython("%reserve_gpu --share")
    assert "CUDA_VISIBLE_DEVICES = '1'" in done.stdout
    assert [line[:22] for line in done.stderr.splitlines()] == ["Warning: You share GPU"]


# -- the manual page -------------------------------------------------------------------------------


def test_the_manual_page(machine: Machine) -> None:
    """%reserve_gpu? is a sentence, each option with its meaning, and four examples that parse."""
    done = loaded(machine, "%reserve_gpu?", COLUMNS="80")
    page = done.stdout.partition("Docstring:\n")[2]
    assert page.startswith("Reserve a GPU for this kernel, and set the CUDA variables")
    for option in (*REQUEST, *MAGIC):
        flag = option.flags[-1] if option.flags != ("devices",) else "DEVICE"
        assert re.search(rf"^  (-\w \w+, )?{flag}( .*)?$", page, re.MULTILINE), flag
    examples = re.findall(
        r"^  %reserve_gpu(.*?)   .*", page.partition("examples:\n")[2], re.MULTILINE
    )
    assert len(examples) == 4
    for example in examples:
        magic_parser().parse_args(example.split())
    assert max(map(len, page.splitlines())) < 100
