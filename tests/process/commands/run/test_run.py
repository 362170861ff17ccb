"""`reserve-gpu run` becomes the command, which then has the reservation."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import reserve_gpu
from tests.support.frameworks import installed
from tests.support.locked import held
from tests.support.machine import LIMIT_S, program
from tests.support.processes import US, is_running, living, queue, wait_for
from tests.support.run_command import both_reserved, run_command, start_python

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.commandline import CommandLine
    from tests.support.here import Here

RUN = f"{' '.join(US)} run"  # for a shell


# -- the command is the process --------------------------------------------------------------------


@pytest.mark.promise
def test_command_is_the_same_process(here: Here) -> None:
    """The command has the pid and the parent of `run`, and no child process of `run`."""
    with start_python(here) as child:
        assert child.pid == child.process.pid
        assert child.run("os.getppid()").value == os.getpid()
        assert child.run("open('/proc/self/task/%d/children' % os.getpid()).read()").value == ""
        assert child.visible() == "0"
        assert held(here) == [0]
        child.kill()
        assert held(here) == []


@pytest.mark.promise
@pytest.mark.parametrize("name", ["reserve-gpu", "python -m reserve_gpu"])
def test_stdin_and_stdout_belong_to_the_command(here: Here, script: str, name: str) -> None:
    """Messages about the reservation go to stderr."""
    prefix = (script,) if name == "reserve-gpu" else US
    done = subprocess.run(
        [*prefix, "run", "--", "sh", "-c", "cat; echo $0 $CUDA_VISIBLE_DEVICES; exit 7", "--",
         "-n"],
        env=here.environ(), cwd=here.folder, text=True, capture_output=True, input="typed\n",
        check=False, timeout=LIMIT_S,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (7, "typed\n-- 0\n")
    assert "GPU0" in done.stderr


@pytest.mark.parametrize("before", [(), ("nohup",)], ids=["", "nohup"])
def test_signal_dispositions_are_unchanged(here: Here, before: tuple[str, ...]) -> None:
    """A command ignores, catches and blocks the same signals as without `run`."""
    show = ("grep", "-E", "^Sig(Blk|Ign|Cgt)", "/proc/self/status")
    expected = here.command(*before, *show).stdout
    assert expected.count("\n") == 3
    assert here.command(*before, *US, "run", "--", *show).stdout == expected


@pytest.mark.promise
def test_background_job_keeps_the_gpu(here: Here, typed: CommandLine) -> None:
    """A job that outlives the command is the holder; a process with an open lock file is not."""
    done = run_command(here, "--", "sh", "-c", "sleep 1000 >/dev/null 2>&1 & echo $!")
    job = int(done.stdout)
    with living(job), (here.locks / f"{here.uuid('0')}.lock").open():
        assert f"(pid {job})" in typed("status").stdout
        assert held(here) == [0]
    wait_for(lambda: not is_running(job))
    assert held(here) == []


def test_command_inherits_only_the_lock_files(here: Here) -> None:
    """A command has the lock files and the file with the reservation open, besides its own."""
    code = "import os\nfor n in range(3, 200):\n try: print(os.readlink(f'/proc/self/fd/{n}'))\n"
    code += " except OSError: pass"
    before = set(here.python(code).stdout.splitlines())
    after = set(run_command(here, "-n", "2", "--", sys.executable, "-c", code).stdout.splitlines())
    own = f"record-{os.geteuid()}-0"
    locks = {
        str(here.locks / f"{here.uuid(number)}.{end}") for number in "01" for end in ("lock", own)
    }
    assert after - before == locks | {"/memfd:reserve_gpu (deleted)"}


@pytest.mark.parametrize("words", [["run"], ["run", "--wait"]])
def test_closed_standard_streams_stay_closed(here: Here, words: list[str]) -> None:
    """No lock file gets the descriptor of a closed stdin, stdout or stderr."""
    code = """if True:
        import os, reserve_gpu
        found = [n for n in range(200) if os.path.exists(f"/proc/self/fd/{n}")]
        locked = [n for n in found if os.readlink(f"/proc/self/fd/{n}").endswith(".lock")]
        open("out.txt", "w").write(f"{min(found) > 2} {min(locked) > 2} {reserve_gpu.current()!r}")
    """
    close = ("sh", "-c", 'exec "$@" <&- >&- 2>&-', "-")
    done = here.command(*close, *US, *words, "--", sys.executable, "-c", code)
    assert done.returncode == 0
    assert (here.folder / "out.txt").read_text() == "True True <Reservation of GPU0>"


def test_script_without_an_interpreter_line(here: Here) -> None:
    """If the system can't execute a script, the error suggests a fix, and the GPU is free."""
    path = here.folder / "script"
    path.write_text("echo hello\n")
    path.chmod(0o755)
    done = run_command(here, "--", "./script")
    assert done.returncode == 126
    assert "#!/bin/sh" in done.stderr.splitlines()[-1]
    assert held(here) == []


# -- waiting ---------------------------------------------------------------------------------------


@contextmanager
def start_waiter(here: Here, *words: str, **extra: str) -> Iterator[subprocess.Popen[str]]:
    """Start `reserve-gpu run --wait WORDS` until it waits, and kill it at the end."""
    process = subprocess.Popen(
        [*US, "run", "--wait", *words], env=here.environ(**extra), cwd=here.folder, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("Waiting")
        yield process
    finally:
        process.kill()
        process.communicate()


def test_wait_without_a_terminal(here: Here) -> None:
    """The progress is written to stderr as lines, and then the command runs."""
    with both_reserved(here) as rivals, start_waiter(here, "--", "echo", "ran") as process:
        rivals.close()
        out, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, out) == (0, "ran\n")
    assert "GPU0" in err
    assert "\x1b" not in err


@pytest.mark.promise
@pytest.mark.parametrize(
    ("number", "code"), [("SIGINT", 130), ("SIGTERM", -signal.SIGTERM), ("SIGHUP", -signal.SIGHUP)]
)
def test_signal_ends_a_wait(here: Here, number: str, code: int) -> None:
    """A signal ends a wait without a traceback; only SIGINT keeps the place in the queue."""
    with both_reserved(here), start_waiter(here, "--", "echo", "ran") as process:
        assert len(queue(here)) == 1
        process.send_signal(getattr(signal, number))
        out, err = process.communicate(timeout=LIMIT_S)
        assert (process.returncode, out) == (code, "")
        assert "Traceback" not in err
        assert ("place in the queue" in err) == (number == "SIGINT")
        assert not queue(here)
    assert held(here) == []


# -- the reservation in the command ----------------------------------------------------------------


@pytest.mark.promise
def test_python_command_has_the_reservation(here: Here) -> None:
    """A Python command finds the reservation, can request it again, and can release it."""
    with start_python(here, "-n", "2", "--note", "mine", CUDA_VISIBLE_DEVICES="0,1") as child:
        assert child.run("repr(reserve_gpu.current())").value == "<Reservation of GPU0 and GPU1>"
        assert child.reserve("count=2").value == "0,1"
        assert child.run("reserve_gpu.current().note").value == "mine"
        assert held(here) == [0, 1]
        released = child.run("[d.label for d in reserve_gpu.release()]")
        assert released.value == ["GPU0", "GPU1"]
        assert child.visible() == "0,1"  # the limit from before the reservation
        assert child.run("os.environ.get('CUDA_DEVICE_MEMORY')").value is None
        assert held(here) == []
        assert child.run("reserve_gpu.current()").value is None


# The child of the fork writes to a pipe once the fork hooks have run.
FORK = """
import time
reader, writer = os.pipe()
pid = os.fork()
if not pid:
    os.write(writer, b"x")
    time.sleep(1000)
os.read(reader, 1)
pid
"""
EXEC = "import subprocess; subprocess.Popen(['sleep', '1000'], close_fds=False).pid"
LOAD_EXTENSION = """
import IPython
shell = IPython.core.interactiveshell.InteractiveShell()
shell.extension_manager.load_extension('reserve_gpu')
"""


@pytest.mark.parametrize(
    ("adopt", "start"),
    [
        ("reserve_gpu.current()", EXEC),
        ("reserve_gpu.current()", FORK),
        (LOAD_EXTENSION, EXEC),
    ],
    ids=["exec", "fork", "extension"],
)
def test_children_do_not_keep_the_gpu(here: Here, adopt: str, start: str) -> None:
    """The children of a Python command that has adopted its reservation do not hold the GPU."""
    with start_python(here) as child:
        assert child.run(adopt).error is None
        with living(child.run(start).value):
            child.kill()
            assert held(here) == []


def test_shared_gpu(here: Here) -> None:
    """Each of two commands that share a GPU holds it until the command ends."""
    part = "--memory=1GB"
    with start_python(here, part, "0") as first, start_python(here, part, "0") as second:
        for child in (first, second):
            assert child.reserve("0, memory='1GB'").value == "0"
        first.kill()
        assert held(here) == [0]
        second.run("reserve_gpu.release()")
        assert held(here) == []


@pytest.mark.promise
def test_ipython_has_the_reservation(here: Here) -> None:
    """In IPython, %reserve_gpu shows the reservation of the command again."""
    lines = "%reserve_gpu\nseen = !echo $CUDA_VISIBLE_DEVICES\nprint(seen)\n%reserve_gpu --release"
    shell = ("-m", "IPython", "--no-banner", "--colors=NoColor", "--ext=reserve_gpu", "-c", lines)
    done = run_command(here, "--", sys.executable, *shell)
    assert "GPU0" in done.stderr
    assert done.stdout.startswith(f"{done.stderr}['0']\n"), done.stdout
    assert "CUDA_VISIBLE_DEVICES is not set" in done.stdout


def test_handover_without_memfd_create(here: Here) -> None:
    """Without memfd_create, the variable contains the data, and the program has its GPU."""
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


# -- processes below the command -------------------------------------------------------------------


def test_second_reservation_below_a_command_is_refused(here: Here) -> None:
    """A process below the command is told that the GPU is set for it; nothing changes."""
    (here.folder / "inner.py").write_text(
        "import os, reserve_gpu\n"
        "try: reserve_gpu.reserve(wait=True)\n"
        "except reserve_gpu.ReservedAboveError as error: print(str(error).replace('\\n', ' '))\n"
        "print(os.environ['CUDA_VISIBLE_DEVICES'])"
    )
    shell = f"echo $$; {sys.executable} inner.py; {RUN} -- true; echo $?"
    done = run_command(here, "--", "sh", "-c", shell)
    pid, message, visible, code = done.stdout.splitlines()
    assert "GPU0" in message
    assert f"(pid {pid})" in message
    assert "reserve()" in message
    assert "leave out reserve-gpu run here" in done.stderr
    assert (visible, code) == ("0", "75")


# -- launchers -------------------------------------------------------------------------------------


RANK = ("sh", "-c", "echo $CUDA_VISIBLE_DEVICES; read line")


@contextmanager
def start_ranks(here: Here, count: int) -> Iterator[list[str]]:
    """Start commands at the same moment, as mpirun does, and return their first lines."""
    ranks = [
        subprocess.Popen(
            [*US, "run", "--", *RANK], env=here.environ(), cwd=here.folder, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )
        for _ in range(count)
    ]  # fmt: skip
    try:
        yield [rank.stdout.readline() for rank in ranks if rank.stdout]
    finally:
        for rank in ranks:
            rank.communicate()


def test_ranks_get_one_gpu_each(here: Here) -> None:
    """A rank without a GPU is told how many to start, and other commands are told to wait."""
    here.use("eight")
    with start_ranks(here, 8) as lines:
        ninth = run_command(here, "--", *RANK)
        other = run_command(here, "--", "true")
    assert sorted(lines) == [f"{number}\n" for number in range(8)]
    assert ninth.returncode == 75
    assert "at most 8" in ninth.stderr.splitlines()[1]
    for word in ("release", "--wait"):
        assert word not in ninth.stderr
    assert "at most" not in other.stderr
    assert "reserve-gpu run --wait 5m -- true" in other.stderr


# -- processes below the command -------------------------------------------------------------------


@pytest.mark.promise
@pytest.mark.skipif(not program("make"), reason="there is no make")
def test_parallel_make(here: Here, script: str) -> None:
    """Jobs of one make get a GPU each, and wait for one if necessary."""
    (here.folder / "Makefile").write_text(
        "all: a b c\na b c:\n"
        "\t@reserve-gpu run --wait -- sh -c 'echo $@ on $$CUDA_VISIBLE_DEVICES'\n"
    )
    path = f"{Path(script).parent}:{os.environ['PATH']}"
    done = here.command("make", "-s", "-j3", "all", PATH=path)
    assert done.returncode == 0, done.stderr
    jobs, _, gpus = zip(*map(str.split, done.stdout.splitlines()), strict=True)
    assert sorted(jobs) == ["a", "b", "c"]
    assert {*gpus} <= {"0", "1"}


def test_check(here: Here, typed: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """`check` fails if a framework would not use the reserved GPU."""
    installed(monkeypatch, "torch")
    unreserved = typed("check")
    assert unreserved.code == 0
    assert "\nreserve-gpu run -- reserve-gpu check\n" in unreserved.stdout
    reserve_gpu.reserve("1")
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    changed = typed("check", "--json")
    assert changed.code == 1
    assert json.loads(changed.stdout)["is_well"] is False


@pytest.mark.full
@pytest.mark.needs("frameworks")
def test_torchrun(here: Here) -> None:
    """Each rank of torchrun sees the GPUs of the command."""
    (here.folder / "rank.py").write_text(  # one unbuffered write per rank
        "import os, torch\n"
        "line = os.environ['LOCAL_RANK'] + ' ' + os.environ['CUDA_VISIBLE_DEVICES'] + '\\n'\n"
        "os.write(1, line.encode())\n"
    )
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "rank.py")
    done = run_command(here, "-n", "2", "--", *torchrun)
    assert sorted(done.stdout.splitlines()) == ["0 0,1", "1 0,1"], done.stderr
    assert held(here) == []
