"""The command line: reserve, then become the command."""

from __future__ import annotations

import json
import os
import sys
from contextlib import contextmanager, suppress
from fcntl import F_ADD_SEALS, LOCK_EX, LOCK_NB, fcntl, flock
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import reserve_gpu
from reserve_gpu.reservation import exec_handover
from reserve_gpu.system import procfs
from reserve_gpu.system.file_control import SEALS
from tests.support.frameworks import STANDINS
from tests.support.locked import have, held
from tests.support.machine import ROOT
from tests.support.processes import US
from tests.support.reserving import of_gpu

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.commandline import CommandLine
    from tests.support.here import Here

from tests.support.main import FORGERIES, RESERVED, both, left, run

# -- what can't be run ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "code", "text"),
    [
        ("nosuch", 127, "Command not found: nosuch."),
        ("./nosuch", 127, "Command not found: ./nosuch."),
        ("./plain", 126, "./plain is not executable by this user."),
        ("./", 126, "./ is a directory."),
        ("./folder", 126, "./folder is a directory."),
        ("", 127, "Command not found: ."),
        ("no\x1b[31msuch", 127, "Command not found: no\N{REPLACEMENT CHARACTER}[31msuch."),
    ],
)
def test_a_command_that_cannot_be_run_reserves_nothing(
    here: Here, typed: CommandLine, name: str, code: int, text: str
) -> None:
    """A command that can't be found or run is told of before anything is asked of the driver."""
    (here.folder / "plain").touch()
    (here.folder / "folder").mkdir()
    done = typed("run", "--wait", "--", name)
    assert (done.code, done.stdout, done.stderr) == (code, "", f"{text}\n")
    assert here.calls() == []
    assert not here.locks.exists()


EVERY = ["run", "status", "top", "report", "join", "list", "release", "check", "setup"]
EVERY += ["kernel install", "why", "skill"]
NO_SUCH = f"Unknown command {{}}. Choose from: {', '.join(EVERY)}. See"


USAGE = [
    ("run", "The command is missing. Usage: reserve-gpu run "),
    ("run --", "The command is missing. Usage: reserve-gpu run "),
    ("run 0 --", "The command is missing. Usage: reserve-gpu run "),
    ("run -n -1 -- true", "'-1' is not a valid number of GPUs. Example: -n 2.\n"),
    ("run nonsense -- true", "'nonsense' is not a GPU name"),
    ("run --wait soon -- true", "'soon' is not a valid duration"),
    (
        "run --for 99999999d -- true",
        "'99999999d' is too long. Give 34722d or less.\n",
    ),
    ("run 7 -- true", "There is no GPU7"),
    ("run -n 9 -- true", "9"),
    ("nonsense", NO_SUCH.format("nonsense")),
    ("kill 3", "Unknown command kill. Did you mean release? See"),
    ("wait", "Unknown command wait. Did you mean run --wait? See"),
    ("nonsense -- true", NO_SUCH.format("nonsense")),
    ("0 nonsense", NO_SUCH.format("0")),
    ("--gpus 2 true", NO_SUCH.format("--gpus")),
    ("0", "Unknown command 0. To run a program on a GPU: reserve-gpu run 0 -- COMMAND ...\n"),
    ("env A=1", "Unknown command env. To run a program on a GPU: reserve-gpu run -- env A=1\n"),
    ("-n 2 env", "To run a program on a GPU: reserve-gpu run -n 2 -- env\n"),
    ("start env", "Did you mean run, or %reserve_gpu in a notebook? See"),
    ("run 0", "The command is missing. Usage: reserve-gpu run "),
    ("run --quiet", "The command is missing. Usage: reserve-gpu run "),
    ("run 0 nonsense", "'nonsense' is not a GPU name"),
    ("run --memory 10 GB env", "Leave out the space: --memory 10GB\n"),
    ("run --memory 10 GB -- env", "Leave out the space: --memory 10GB\n"),
    ("run all -- env", "'all' is not a GPU name. For all "),
    ("report --since 7 d", "Leave out the space: --since 7d\n"),
    ("report --since yesterday 18:00", 'in quotes: --since "yesterday 18:00"\n'),
    ("kernel install --model A100", "Unknown option --model. Did you mean --gpu-name A100?\n"),
    ("why --note", "--note needs a value. See reserve-gpu why --help\n"),
    ("release GPU0", "You hold no GPU on this machine."),
    ("kernel show", "Did you mean kernel install? See"),
    (
        "status --nonsense",
        "Unknown option --nonsense. Choose from: --help, --format, ",
    ),
    ("status -- true", "See reserve-gpu status --help"),
    ("stat", "Unknown command stat. Did you mean status? See"),
    ("reserve", "Did you mean run, or %reserve_gpu in a notebook? See"),
    ("reserve 2 -n 3", "Did you mean run, or %reserve_gpu in a notebook? See"),
    ("free", "Did you mean release or status? See"),
    ("install", "Did you mean setup or kernel install? See"),
    ("ps aux", "Did you mean status or list? See"),
    ("help nonsense", NO_SUCH.format("nonsense")),
    ("run -n two -- true", "'two' is not a valid number of GPUs. Example: -n 2.\n"),
    (
        "run -n -- true",
        (
            "-n needs a value: number of GPUs; the best-connected ones are chosen. "
            "See reserve-gpu run --help\n"
        ),
    ),
    ("run --for -- true", "--for needs a value: release the GPU after 90s, 30m, 4h or 2d. See"),
    ("kernel install --idle", "--idle needs a value: release the GPU when no cell has run "),
    (
        "kernel install --prefix",
        "--prefix needs a value: install in DIR/share/jupyter/kernels. See",
    ),
    ("status --json=3", "See reserve-gpu status --help\n"),
    ("status --format", "--format needs a value: text (the default), json (for programs)"),
    ("status --format htlm", "Invalid value 'htlm' for --format. Did you mean html?\n"),
    ("report --by users", "Invalid value 'users' for --by. Did you mean user?\n"),
    ("status 3", "Unexpected argument: 3. "),
    ("--status --json", "Unknown command --status. Did you mean status? See"),
    ("0-1 -- env", "To run a program on a GPU: reserve-gpu run 0-1 -- env\n"),
    ("kernel list", "Unknown command kernel list. Did you mean kernel install? See"),
    ("status --watch", "Unknown option --watch. Choose from: "),
    ("status --jsno", "Unknown option --jsno. Did you mean --json?\n"),
    ("run --wiat=1h -- true x", "Unknown option --wiat. Did you mean --wait?\n"),
    ("run --gpu=1 -- true", "Unknown option --gpu. Name GPUs without an option: 1\n"),
    ("run -w -- true", "Unknown option -w. Did you mean --wait?"),
    ("run wait -- true", "'wait' is not a GPU name. Did you mean --wait?\n"),
    (
        "run 0 --name RTX 2080 Ti -- true",
        "Unexpected '2080' after --name RTX. Put the value in quotes: --name \"RTX 2080 Ti\"\n",
    ),
]


@pytest.mark.parametrize(("words", "text"), USAGE)
def test_usage(typed: CommandLine, words: str, text: str) -> None:
    """A request that makes no sense is told in one line, with exit code 2."""
    done = typed(*words.split())
    assert (done.code, done.stdout) == (2, "")
    assert text in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("wishes", ["", "--for 1h", "--wait 1h"])
def test_quiet(typed: CommandLine, wishes: str) -> None:
    """With --quiet nothing is said where all goes well; what fails is said as ever."""
    done = typed("run", "-q", *wishes.split(), "--", "true")
    assert (done.visible, done.stderr) == ("0", "")
    assert "There is no GPU7" in typed("run", "--quiet", "7", "--", "true").stderr


@pytest.mark.parametrize("words", ["", "run", "status", "kernel", "kernel install"])
def test_help_in_short(typed: CommandLine, words: str) -> None:
    """`-h` shows the help that --help shows, also of a group of commands."""
    done, asked = typed(*words.split(), "-h"), typed(*words.split(), "--help")
    assert (done.code, done.stdout, done.stderr) == (0, asked.stdout, "")


@pytest.mark.parametrize("words", ["", "run", "kernel", "kernel install"])
def test_help_as_a_command(typed: CommandLine, words: str) -> None:
    """`reserve-gpu help run` shows the help of run, as `reserve-gpu run --help`."""
    done, asked = typed("help", *words.split()), typed(*words.split(), "--help")
    assert (done.code, done.stdout, done.stderr) == (0, asked.stdout, "")


@pytest.mark.parametrize("words", ["", "kernel"])
def test_no_command(here: Here, typed: CommandLine, words: str) -> None:
    """Who gives no command is shown the help on stdout; a script learns by exit code 2."""
    done, asked = typed(*words.split()), typed(*words.split(), "--help")
    assert (done.code, done.stdout, done.stderr) == (2, asked.stdout, "")
    assert here.calls() == []


def test_values_of_several_words(here: Here, typed: CommandLine) -> None:
    """A value of several words stands in quotation marks; what follows one names GPUs."""
    words = ["--wait", "1 h", "--min-memory", "4 GB", "--note", "until Friday"]
    done = typed("run", *words, "--", "true")
    assert (done.visible, done.argv) == ("0", ["true"])
    assert typed("run", "--wait", "1s", "1", "--", "true").visible == "1"
    assert typed("run", "--note", "x", "GPU1", "--", "true").visible == "1"


@pytest.mark.parametrize(
    ("words", "argv"),
    [
        ("-- env", "env"),
        ("-- env --", "env --"),
        ("-- env -- -n 2", "env -- -n 2"),
        ("0 -n 1 --wait -- env --help", "env --help"),
        ("env", "env"),
        ("env -n 2 --wait", "env -n 2 --wait"),
        ("env 1", "env 1"),
        ("--name GTX -- env 0", "env 0"),
    ],
)
def test_where_the_command_begins(typed: CommandLine, words: str, argv: str) -> None:
    """The command is what follows the first `--`; or all, if it begins with the command."""
    done = typed("run", *words.split())
    assert done.argv == argv.split(), done.stderr
    assert done.stderr == RESERVED
    assert done.visible == "0"


@pytest.mark.parametrize(
    "own",
    [
        "0", "1:0", "1,3", "GPU-8f2a", "0000:01:00.0", "-n 1", "-n1", "--note=0", "--note x",
        "--wait", "--wait 1h", "0 --optional",
    ],
)  # fmt: skip
def test_a_command_after_options_or_devices_needs_a_sign(
    here: Here, typed: CommandLine, own: str
) -> None:
    """A command after options or GPUs, but without `--`, is refused with the corrected line."""
    done = typed("run", *own.split(), "env", "-u", "A")
    line = f"reserve-gpu run {own} -- env -u A"
    assert (done.code, done.stderr) == (2, f"Put -- before the command: {line}\n")
    assert here.calls() == []


@pytest.mark.parametrize(
    "words",
    [
        "--help", "run --help", "run -h", "run --wait --help", "run --help env", "status --help",
        "check --help", "report --help", "kernel --help", "kernel install --help", "top --help",
        "join --help", "list --help", "release --help", "setup --help",
    ],
)  # fmt: skip
def test_help(here: Here, typed: CommandLine, monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    """--help tells of each command what there is to know, in 80 columns, and touches no GPU."""
    monkeypatch.setenv("COLUMNS", "80")
    done = typed(*words.split())
    assert [line for line in done.stdout.splitlines() if len(line) > 80] == []
    assert (done.code, done.stderr, done.argv) == (0, "", None)
    assert done.stdout.startswith("usage: reserve-gpu")
    assert "kernel start" not in done.stdout
    assert here.calls() == []
    if words == "run --help":
        assert "exit codes:" in done.stdout
        assert "--min-memory SIZE" in done.stdout


def test_version(typed: CommandLine) -> None:
    """--version is one line."""
    done = typed("--version")
    assert (done.code, done.stderr) == (0, "")
    assert done.stdout.startswith("reserve-gpu")
    assert done.stdout.count("\n") == 1


OLD_KERNEL = "kernel start 0 1:0 --count=2 --min-memory=16GB --name=A100 --wait=10s --note=mine --"
KERNEL = ("python", "-m", "ipykernel_launcher", "-f", "{connection_file}", "--ext", "reserve_gpu")


@pytest.mark.parametrize("words", ["--idle 1h", "--idle=1h", "--if-wanted", "--end-kernel"])
def test_what_only_kernels_can_promise(typed: CommandLine, words: str) -> None:
    """A command has none of the options that are for kernels."""
    done = typed("run", *words.split(), "--", "true")
    assert done.code == 2
    assert done.stderr.startswith("Unknown option --")


@pytest.mark.parametrize("words", ["kernel start --", OLD_KERNEL])
def test_words_of_installed_kernels(here: Here, typed: CommandLine, words: str) -> None:
    """A kernel that an earlier version has installed starts, with every option that it may have.

    With the second words there is no GPU that would do.
    """
    done = typed(*words.split(), *KERNEL)
    assert done.argv == list(KERNEL)
    assert done.visible == ("" if words == OLD_KERNEL else "0")
    assert "unrecognized" not in done.stderr


# -- no GPU ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("terminal")
def test_nothing_free(here: Here, typed: CommandLine) -> None:
    """Where no GPU is free nothing is run, and what can be done is said in a shell's words."""
    with both(here):
        done = typed("run", "--", "echo", "ran")
    assert (done.code, done.stdout, done.argv) == (75, "", None)
    first, ask, wait, *_ = done.stderr.splitlines()
    assert first == "No free GPU: 2 reserved.  2 x GeForce GTX 1050 Ti"
    for number in "01":
        assert of_gpu(done.stderr, number).startswith("reserved: ")
        assert f"rival.ipynb (pid {os.getpid()})" in of_gpu(done.stderr, number)
    name = f"rival.ipynb (pid {os.getpid()})"
    release = f"reserve-gpu release {os.getpid()}"
    held = f"You hold GPU0 and GPU1 in {name}. To release them: {release}"
    assert ask == held
    assert wait == "Or wait in the queue: reserve-gpu run --wait -- echo ran"


def test_the_wait_ran_out(here: Here, typed: CommandLine) -> None:
    """A wait that runs out is exit code 75."""
    with both(here):
        done = typed("run", "--wait", "0.1s", "--", "echo", "ran")
    assert (done.code, done.argv) == (75, None)
    assert "Timed out after 0.1 s. No free GPU" in done.stderr


DRIVER_NOT_LOADED = "fail nvmlInitWithFlags * 9"


def test_no_driver(here: Here, typed: CommandLine) -> None:
    """Without a driver it is exit code 69; with --optional the command runs as it would have."""
    here.add(DRIVER_NOT_LOADED)
    os.environ["CUDA_VISIBLE_DEVICES"] = "3"
    for words in (["run", "--", "env"], ["status"], ["status", "--json"], ["check"]):
        done = typed(*words)
        assert (done.code, done.stdout, done.argv) == (69, "", None)
        assert "The NVIDIA driver's kernel module is not loaded." in done.stderr
    done = typed("run", "--optional", "--", "env")
    assert (done.argv, done.visible) == (["env"], "3")
    assert done.stderr.splitlines()[-1] == "Continuing without a GPU."


def test_no_gpu_is_shown(here: Here, typed: CommandLine) -> None:
    """A driver that shows no GPU may show one later: with --optional none is visible then."""
    here.write("count 0\ngpu")
    os.environ["CUDA_VISIBLE_DEVICES"] = "3"
    done = typed("run", "--", "env")
    assert (done.code, done.stdout, done.argv) == (69, "", None)
    done = typed("run", "--optional", "--", "env")
    assert (done.argv, done.visible) == (["env"], "")


def test_optional(here: Here, typed: CommandLine) -> None:
    """With --optional a command runs without a GPU, none visible to it, and the reason is said."""
    with both(here):
        done = typed("run", "--optional", "--", "env")
    assert (done.argv, done.visible) == (["env"], "")
    assert done.stderr.startswith("No free GPU")
    assert done.stderr.endswith("\nContinuing without a GPU.\n")


def test_no_lock_directory(here: Here, typed: CommandLine) -> None:
    """A lock directory that can't be used is exit code 78 and one line."""
    os.environ["RESERVE_GPU_LOCK_DIR"] = "/dev/null/x"
    done = typed("run", "--", "true")
    assert (done.code, done.argv, done.stderr.count("\n")) == (78, None, 1)
    assert "RESERVE_GPU_LOCK_DIR" in done.stderr


def test_a_warning_is_a_line(here: Here, typed: CommandLine) -> None:
    """A named GPU that is in use is taken with a warning on stderr."""
    here.use("busy")
    done = typed("run", "0", "--", "true")
    assert done.argv == ["true"]
    assert done.stderr.startswith("Warning: You asked for GPU0: it is busy")
    assert "\nReserving GPU0" in done.stderr


HELD: dict[str, Any] = {"before": {}, "written": {}, "record": {}, "reason": None}


NONE_LEFT = {**HELD, "devices": [], "locks": [], "reason": "No GPU was free."}

# What RESERVE_GPU_HELD may say. PID is the process's own, "LOCK" the descriptor of GPU-x.lock,
# locked, "FREE" one of the same file, not locked, and "OTHER" one of another file, locked.
TRUE = f"PID {json.dumps(left())}"
DEVICE = {"index": 0, "uuid": "GPU-x"}


@contextmanager
def forged(here: Here, text: str) -> Iterator[None]:
    """Let the environment say so of this process, which has the lock of GPU-x, and of other."""
    here.locks.mkdir(mode=0o1777)
    paths = [here.locks / name for name in ("GPU-x.lock", "GPU-x.lock", "other.lock")]
    files = [os.open(path, os.O_RDWR | os.O_CREAT, 0o666) for path in paths]
    lock, _, other = files
    for file in (lock, other):
        flock(file, LOCK_EX | LOCK_NB)
    for name, file in zip(("LOCK", "FREE", "OTHER"), files, strict=True):
        text = text.replace(f'"{name}"', str(file))
    os.environ["RESERVE_GPU_HELD"] = text.replace("PID", str(os.getpid()))
    try:
        yield
    finally:
        del os.environ["RESERVE_GPU_HELD"]
        for file in files:
            with suppress(OSError):  # adopted, and closed already
                os.close(file)


def test_what_is_true_is_adopted(here: Here) -> None:
    """What the environment says of a reservation is believed where the kernel confirms it."""
    with forged(here, TRUE):
        given = exec_handover.received()
        assert given
        assert [device.uuid for device in given.held.devices] == ["GPU-x"]
        given.held.locks["GPU-x"].release()


@pytest.mark.parametrize("name", FORGERIES)
def test_forgeries_are_ignored(here: Here, name: str) -> None:
    """What the environment says of a reservation is ignored without a word where it is not so."""
    with forged(here, FORGERIES[name]):
        assert exec_handover.received() is None


def memory_file(text: str, seals: int) -> int:
    """Return the descriptor of a file in memory that contains the text."""
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.write(descriptor, text.encode())
    fcntl(descriptor, F_ADD_SEALS, seals)
    return descriptor


F_SEAL_EXEC = 0x20  # added by the kernel if the sysctl vm.memfd_noexec is set


@pytest.mark.parametrize(
    ("seals", "is_read"), [(SEALS, True), (SEALS | F_SEAL_EXEC, True), (0, False)]
)
def test_only_a_sealed_file_is_read(here: Here, *, seals: int, is_read: bool) -> None:
    """A file that can still be changed is neither read nor closed, even if its content is valid."""
    with forged(here, TRUE):
        data = os.environ["RESERVE_GPU_HELD"].partition(" ")[2]
        descriptor = memory_file(data, seals)
        os.environ["RESERVE_GPU_HELD"] = f"{procfs.stamp(os.getpid())} {descriptor}"
        assert (exec_handover.received() is not None) == is_read
    assert os.path.exists(f"/proc/self/fd/{descriptor}") != is_read


@pytest.mark.parametrize("descriptor", ["0", "999", "9" * 30, "-1", "x"])
def test_another_descriptor_is_ignored(here: Here, descriptor: str) -> None:
    """A descriptor that is no sealed file in memory is ignored."""
    with forged(here, f"{procfs.stamp(os.getpid())} {descriptor}"):
        assert exec_handover.received() is None


@pytest.mark.parametrize("is_absolute", [False, True])
def test_a_lock_is_in_the_lock_directory(here: Here, *, is_absolute: bool) -> None:
    """A lock in another folder is none, though the environment gives its path."""
    path = here.folder / "elsewhere.lock"
    name = str(path) if is_absolute else f"../{path.name}"
    with have(path) as file:
        fields = left(locks=[[file, name]])
        with forged(here, f"PID {json.dumps(fields)}"):
            assert exec_handover.received() is None


def test_a_lock_of_another_opening_is_not_adopted(here: Here) -> None:
    """A descriptor of a GPU's lock file is nothing, though the same file is locked by another."""
    name = f"{here.uuid('0')}.lock"
    with here.rival("0"):
        file = os.open(here.locks / name, os.O_RDWR)
        device = {"index": 0, "uuid": here.uuid("0")}
        told = HELD | {"devices": [device], "locks": [[file, name]]}
        os.environ["RESERVE_GPU_HELD"] = f"{os.getpid()} {json.dumps(told)}"
        assert exec_handover.received() is None
        os.close(file)


def test_status(here: Here, typed: CommandLine) -> None:
    """`status` shows what %reserve_gpu --status shows, and --json the same for programs."""
    with here.rival("1"):
        text, told = typed("status"), typed("status", "--json")
        expected = reserve_gpu.status()
    assert (text.code, text.stderr, told.code, told.stderr) == (0, "", 0, "")
    assert f"rival.ipynb (pid {os.getpid()})" in text.stdout
    assert "\x1b" not in text.stdout
    shown, expected_devices = json.loads(told.stdout)["devices"], expected.to_dict()["devices"]
    for each in (*shown, *expected_devices):
        del each["idle_for_s"]  # of the moment
    assert shown == json.loads(json.dumps(expected_devices))


@pytest.mark.full
@pytest.mark.process
def test_check_below_run(here: Here) -> None:
    """`reserve-gpu run -- reserve-gpu check` says whether a command's GPU would be used."""
    standins = {"PYTHONPATH": STANDINS}  # whatever is installed here
    fits = here.command(*US, "run", "1", "--", *US, "check", **standins)
    assert (fits.returncode, "Reserved: GPU1." in fits.stdout) == (0, True), fits
    change = 'CUDA_VISIBLE_DEVICES=0 exec "$@"'  # `env CUDA_VISIBLE_DEVICES=0` would be refused
    changed = ("sh", "-c", change, "sh", *US, "check", "--json")
    does_not = here.command(*US, "run", "1", "--", *changed, **standins)
    assert json.loads(does_not.stdout)
    assert does_not.returncode == 1, does_not


@pytest.mark.full
@pytest.mark.needs("frameworks")
def test_torchrun(here: Here) -> None:
    """Each rank of a torchrun sees the GPUs that it was started with."""
    (here.folder / "rank.py").write_text(  # in one piece: what they print is unbuffered
        "import os, torch\n"
        "line = os.environ['LOCAL_RANK'] + ' ' + os.environ['CUDA_VISIBLE_DEVICES'] + '\\n'\n"
        "os.write(1, line.encode())\n"
    )
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "rank.py")
    done = run(here, "-n", "2", "--", *torchrun)
    assert sorted(done.stdout.splitlines()) == ["0 0,1", "1 0,1"], done.stderr
    assert held(here) == []


@pytest.mark.full
@pytest.mark.needs("engines")
def test_jupyterhub(here: Here, script: str) -> None:
    """A server that JupyterHub's spawner starts so is the process that it polls and stops."""
    server = here.folder / "server.py"
    server.write_text(
        "import os, signal, sys\n"
        "with open('started', 'w') as pipe:\n"
        "    print(os.getpid(), os.environ['CUDA_VISIBLE_DEVICES'], sys.argv[0], file=pipe)\n"
        "signal.pause()\n"
    )
    os.mkfifo(here.folder / "started")
    path = f"{Path(script).parent}:{os.environ['PATH']}"
    words = ("reserve-gpu", "run", "--", sys.executable, "server.py")
    done = here.command(
        sys.executable, str(ROOT / "tests" / "support" / "hub.py"), *words, PATH=path
    )
    pid, running, *told, stopped = done.stdout.split()
    assert (running, told, stopped) == ("None", [pid, "0", "server.py"], "False"), done.stderr
    assert held(here) == []
