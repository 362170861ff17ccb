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
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import reserve_gpu
from tests.support.frameworks import installed
from tests.support.locked import held
from tests.support.machine import LIMIT_S, ROOT, program
from tests.support.processes import US, is_running, living, queue, wait_for
from tests.support.reserving import of_gpu

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.commandline import CommandLine
    from tests.support.here import Here

from tests.support.main import FORGERIES, RESERVED, both, run, started

WAITING = "Waiting for a GPU: next in the queue"


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


# -- the command is the process ------------------------------------------------------------------


@pytest.mark.promise
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


def test_an_ignored_interrupt_stays_ignored(here: Here, script: str) -> None:
    """Where Ctrl-C is ignored, as after nohup or for a job in the background, it stays so."""
    (here.folder / "sitecustomize.py").write_text(AT_IMPORT)
    ignoring = ("sh", "-c", f"trap '' INT; exec {script} run -- echo started")
    path = f"{here.folder}:{ROOT}"
    done = here.command(*ignoring, AT="reserve_gpu.model.errors", PYTHONPATH=path)
    assert done.stdout == "started\n", done.stderr


def test_an_interrupt_is_left_to_those_who_import(here: Here) -> None:
    """Importing the package leaves Ctrl-C as it was, whatever the words of the program are."""
    code = "import signal, reserve_gpu.cli.main; print(signal.getsignal(signal.SIGINT))"
    done = here.command(sys.executable, "-c", code, "-m", "reserve_gpu", "reserve-gpu")
    assert "default_int_handler" in done.stdout


@pytest.mark.parametrize("before", [(), ("nohup",)], ids=["", "nohup"])
def test_signals_are_as_they_were(here: Here, before: tuple[str, ...]) -> None:
    """A command ignores, catches and blocks the signals that it would without us, and no other."""
    ask = ("grep", "-E", "^Sig(Blk|Ign|Cgt)", "/proc/self/status")
    expected = here.command(*before, *ask).stdout
    assert expected.count("\n") == 3
    assert here.command(*before, *US, "run", "--", *ask).stdout == expected


@pytest.mark.parametrize("number", ["INT", "PIPE"])
def test_signals_are_the_commands_own(here: Here, number: str) -> None:
    """A command ends by a signal as it would without us: also by one that Python ignores."""
    done = run(here, "--", "sh", "-c", f"kill -{number} $$; sleep 1")
    assert done.returncode == -getattr(signal, f"SIG{number}")
    assert held(here) == []


def test_stopped_and_continued(here: Here) -> None:
    """A stopped command keeps its GPU and goes on where it was."""
    with started(here) as child:
        child.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        assert held(here) == [0]
        child.process.send_signal(signal.SIGCONT)
        assert child.run("1 + 1").value == 2


def test_a_script_that_uses_low_descriptors_keeps_the_gpu(here: Here) -> None:
    """A shell script that opens descriptors by number, as many do, does not close the lock."""
    opens = "".join(f"exec {number}>file; " for number in range(3, 10))
    again = "env -u CUDA_VISIBLE_DEVICES -u RESERVE_GPU_HELD"
    us = " ".join(US)
    done = run(here, "0", "--", "sh", "-c", f"{opens}{again} {us} run 0 -- echo mine too")
    assert "mine too" not in done.stdout
    assert of_gpu(done.stderr).startswith("reserved: ")


@pytest.mark.promise
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


def test_a_python_that_goes_on_without_can_reserve_later(here: Here) -> None:
    """The emptiness that --optional left is no limit to what the same process asks for later."""
    with both(here) as rivals, started(here, "--optional") as child:
        assert child.visible() == ""
        rivals.close()
        assert child.reserve().value == "0"
        child.run("reserve_gpu.release()")
        assert child.visible() is None


# -- waiting --------------------------------------------------------------------------------------


def test_a_wait_in_a_log(here: Here) -> None:
    """Without a terminal a wait is plain lines on stderr, and then the command runs."""
    with both(here) as rivals, waiter(here, "--", "echo", "ran") as process:
        rivals.close()
        out, said = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, out) == (0, "ran\n")
    assert re.sub(r"^Waited for \d+ s\.\n", "", said) == RESERVED


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


def test_another_gpu_can_be_asked_for(here: Here) -> None:
    """What a command was started with can be given for another GPU, or for less of it."""
    with started(here) as child:
        assert child.reserve("1").value == "1"
        assert held(here) == [1]
        assert child.reserve("[0, 1]").value == "0,1"
        assert child.reserve("count=1").value == "0"
        assert held(here) == [0]


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


@pytest.mark.parametrize("start", CHILDREN, ids=["exec", "fork"])
def test_children_of_an_adopting_command_do_not_keep_the_gpu(here: Here, start: str) -> None:
    """Once a Python command has looked at its reservation, its children have no part in it."""
    with started(here) as child:
        child.run("reserve_gpu.current()")
        with living(child.run(start).value):
            child.kill()
            assert held(here) == []


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
def test_ipython_has_the_reservation(here: Here) -> None:
    """%reserve_gpu in a shell that was started with a GPU prints the same GPU again."""
    lines = "%reserve_gpu\nseen = !echo $CUDA_VISIBLE_DEVICES\nprint(seen)\n%reserve_gpu --release"
    shell = ("-m", "IPython", "--no-banner", "--colors=NoColor", "--ext=reserve_gpu", "-c", lines)
    done = run(here, "--", sys.executable, *shell)
    assert done.stderr == RESERVED
    assert done.stdout.startswith(f"{RESERVED}['0']\nReleased GPU0.\n"), done.stdout
    assert "CUDA_VISIBLE_DEVICES is not set" in done.stdout


def test_loading_the_extension_adopts(here: Here) -> None:
    """A shell that loads the extension keeps the GPU to itself before it starts its first child."""
    with started(here) as child:
        child.run("import IPython; shell = IPython.core.interactiveshell.InteractiveShell()")
        assert child.run("shell.extension_manager.load_extension('reserve_gpu')").value is None
        with living(child.run(CHILDREN[0]).value):
            child.kill()
            assert held(here) == []


HELD: dict[str, Any] = {"before": {}, "written": {}, "record": {}, "reason": None}


NONE_LEFT = {**HELD, "devices": [], "locks": [], "reason": "No GPU was free."}
DEVICE = {"index": 0, "uuid": "GPU-x"}


def test_a_command_gets_one_short_variable(here: Here) -> None:
    """`run` sets RESERVE_GPU_HELD to the pid, the start time and a descriptor, and no more."""
    done = here.command(*US, "run", "-q", "--", "sh", "-c", "echo $$; env")
    pid, *lines = done.stdout.splitlines()
    variables = dict(line.split("=", 1) for line in lines)
    (own,) = {name for name in variables if name.startswith("RESERVE_GPU_")} - here.environ().keys()
    assert own == "RESERVE_GPU_HELD"
    assert re.fullmatch(rf"{pid} [0-9]+ 1[0-9][0-9]", variables[own])


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


def test_a_forgery_keeps_nobody_from_reserving(here: Here) -> None:
    """A program that was told of a reservation that is none makes its own, as if nothing was."""
    code = """if True:
        import os, sys, reserve_gpu
        os.environ["RESERVE_GPU_HELD"] = sys.argv[1].replace("PID", str(os.getpid()))
        print(reserve_gpu.current(), reserve_gpu.reserve().devices[0].label)
    """
    done = here.command(sys.executable, "-c", code, FORGERIES["closed"])
    assert (done.stdout, done.stderr) == ("None GPU0\n", "")


# -- processes below the command ------------------------------------------------------------------


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


def test_ranks_each_take_one(here: Here) -> None:
    """Four commands at the same moment, as mpirun starts its ranks, get four GPUs."""
    here.use("eight")
    with ranks(here, 4) as lines:
        assert sorted(lines) == ["0\n", "1\n", "2\n", "3\n"]


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


def test_kernels_are_no_ranks(here: Here) -> None:
    """Two kernels that one process has started have nothing to do with each other."""
    with here.kernel() as first, here.kernel() as second:
        first.run("%reserve_gpu -n 2")
        shown = str(second.run("%reserve_gpu"))
    assert "You hold GPU0 and GPU1 in kernel in" in shown
    assert "Start at most" not in shown


@pytest.mark.promise
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
