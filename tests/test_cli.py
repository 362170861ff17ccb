"""The command line: reserve, then become the command."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
from contextlib import ExitStack, contextmanager, suppress
from fcntl import F_ADD_SEALS, LOCK_EX, LOCK_NB, fcntl, flock
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import reserve_gpu
from reserve_gpu.model import errors
from reserve_gpu.reservation import exec_handover
from reserve_gpu.system import procfs
from reserve_gpu.system.file_control import SEALS
from tests.commandline import CommandLine
from tests.frameworks import STANDINS, installed
from tests.locked import have, held
from tests.machine import LIMIT_S, ROOT, Child, program
from tests.processes import US, is_running, living, queue, wait_for
from tests.reserving import of_gpu

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.here import Here

RESERVED = """\
Reserving GPU0: 0000:01:00.0 16x GeForce GTX 1050 Ti (VBIOS 86.07.22.00.A8)
CUDA_DEVICE_MEMORY = '4038'
CUDA_DEVICE_ORDER = 'PCI_BUS_ID'
CUDA_VISIBLE_DEVICES = '0'
"""
WAITING = "Waiting for a GPU: next in the queue"


@pytest.fixture
def typed(here: Here, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    """Run `reserve-gpu` on the machine of this process."""
    return CommandLine(capsys)


def run(here: Here, *words: str, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run `reserve-gpu run WORDS` in a process of its own, to its end."""
    return here.command(*US, "run", *words, **extra)


@contextmanager
def started(here: Here, *options: str, **extra: str) -> Iterator[Child]:
    """Make a Python process started by `reserve-gpu run OPTIONS --`; killed at the end."""
    child = Child(here.environ(**extra), here.folder, *US, "run", *options, "--")
    try:
        yield child
    finally:
        child.kill()


@contextmanager
def waiter(
    here: Here, *words: str, stderr: int = subprocess.PIPE, **extra: str
) -> Iterator[subprocess.Popen[str]]:
    """Start `reserve-gpu run --wait WORDS`, wait until it waits, and kill it at the end."""
    process = subprocess.Popen(
        [*US, "run", "--wait", *words], env=here.environ(**extra), cwd=here.folder, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr,
    )  # fmt: skip
    try:
        if process.stderr:
            assert process.stderr.readline().startswith(WAITING)
        yield process
    finally:
        process.kill()
        process.communicate()


@contextmanager
def both(here: Here) -> Iterator[ExitStack]:
    """Let somebody else have both GPUs, until the end or until the stack is closed: GPU0 first."""
    with ExitStack() as rivals:
        for number in "10":
            rivals.enter_context(here.rival(number))
        yield rivals


@pytest.fixture
def script(here: Here) -> str:
    """Return the `reserve-gpu` that pip makes of the entry point, in a directory of its own."""
    folder = here.folder / "bin"
    folder.mkdir()
    path = folder / "reserve-gpu"
    path.write_text(
        f"#!{sys.executable}\nimport sys\nfrom reserve_gpu.__main__ import main\nsys.exit(main())\n"
    )
    path.chmod(0o755)
    return str(path)


# -- the command is the process ------------------------------------------------------------------


@pytest.mark.promise
@pytest.mark.process
def test_the_command_is_the_process(here: Here) -> None:
    """The command has the pid that was started, our own as its parent, and nothing beside it."""
    with started(here) as child:
        assert child.pid == child.process.pid
        assert child.run("os.getppid()").value == os.getpid()
        assert child.run("open('/proc/self/task/%d/children' % os.getpid()).read()").value == ""
        assert child.visible() == "0"
        assert held(here) == [0]
        child.kill()
        assert held(here) == []


@pytest.mark.promise
@pytest.mark.process
@pytest.mark.parametrize("name", ["reserve-gpu", "python -m reserve_gpu"])
def test_stdout_is_the_commands_own(here: Here, script: str, name: str) -> None:
    """What a reservation prints goes to stderr, to the letter; stdin and stdout are untouched."""
    ours = (script,) if name == "reserve-gpu" else US
    done = subprocess.run(
        [*ours, "run", "--", "sh", "-c", "cat; echo $0 $CUDA_VISIBLE_DEVICES; exit 7", "--", "-n"],
        env=here.environ(), cwd=here.folder, text=True, capture_output=True, input="told\n",
        check=False, timeout=LIMIT_S,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (7, "told\n-- 0\n", RESERVED)


# At the import of this module the process gets SIGINT: what Ctrl-C does, at a moment that is known.
AT_IMPORT = """
import os, sys
def watch(event, arguments):
    if event == "import" and arguments[0] == os.environ["AT"]:
        os.kill(os.getpid(), 2)
sys.addaudithook(watch)
"""


@pytest.mark.process
@pytest.mark.parametrize("name", ["reserve-gpu", "python -m reserve_gpu"])
@pytest.mark.parametrize(
    "at",
    ["signal", "reserve_gpu.model.errors", "fcntl", "reserve_gpu.commands.run.lookup", "gettext"],
)
def test_interrupted_while_it_starts(here: Here, script: str, name: str, at: str) -> None:
    """Ctrl-C while the command line starts ends it with nothing on the screen but one line."""
    (here.folder / "sitecustomize.py").write_text(AT_IMPORT)
    ours = (script,) if name == "reserve-gpu" else US
    path = f"{here.folder}:{ROOT}"
    done = here.command(*ours, "run", "--", "touch", "started", AT=at, PYTHONPATH=path)
    assert done.returncode in (-signal.SIGINT, 130)  # both are 130 to a shell
    assert done.stdout + done.stderr in ("", "Interrupted. Nothing was reserved.\n")
    assert not (here.folder / "started").exists()


@pytest.mark.process
def test_an_ignored_interrupt_stays_ignored(here: Here, script: str) -> None:
    """Where Ctrl-C is ignored, as after nohup or for a job in the background, it stays so."""
    (here.folder / "sitecustomize.py").write_text(AT_IMPORT)
    ignoring = ("sh", "-c", f"trap '' INT; exec {script} run -- echo started")
    path = f"{here.folder}:{ROOT}"
    done = here.command(*ignoring, AT="reserve_gpu.model.errors", PYTHONPATH=path)
    assert done.stdout == "started\n", done.stderr


@pytest.mark.process
def test_an_interrupt_is_left_to_those_who_import(here: Here) -> None:
    """Importing the package leaves Ctrl-C as it was, whatever the words of the program are."""
    code = "import signal, reserve_gpu.cli.main; print(signal.getsignal(signal.SIGINT))"
    done = here.command(sys.executable, "-c", code, "-m", "reserve_gpu", "reserve-gpu")
    assert "default_int_handler" in done.stdout


@pytest.mark.process
@pytest.mark.parametrize("before", [(), ("nohup",)], ids=["", "nohup"])
def test_signals_are_as_they_were(here: Here, before: tuple[str, ...]) -> None:
    """A command ignores, catches and blocks the signals that it would without us, and no other."""
    ask = ("grep", "-E", "^Sig(Blk|Ign|Cgt)", "/proc/self/status")
    expected = here.command(*before, *ask).stdout
    assert expected.count("\n") == 3
    assert here.command(*before, *US, "run", "--", *ask).stdout == expected


@pytest.mark.process
@pytest.mark.parametrize("number", ["INT", "PIPE"])
def test_signals_are_the_commands_own(here: Here, number: str) -> None:
    """A command ends by a signal as it would without us: also by one that Python ignores."""
    done = run(here, "--", "sh", "-c", f"kill -{number} $$; sleep 1")
    assert done.returncode == -getattr(signal, f"SIG{number}")
    assert held(here) == []


@pytest.mark.process
def test_stopped_and_continued(here: Here) -> None:
    """A stopped command keeps its GPU and goes on where it was."""
    with started(here) as child:
        child.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        assert held(here) == [0]
        child.process.send_signal(signal.SIGCONT)
        assert child.run("1 + 1").value == 2


@pytest.mark.process
def test_a_script_that_uses_low_descriptors_keeps_the_gpu(here: Here) -> None:
    """A shell script that opens descriptors by number, as many do, does not close the lock."""
    opens = "".join(f"exec {number}>file; " for number in range(3, 10))
    again = "env -u CUDA_VISIBLE_DEVICES -u RESERVE_GPU_HELD"
    us = " ".join(US)
    done = run(here, "0", "--", "sh", "-c", f"{opens}{again} {us} run 0 -- echo mine too")
    assert "mine too" not in done.stdout
    assert of_gpu(done.stderr).startswith("reserved: ")


@pytest.mark.promise
@pytest.mark.process
def test_a_job_in_the_background_keeps_the_gpu(here: Here, typed: CommandLine) -> None:
    """What a command leaves running keeps its GPU, and is named as the holder, until it ends.

    Not a process that only has the same file open, as this one has.
    """
    done = run(here, "--", "sh", "-c", "sleep 1000 >/dev/null 2>&1 & echo $!")
    job = int(done.stdout)
    with living(job), (here.locks / f"{here.uuid('0')}.lock").open():
        assert f"(pid {job})" in typed("status").stdout
        assert held(here) == [0]
    wait_for(lambda: not is_running(job))
    assert held(here) == []


@pytest.mark.process
def test_nothing_else_is_open_in_the_command(here: Here) -> None:
    """Besides its own files, a command has the lock files and the file that describes them open."""
    code = "import os\nfor n in range(3, 200):\n try: print(os.readlink(f'/proc/self/fd/{n}'))\n"
    code += " except OSError: pass"
    before = set(here.python(code).stdout.splitlines())
    with_us = set(run(here, "-n", "2", "--", sys.executable, "-c", code).stdout.splitlines())
    own = f"record-{os.geteuid()}-0"
    locks = {
        str(here.locks / f"{here.uuid(number)}.{end}") for number in "01" for end in ("lock", own)
    }
    assert with_us - before == locks | {"/memfd:reserve_gpu (deleted)"}


CLOSED = ("sh", "-c", 'exec "$@" <&- >&- 2>&-', "-")


@pytest.mark.process
@pytest.mark.parametrize("words", [["run"], ["run", "--wait"]])
def test_closed_standard_descriptors_stay_closed(here: Here, words: list[str]) -> None:
    """Where stdin, stdout and stderr are closed no lock comes to stand in for one of them."""
    code = """if True:
        import os, reserve_gpu
        found = [n for n in range(200) if os.path.exists(f"/proc/self/fd/{n}")]
        locked = [n for n in found if os.readlink(f"/proc/self/fd/{n}").endswith(".lock")]
        open("out.txt", "w").write(f"{min(found) > 2} {min(locked) > 2} {reserve_gpu.current()!r}")
    """
    done = here.command(*CLOSED, *US, *words, "--", sys.executable, "-c", code)
    assert done.returncode == 0
    assert (here.folder / "out.txt").read_text() == "True True <Reservation of GPU0>"


@pytest.mark.process
def test_closed_standard_descriptors_are_nowhere(here: Here) -> None:
    """Until then nothing that is opened gets their numbers, and what is printed goes nowhere."""
    code = """if True:
        import os, sys
        from reserve_gpu.cli.main import main
        ends = main(["status"]), main(["nonsense"])
        files = [os.readlink(f"/proc/self/fd/{n}") for n in range(3)]
        open("out.txt", "w").write(f"{ends} {set(files)}")
    """
    here.command(*CLOSED, sys.executable, "-c", code)
    assert (here.folder / "out.txt").read_text() == "(0, 2) {'/dev/null'}"


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


@pytest.mark.process
def test_a_script_without_a_first_line(here: Here) -> None:
    """A file that the system can't execute is told of with the remedy, and its GPU is free."""
    path = here.folder / "script"
    path.write_text("echo hello\n")
    path.chmod(0o755)
    done = run(here, "--", "./script")
    assert done.returncode == 126
    assert done.stderr.splitlines()[-1] == (
        "./script can't be run: Exec format error. A script needs a first line such as #!/bin/sh."
    )
    assert held(here) == []


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


@pytest.mark.process
def test_a_python_that_goes_on_without_can_reserve_later(here: Here) -> None:
    """The emptiness that --optional left is no limit to what the same process asks for later."""
    with both(here) as rivals, started(here, "--optional") as child:
        assert child.visible() == ""
        rivals.close()
        assert child.reserve().value == "0"
        child.run("reserve_gpu.release()")
        assert child.visible() is None


def test_no_lock_directory(here: Here, typed: CommandLine) -> None:
    """A lock directory that can't be used is exit code 78 and one line."""
    os.environ["RESERVE_GPU_LOCK_DIR"] = "/dev/null/x"
    done = typed("run", "--", "true")
    assert (done.code, done.argv, done.stderr.count("\n")) == (78, None, 1)
    assert "RESERVE_GPU_LOCK_DIR" in done.stderr


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.ReserveGPUError, 70),
        (errors.RequestError, 2),
        (errors.ImpossibleError, 2),
        (errors.TooLateError, 70),
        (errors.NoFreeDeviceError, 75),
        (errors.WaitTimeoutError, 75),
        (errors.ReservedAboveError, 75),
        (errors.DriverError, 69),
        (errors.NoDriverError, 69),
        (errors.LockError, 78),
        (errors.MutexHeldError, 75),
    ],
)
def test_exit_codes(kind: type[errors.ReserveGPUError], code: int) -> None:
    """Each error has its exit code: 75 where another try may do, 69 and 78 where none will."""
    assert kind("text").exit_code == code


def test_a_warning_is_a_line(here: Here, typed: CommandLine) -> None:
    """A named GPU that is in use is taken with a warning on stderr."""
    here.use("busy")
    done = typed("run", "0", "--", "true")
    assert done.argv == ["true"]
    assert done.stderr.startswith("Warning: You asked for GPU0: it is busy")
    assert "\nReserving GPU0" in done.stderr


# -- waiting --------------------------------------------------------------------------------------


@pytest.mark.process
def test_a_wait_in_a_log(here: Here) -> None:
    """Without a terminal a wait is plain lines on stderr, and then the command runs."""
    with both(here) as rivals, waiter(here, "--", "echo", "ran") as process:
        rivals.close()
        out, said = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, out) == (0, "ran\n")
    assert re.sub(r"^Waited for \d+ s\.\n", "", said) == RESERVED


@pytest.mark.process
def test_a_wait_on_a_terminal(here: Here) -> None:
    """On a terminal a wait is a picture on stderr that is replaced, and gone at the end."""
    terminal, end = pty.openpty()
    said = b""
    with (
        both(here) as rivals,
        waiter(here, "--", "echo", "ran", stderr=end, TERM="vt100") as process,
    ):
        os.close(end)
        while b"Waiting" not in said:
            said += os.read(terminal, 4096)
        rivals.close()
        assert process.communicate(timeout=LIMIT_S)[0] == "ran\n"
    with suppress(OSError):
        while select.select([terminal], [], [], LIMIT_S)[0]:
            said += os.read(terminal, 4096)
    os.close(terminal)
    before, _, after = said.decode().partition("Reserving GPU0")
    assert before.startswith("\r\x1b[JWaiting for a GPU")
    first, *_, last = before.split("\x1b[J")[1:]
    assert re.match(r"(Waited for \d+ s\.\r\n)?$", last)
    rows = first.count("\n")
    assert f"\r\x1b[{rows}A\x1b[J{last}" in before  # so many up, and all below is deleted
    assert "\x1b" not in after


@pytest.mark.promise
@pytest.mark.process
@pytest.mark.parametrize(
    ("number", "code"), [("SIGINT", 130), ("SIGTERM", -signal.SIGTERM), ("SIGHUP", -signal.SIGHUP)]
)
def test_a_signal_ends_a_wait(here: Here, number: str, code: int) -> None:
    """A signal ends a wait at once, without a traceback; nothing is held, and nobody waits."""
    with both(here), waiter(here, "--", "echo", "ran") as process:
        assert len(queue(here)) == 1
        process.send_signal(getattr(signal, number))
        out, said = process.communicate(timeout=LIMIT_S)
        assert (process.returncode, out) == (code, "")
        assert "Traceback" not in said
        assert ("Your place in the queue is kept for 2 min" in said) is (number == "SIGINT")
        assert not queue(here)
    assert held(here) == []


@pytest.mark.process
@pytest.mark.parametrize("words", ["status", "status --json", "list", "--version"])
def test_a_full_disk(here: Here, words: str) -> None:
    """Where stdout can't be written one line says so, and the exit code is not 0."""
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*US, *words.split()], env=here.environ(), cwd=here.folder, text=True, check=False,
            stdin=subprocess.DEVNULL, stdout=full, stderr=subprocess.PIPE, timeout=LIMIT_S,
        )  # fmt: skip
    assert done.returncode == 74
    assert "Can't write to stdout: No space left on device." in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.process
@pytest.mark.parametrize(
    ("words", "closed", "code"),
    [
        ("run -- true", "stderr", 0),
        ("run 9 -- true", "stderr", 2),
        ("status", "stdout", -signal.SIGPIPE),
    ],
)
def test_nobody_reads(here: Here, words: str, closed: str, code: int) -> None:
    """A pipe that nobody reads causes no traceback, and keeps no command from running."""
    reader, writer = os.pipe()
    os.close(reader)
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, closed: writer}
    process = subprocess.Popen(
        [*US, *words.split()], env=here.environ(), cwd=here.folder, text=True,
        stdin=subprocess.DEVNULL, **pipes,
    )  # fmt: skip
    os.close(writer)
    texts = process.communicate(timeout=LIMIT_S)
    assert [text for text in texts if text] == []
    assert process.returncode == code


# -- the reservation goes on in the command -------------------------------------------------------


@pytest.mark.promise
@pytest.mark.process
def test_a_python_command_has_the_reservation(here: Here) -> None:
    """A Python command holds what it was started with: asking says so again, release frees it."""
    with started(here, "-n", "2", "--note", "mine", CUDA_VISIBLE_DEVICES="0,1") as child:
        assert child.run("repr(reserve_gpu.current())").value == "<Reservation of GPU0 and GPU1>"
        assert child.reserve("count=2").value == "0,1"
        assert child.run("reserve_gpu.current().note").value == "mine"
        assert held(here) == [0, 1]
        released = child.run("[d.label for d in reserve_gpu.release()]")
        assert released.value == ["GPU0", "GPU1"]
        assert child.visible() == "0,1"  # the limit from outside stands again
        assert child.run("os.environ.get('CUDA_DEVICE_MEMORY')").value is None
        assert held(here) == []
        assert child.run("reserve_gpu.current()").value is None


@pytest.mark.process
def test_another_gpu_can_be_asked_for(here: Here) -> None:
    """What a command was started with can be given for another GPU, or for less of it."""
    with started(here) as child:
        assert child.reserve("1").value == "1"
        assert held(here) == [1]
        assert child.reserve("[0, 1]").value == "0,1"
        assert child.reserve("count=1").value == "0"
        assert held(here) == [0]


@pytest.mark.process
def test_a_with_does_not_end_it(here: Here) -> None:
    """A `with` in the command is an inner one: the command line's reservation outlives it."""
    with started(here) as child:
        for _ in range(2):
            assert child.run("with reserve_gpu.reserve(): pass").error is None
        assert held(here) == [0]
        assert child.visible() == "0"


# The child of a fork says when it runs: what a fork does at its start is done then.
FORK = """
import time
told, tell = os.pipe()
pid = os.fork()
if not pid:
    os.write(tell, b"x")
    time.sleep(1000)
os.read(told, 1)
pid
"""
CHILDREN = ["import subprocess; subprocess.Popen(['sleep', '1000'], close_fds=False).pid", FORK]


@pytest.mark.process
@pytest.mark.parametrize("start", CHILDREN, ids=["exec", "fork"])
def test_children_of_an_adopting_command_do_not_keep_the_gpu(here: Here, start: str) -> None:
    """Once a Python command has looked at its reservation, its children have no part in it."""
    with started(here) as child:
        child.run("reserve_gpu.current()")
        with living(child.run(start).value):
            child.kill()
            assert held(here) == []


@pytest.mark.process
def test_sharing_goes_on(here: Here) -> None:
    """Two commands that share a GPU both hold it, each for as long as it runs."""
    part = "--memory=1GB"
    with started(here, part, "0") as first, started(here, part, "0") as second:
        for child in (first, second):
            assert child.reserve("0, memory='1GB'").value == "0"
        first.kill()
        assert held(here) == [0]
        second.run("reserve_gpu.release()")
        assert held(here) == []


@pytest.mark.process
@pytest.mark.parametrize("look", ["None", "reserve_gpu.current()"])
def test_a_deleted_lock_file_is_locked_anew(here: Here, look: str) -> None:
    """Where somebody has deleted its lock file a command reserves its GPU anew, if nobody has."""
    with started(here, "0") as child:
        child.run(look)
        (here.locks / f"{here.uuid('0')}.lock").unlink()
        assert held(here) == []
        assert child.reserve("0").value == "0"
        assert held(here) == [0]


@pytest.mark.promise
@pytest.mark.process
def test_ipython_has_the_reservation(here: Here) -> None:
    """%reserve_gpu in a shell that was started with a GPU prints the same GPU again."""
    lines = "%reserve_gpu\nseen = !echo $CUDA_VISIBLE_DEVICES\nprint(seen)\n%reserve_gpu --release"
    shell = ("-m", "IPython", "--no-banner", "--colors=NoColor", "--ext=reserve_gpu", "-c", lines)
    done = run(here, "--", sys.executable, *shell)
    assert done.stderr == RESERVED
    assert done.stdout.startswith(f"{RESERVED}['0']\nReleased GPU0.\n"), done.stdout
    assert "CUDA_VISIBLE_DEVICES is not set" in done.stdout


@pytest.mark.process
def test_loading_the_extension_adopts(here: Here) -> None:
    """A shell that loads the extension keeps the GPU to itself before it starts its first child."""
    with started(here) as child:
        child.run("import IPython; shell = IPython.core.interactiveshell.InteractiveShell()")
        assert child.run("shell.extension_manager.load_extension('reserve_gpu')").value is None
        with living(child.run(CHILDREN[0]).value):
            child.kill()
            assert held(here) == []


HELD: dict[str, Any] = {"before": {}, "written": {}, "record": {}, "reason": None}


def left(**changes: Any) -> dict[str, Any]:
    """Return what a process that held the device GPU-x would leave to its next program."""
    fields = {"devices": [{"index": 0, "uuid": "GPU-x"}], "locks": [["LOCK", "GPU-x.lock"]]}
    return {**HELD, **fields, **changes}


NONE_LEFT = {**HELD, "devices": [], "locks": [], "reason": "No GPU was free."}

# What RESERVE_GPU_HELD may say. PID is the process's own, "LOCK" the descriptor of GPU-x.lock,
# locked, "FREE" one of the same file, not locked, and "OTHER" one of another file, locked.
TRUE = f"PID {json.dumps(left())}"
DEVICE = {"index": 0, "uuid": "GPU-x"}
UNTRUE = {
    "closed": left(locks=[[999, "GPU-x.lock"]]),
    "another file": left(locks=[["OTHER", "GPU-x.lock"]]),
    "another name": left(locks=[["LOCK", "other.lock"]]),
    "no name": left(locks=[["LOCK", -1]]),
    "not locked": left(locks=[["FREE", "GPU-x.lock"]]),
    "negative": left(locks=[[-1, "GPU-x.lock"]]),
    "enormous": left(locks=[[1 << 80, "GPU-x.lock"]]),
    "no number": left(locks=[["3", "GPU-x.lock"]]),
    "other lengths": left(locks=[]),
    "no device": left(devices=[7]),
    "another field": left(devices=[DEVICE | {"nonsense": 1}]),
    "another type": left(devices=[DEVICE | {"name": 1}]),
    "no text": left(reason=1),
    "a list": [],
    "huge": left(record={"note": "x" * 110_000}),
}
FORGERIES = {name: f"PID {json.dumps(fields)}" for name, fields in UNTRUE.items()} | {
    "empty": "",
    "rubbish": "PID rubbish",
    "deep": "PID " + "[" * 50_000,
    "no pid": json.dumps(left()),
    "another pid": f"1 {json.dumps(left())}",
    "an earlier process": f"PID {json.dumps({'began': 1, **left()})}",
    "no GPU of an earlier process": f"PID {json.dumps({'began': 1, **NONE_LEFT})}",
    "a large pid": "9" * 5000,
    "surrogates": "PID \udcff\udcfe",
}


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


@pytest.mark.parametrize(
    ("text", "is_own"),
    [
        ("PID", True),
        ("PID BEGAN", True),
        ("PID BEGAN 100", True),
        ("PID 1", False),
        ("PID 1 100", False),
        ('PID {"began": BEGAN, "before": {}}', True),
        ('PID {"began": 1, "before": {}}', False),
        ('PID {"began": null, "before": {}}', True),
        ('PID {"before": {}}', True),
        ("PIDx", False),
        ("1 BEGAN", False),
        ("", False),
    ],
)
def test_a_later_process_with_the_same_pid(
    monkeypatch: pytest.MonkeyPatch, text: str, *, is_own: bool
) -> None:
    """A process is known by its pid and start time; older versions told the pid alone."""
    pid, began = procfs.stamp(os.getpid()).split()
    monkeypatch.setenv("RESERVE_GPU_HELD", text.replace("PID", pid).replace("BEGAN", began))
    assert (procfs.reservation_pid() == os.getpid()) == is_own


@pytest.mark.process
def test_a_command_gets_one_short_variable(here: Here) -> None:
    """`run` sets RESERVE_GPU_HELD to the pid, the start time and a descriptor, and no more."""
    done = here.command(*US, "run", "-q", "--", "sh", "-c", "echo $$; env")
    pid, *lines = done.stdout.splitlines()
    variables = dict(line.split("=", 1) for line in lines)
    (own,) = {name for name in variables if name.startswith("RESERVE_GPU_")} - here.environ().keys()
    assert own == "RESERVE_GPU_HELD"
    assert re.fullmatch(rf"{pid} [0-9]+ 1[0-9][0-9]", variables[own])


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


@pytest.mark.process
def test_a_handover_without_files_in_memory(here: Here) -> None:
    """Without memfd_create, `run` puts the data into the variable, and the program gets its GPU."""
    code = """if True:
        import os, sys
        del os.memfd_create
        from reserve_gpu.cli.main import main
        show = "import reserve_gpu; print(reserve_gpu.current().devices[0].label)"
        script = 'printenv RESERVE_GPU_HELD; exec "$0" -c "$1"'
        main(["run", "-q", "--", "sh", "-c", script, sys.executable, show])
    """
    variable, label = here.command(sys.executable, "-c", code).stdout.splitlines()
    assert '"devices"' in variable
    assert label == "GPU0"


@pytest.mark.parametrize("is_absolute", [False, True])
def test_a_lock_is_in_the_lock_directory(here: Here, *, is_absolute: bool) -> None:
    """A lock in another folder is none, though the environment gives its path."""
    path = here.folder / "elsewhere.lock"
    name = str(path) if is_absolute else f"../{path.name}"
    with have(path) as file:
        fields = left(locks=[[file, name]])
        with forged(here, f"PID {json.dumps(fields)}"):
            assert exec_handover.received() is None


@pytest.mark.process
def test_a_forgery_keeps_nobody_from_reserving(here: Here) -> None:
    """A program that was told of a reservation that is none makes its own, as if nothing was."""
    code = """if True:
        import os, sys, reserve_gpu
        os.environ["RESERVE_GPU_HELD"] = sys.argv[1].replace("PID", str(os.getpid()))
        print(reserve_gpu.current(), reserve_gpu.reserve().devices[0].label)
    """
    done = here.command(sys.executable, "-c", code, FORGERIES["closed"])
    assert (done.stdout, done.stderr) == ("None GPU0\n", "")


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


# -- processes below the command ------------------------------------------------------------------


@pytest.mark.process
def test_below_a_command_that_holds_it(here: Here) -> None:
    """Another process below the command is told that the GPU is set for it; nothing is changed."""
    inner = "import reserve_gpu, os\ntry: reserve_gpu.reserve(wait=True)\n"
    inner += "except reserve_gpu.NoFreeDeviceError as error: print(error)\n"
    inner += "print(os.environ['CUDA_VISIBLE_DEVICES'])"
    (here.folder / "inner.py").write_text(inner)
    shell = f"echo $$; {sys.executable} inner.py; {' '.join(US)} run -- true; echo $?"
    done = run(here, "--", "sh", "-c", shell)
    pid, *told, visible, code = done.stdout.splitlines()
    assert told[0].startswith(
        "The process that started this one has already reserved GPU0 for both"
    )
    assert f"(pid {pid})" in told[1]
    assert "leave out reserve() here" in told[2]
    assert "leave out reserve-gpu run here" in done.stderr
    assert (visible, code) == ("0", "75")


@pytest.mark.process
def test_below_with_optional_and_a_part(here: Here) -> None:
    """Below a command `--optional` goes on with what is set; a part beside it takes one of both."""
    ours = " ".join(US)
    show, part = "printenv CUDA_VISIBLE_DEVICES", "--memory=1GB"
    shell = f"{ours} run --optional -- {show}\n{ours} run {part} -- {show}; echo $?"
    done = run(here, "1", "--", "sh", "-c", shell)
    assert done.stdout == "1\n75\n", done.stderr
    assert "Continuing with CUDA_VISIBLE_DEVICES = '1'" in done.stderr
    done = run(here, part, "1", "--", "sh", "-c", f"{ours} run {part} -- {show}")
    assert done.stdout == "1\n", done.stderr


# -- where it is used -----------------------------------------------------------------------------


RANK = ("sh", "-c", "echo $CUDA_VISIBLE_DEVICES; read line")


@contextmanager
def ranks(here: Here, count: int) -> Iterator[list[str]]:
    """Start commands at the same moment, as mpirun starts its ranks; the GPU of each."""
    started = [
        subprocess.Popen(
            [*US, "run", "--", *RANK], env=here.environ(), cwd=here.folder, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )
        for _ in range(count)
    ]  # fmt: skip
    try:
        yield [rank.stdout.readline() for rank in started if rank.stdout]
    finally:
        for rank in started:
            rank.communicate()


@pytest.mark.process
def test_ranks_each_take_one(here: Here) -> None:
    """Four commands at the same moment, as mpirun starts its ranks, get four GPUs."""
    here.use("eight")
    with ranks(here, 4) as lines:
        assert sorted(lines) == ["0\n", "1\n", "2\n", "3\n"]


@pytest.mark.process
def test_more_ranks_than_gpus(here: Here) -> None:
    """A ninth rank on eight GPUs reads how many to start, and nothing that would harm the others.

    What the same launcher has started for another purpose still reads what can be released.
    """
    here.use("eight")
    with ranks(here, 8):
        ninth = here.command(*US, "run", "--", *RANK)
        other = here.command(*US, "run", "--", "true")
    _, last, *_ = ninth.stderr.splitlines()
    assert ninth.returncode == 75
    assert last == (
        "Processes that were started together with this one hold GPU0 to GPU7. Start at most 8 of "
        "these processes."
    )
    assert "release" not in ninth.stderr
    assert "--wait" not in ninth.stderr
    assert "Start at most" not in other.stderr
    assert "were started together" not in other.stderr
    assert "Wait in the queue: reserve-gpu run --wait 5m -- true" in other.stderr


@pytest.mark.process
def test_kernels_are_no_ranks(here: Here) -> None:
    """Two kernels that one process has started have nothing to do with each other."""
    with here.kernel() as first, here.kernel() as second:
        first.run("%reserve_gpu -n 2")
        shown = str(second.run("%reserve_gpu"))
    assert "You hold GPU0 and GPU1 in kernel in" in shown
    assert "Start at most" not in shown


@pytest.mark.promise
@pytest.mark.process
@pytest.mark.skipif(not program("make"), reason="there is no make")
def test_in_a_makefile(here: Here, script: str) -> None:
    """Two jobs of one make, side by side, have a GPU each and wait for one if need be."""
    (here.folder / "Makefile").write_text(
        "all: a b c\na b c:\n"
        "\t@reserve-gpu run --wait -- sh -c 'echo $@ on $$CUDA_VISIBLE_DEVICES'\n"
    )
    path = f"{Path(script).parent}:{os.environ['PATH']}"
    done = here.command("make", "-s", "-j3", "all", PATH=path)
    assert done.returncode == 0, done.stderr
    assert sorted(line.split()[0] for line in done.stdout.splitlines()) == ["a", "b", "c"]
    assert {line.split()[2] for line in done.stdout.splitlines()} <= {"0", "1"}


@pytest.mark.process
def test_as_cron_runs_it(here: Here, script: str) -> None:
    """With hardly an environment, no terminal and an ASCII locale it does the same."""
    kept = ("LD_LIBRARY_PATH", "STAND_IN_SCENARIO", "STAND_IN_LOG", "RESERVE_GPU_LOCK_DIR")
    environ = {k: v for k, v in here.environ().items() if k in kept}
    environ |= {"PYTHONPATH": str(ROOT), "LC_ALL": "C"}
    for words in (["run", "--", "printenv", "CUDA_VISIBLE_DEVICES"], ["status"]):
        done = subprocess.run(
            [script, *words], env=environ, cwd="/", text=True, capture_output=True, check=False,
            timeout=LIMIT_S, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("0\n" if words[0] == "run" else "Both GPUs are free")


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


@pytest.mark.process
def test_check(here: Here, typed: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """`check` says whether a framework would use what is reserved, also by its exit code."""
    installed(monkeypatch, "torch")
    unreserved = typed("check")
    assert unreserved.code == 0
    assert "Reserve one first:\nreserve-gpu run -- reserve-gpu check\n" in unreserved.stdout
    reserve_gpu.reserve("1")
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    does_not = typed("check", "--json")
    assert does_not.code == 1
    assert json.loads(does_not.stdout)["is_well"] is False


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
    done = here.command(sys.executable, str(ROOT / "tests" / "hub.py"), *words, PATH=path)
    pid, running, *told, stopped = done.stdout.split()
    assert (running, told, stopped) == ("None", [pid, "0", "server.py"], "False"), done.stderr
    assert held(here) == []


COMPLETIONS = [
    (
        "reserve-gpu ",
        {word.partition(" ")[0] for word in EVERY},
    ),
    ("reserve-gpu ker", {"kernel "}),
    ("reserve-gpu kernel ", {"install"}),
    ("reserve-gpu run --mi", {"--min-memory "}),
    ("reserve-gpu status --", {"--json", "--format", "--all", "--hosts"}),
    (
        "reserve-gpu report --",
        {"--since", "--by", "--format", "--json", "--hosts"},
    ),
    ("reserve-gpu report --by ", {"user", "notebook", "gpu", "day"}),
]


@pytest.mark.process
@pytest.mark.needs("completion")
@pytest.mark.parametrize(("line", "expected"), COMPLETIONS)
def test_completion(here: Here, script: str, line: str, expected: set[str]) -> None:
    """A shell that asks by argcomplete's protocol is told the commands and their options."""
    extra = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line))}
    extra |= {"_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_SHELL": "bash"}
    done = here.command("sh", "-c", f"exec {script} 8>&1 9>/dev/null", **extra)
    found = {word for word in done.stdout.split("\n") if word and not word.startswith("-h")}
    assert found - {"--help", "--version"} == expected
    assert here.calls() == []


@pytest.mark.process
@pytest.mark.needs("completion")
def test_a_shell_completes(here: Here, script: str) -> None:
    """A bash with argcomplete's line in it completes a subcommand as it is typed."""
    register = Path(sys.executable).with_name("register-python-argcomplete")
    code = f"""
        eval "$({sys.executable} {register} reserve-gpu)"
        complete -p reserve-gpu | grep -q _python_argcomplete || exit 3
        COMP_WORDS=(reserve-gpu stat) COMP_CWORD=1 COMP_LINE="reserve-gpu stat" COMP_POINT=16
        COMP_TYPE=9 _python_argcomplete reserve-gpu stat reserve-gpu
        echo "${{COMPREPLY[@]}}"
    """
    path = f"{Path(script).parent}:{os.environ['PATH']}"
    done = here.command("bash", "-c", code, PATH=path)
    assert done.stdout == "status \n", done.stderr
