"""The command line: reserve, then become the command."""

from __future__ import annotations

import errno
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.machine import LIMIT_S, ROOT, Child, program
from tests.test_check import STANDINS
from tests.test_forks import is_running, living

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.machine import Machine

US = (sys.executable, "-m", "reserve_gpu")
RESERVED = """\
Reserving GPU0: 0000:01:00.0 16x GeForce GTX 1050 Ti (VBIOS 86.07.22.00.A8)
CUDA_DEVICE_MEMORY = '4038'
CUDA_DEVICE_ORDER = 'PCI_BUS_ID'
CUDA_VISIBLE_DEVICES = '0'
"""


def run(machine: Machine, *words: str, **extra: str) -> subprocess.CompletedProcess[str]:
    """`reserve-gpu run WORDS`, to its end."""
    return machine.command(*US, "run", *words, **extra)


@contextmanager
def child(machine: Machine, *options: str, **extra: str) -> Iterator[Child]:
    """A Python process started by `reserve-gpu run OPTIONS --`; killed at the end."""
    one = Child(machine.environ(**extra), machine.folder, *US, "run", *options, "--")
    try:
        yield one
    finally:
        one.kill()


@contextmanager
def waiter(
    machine: Machine, *words: str, stderr: int = subprocess.PIPE, **extra: str
) -> Iterator[subprocess.Popen[str]]:
    """`reserve-gpu run --wait WORDS`, which has told a pipe that it waits; killed at the end."""
    process = subprocess.Popen(
        [*US, "run", "--wait", *words], env=machine.environ(**extra), cwd=machine.folder, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr,
    )  # fmt: skip
    try:
        if process.stderr:
            assert process.stderr.readline().startswith("Waiting for a GPU, next in line")
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for(condition: Callable[[], object]) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def free(machine: Machine) -> list[int]:
    """The GPUs that nobody holds."""
    with machine.child() as asker:
        shown = asker.run("[r.device.index for r in reserve_gpu.status().rows if not r.holders]")
        assert isinstance(shown.value, list), shown
        return shown.value


@pytest.fixture
def script(machine: Machine) -> str:
    """The `reserve-gpu` that pip makes of the entry point, in a directory of its own."""
    folder = machine.folder / "bin"
    folder.mkdir()
    path = folder / "reserve-gpu"
    path.write_text(
        f"#!{sys.executable}\nimport sys\nfrom reserve_gpu.cli import main\nsys.exit(main())\n"
    )
    path.chmod(0o755)
    return str(path)


# -- the command is the process ------------------------------------------------------------------


def test_the_command_is_the_process(machine: Machine) -> None:
    """The command has the pid that was started, our own as its parent, and nothing beside it."""
    with child(machine) as command:
        assert command.pid == command.process.pid
        assert command.run("os.getppid()").value == os.getpid()
        assert command.run("open('/proc/self/task/%d/children' % os.getpid()).read()").value == ""
        assert command.visible() == "0"
        assert free(machine) == [1]
        command.kill()
        assert free(machine) == [0, 1]


@pytest.mark.parametrize("name", ["reserve-gpu", "python -m reserve_gpu"])
def test_stdout_is_the_commands_own(machine: Machine, script: str, name: str) -> None:
    """What a reservation prints goes to stderr, to the letter; stdin and stdout are untouched."""
    ours = (script,) if name == "reserve-gpu" else US
    done = subprocess.run(
        [*ours, "run", "--", "sh", "-c", "cat; echo $0 $CUDA_VISIBLE_DEVICES; exit 7", "--", "-n"],
        env=machine.environ(), cwd=machine.folder, text=True, capture_output=True, input="told\n",
        check=False, timeout=LIMIT_S,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (7, "told\n-- 0\n", RESERVED)


@pytest.mark.parametrize("number", ["KILL", "TERM", "INT", "PIPE", "XFSZ"])
def test_signals_are_the_commands_own(machine: Machine, number: str) -> None:
    """A command ends by a signal as it would without us: what Python ignores, it does not."""
    done = run(machine, "--", "sh", "-c", f"kill -{number} $$; sleep 1")
    assert done.returncode == -getattr(signal, f"SIG{number}")
    assert free(machine) == [0, 1]


def test_ignored_signals_stay_ignored(machine: Machine) -> None:
    """Under nohup a command still ignores SIGHUP."""
    done = machine.command("nohup", *US, "run", "--", "sh", "-c", "kill -HUP $$; echo alive")
    assert done.stdout == "alive\n"


def test_stopped_and_continued(machine: Machine) -> None:
    """A stopped command keeps its GPU and goes on where it was."""
    with child(machine) as command:
        command.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, command.pid, os.WSTOPPED | os.WNOWAIT)
        assert free(machine) == [1]
        command.process.send_signal(signal.SIGCONT)
        assert command.run("1 + 1").value == 2


def test_a_script_that_uses_low_descriptors_keeps_the_gpu(machine: Machine) -> None:
    """A shell script that opens descriptors by number, as many do, does not close the lock."""
    opens = "".join(f"exec {number}>file; " for number in range(3, 10))
    again = "env -u CUDA_VISIBLE_DEVICES -u RESERVE_GPU_HELD"
    us = " ".join(US)
    done = run(machine, "0", "--", "sh", "-c", f"{opens}{again} {us} run 0 -- echo mine too")
    assert "mine too" not in done.stdout
    assert "reserved by" in done.stderr


def test_a_job_in_the_background_keeps_the_gpu(machine: Machine) -> None:
    """What a command leaves running keeps its GPU, and is named as the holder, until it ends."""
    done = run(machine, "--", "sh", "-c", "sleep 1000 >/dev/null 2>&1 & echo $!")
    job = int(done.stdout)
    with living(job):
        status = machine.command(*US, "status")
        assert f"(pid {job})" in status.stdout
        assert free(machine) == [1]
    wait_for(lambda: not is_running(job))
    assert free(machine) == [0, 1]


def test_nothing_of_ours_is_open_in_the_command(machine: Machine) -> None:
    """A command has the lock of each GPU beside its standard descriptors, and no other file."""
    code = "import os\nfor n in range(3, 200):\n try: print(os.readlink(f'/proc/self/fd/{n}'))\n"
    code += " except OSError: pass"
    before = set(machine.python(code).stdout.splitlines())
    with_us = set(run(machine, "-n", "2", "--", sys.executable, "-c", code).stdout.splitlines())
    paths = {path for path in with_us - before if not path.startswith("socket:")}
    assert {Path(path).parent for path in paths} == {machine.locks}
    assert (len(paths), len(with_us - before)) == (2, 4)  # each lock with its witness


@pytest.mark.parametrize("words", [["run"], ["run", "--wait"]])
def test_closed_standard_descriptors_stay_closed(machine: Machine, words: list[str]) -> None:
    """Where stdin, stdout and stderr are closed no lock comes to stand in for one of them."""
    code = """if True:
        import os, reserve_gpu
        found = [n for n in range(200) if os.path.exists(f"/proc/self/fd/{n}")]
        locked = [n for n in found if os.readlink(f"/proc/self/fd/{n}").endswith(".lock")]
        open("out.txt", "w").write(f"{min(found) > 2} {min(locked) > 2} {reserve_gpu.current()!r}")
    """
    closed = ("sh", "-c", 'exec "$@" <&- >&- 2>&-', "-")
    machine.command(*closed, *US, *words, "--", sys.executable, "-c", code)
    assert (machine.folder / "out.txt").read_text() == "True True <Reservation of GPU0>"
    assert machine.command(*closed, *US, "status").returncode == 0


# -- what can't be run ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "code", "text"),
    [
        ("nosuch", 127, "There is no command nosuch."),
        ("./nosuch", 127, "There is no command ./nosuch."),
        ("./plain", 126, "./plain may not be executed by this user."),
        ("./", 126, "./ is a directory."),
        ("./folder", 126, "./folder is a directory."),
        ("", 127, "There is no command ."),
        ("no\x1b[31msuch", 127, "There is no command no\N{REPLACEMENT CHARACTER}[31msuch."),
    ],
)
def test_a_command_that_cannot_be_run_reserves_nothing(
    machine: Machine, command: str, code: int, text: str
) -> None:
    """A command that can't be found or run is told of before anything is asked of the driver."""
    (machine.folder / "plain").touch()
    (machine.folder / "folder").mkdir()
    done = run(machine, "--wait", "--", command, PYTHONIOENCODING="utf-8")
    assert (done.returncode, done.stdout, done.stderr) == (code, "", f"{text}\n")
    assert machine.calls() == []
    assert not machine.locks.exists()


def test_a_script_without_a_first_line(machine: Machine) -> None:
    """A file that the system can't execute is told of with the remedy, and its GPU is free."""
    path = machine.folder / "script"
    path.write_text("echo hello\n")
    path.chmod(0o755)
    done = run(machine, "--", "./script")
    assert done.returncode == 126
    assert done.stderr.splitlines()[-1] == (
        f"./script can't be run: {os.strerror(errno.ENOEXEC)}. "
        "A script needs a first line such as #!/bin/sh."
    )
    assert free(machine) == [0, 1]


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        ("run", 2, "There is no command to run"),
        ("run --", 2, "There is no command to run"),
        ("run -n x -- true", 2, "See reserve-gpu run --help"),
        ("run --nonsense -- true", 2, "See reserve-gpu --help"),
        ("run nonsense -- true", 2, "'nonsense' names no GPU"),
        ("run --wait soon -- true", 2, "'soon' is no duration"),
        ("run 7 -- true", 2, "There is no GPU7"),
        ("run -n 9 -- true", 2, "9"),
        ("run 0 true", 2, "Put -- before the command"),
        ("run --wait true", 2, "Put -- before the command"),
        ("run --exclude 0 true", 2, "Put -- before the command"),
        ("", 2, "See reserve-gpu --help"),
        ("nonsense", 2, "See reserve-gpu --help"),
        ("status --nonsense", 2, "See reserve-gpu --help"),
        ("status -- true", 2, "See reserve-gpu --help"),
    ],
)
def test_usage(machine: Machine, words: str, code: int, text: str) -> None:
    """A request that makes no sense is told in one line, with exit code 2."""
    done = machine.command(*US, *words.split())
    assert (done.returncode, done.stdout) == (code, "")
    assert text in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "words", ["-- env", "env", "-n 1 env", "-n1 env", "--note=0 env", "--share env", "-- env --"]
)
def test_where_the_command_begins(machine: Machine, words: str) -> None:
    """After `--`, or where it is clear without, the command begins."""
    done = run(machine, *words.split())
    assert done.returncode in (0, 127), done.stderr
    assert "Reserving GPU0" in done.stderr
    if not words.endswith("--"):
        assert "CUDA_VISIBLE_DEVICES=0\n" in done.stdout


@pytest.mark.parametrize("words", ["--help", "run --help", "status --help", "run --wait --help"])
def test_help(machine: Machine, words: str) -> None:
    """--help tells of each command what there is to know, and touches no GPU."""
    done = machine.command(*US, *words.split())
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: reserve-gpu")
    assert machine.calls() == []
    if words == "run --help":
        assert "exit codes:" in done.stdout
        assert "--min-memory SIZE" in done.stdout


# -- no GPU ---------------------------------------------------------------------------------------


def test_nothing_free(machine: Machine) -> None:
    """Where no GPU is free nothing is run, and what can be done is said in a shell's words."""
    with machine.child() as holder:
        holder.reserve("[0, 1]")
        done = run(machine, "--", "echo", "ran")
    assert (done.returncode, done.stdout) == (75, "")
    first, *devices, last = done.stderr.splitlines()
    assert first == "No free GPU devices: 2 of 2 are in use."
    assert all(f"(pid {holder.pid})" in line for line in devices)
    assert last == (
        "Wait in line with reserve-gpu run --wait, or share one with reserve-gpu run 0 --share."
    )


def test_the_wait_ran_out(machine: Machine) -> None:
    """A wait that runs out is exit code 75."""
    with machine.child() as holder:
        holder.reserve("[0, 1]")
        done = run(machine, "--wait", "0.1", "--", "echo", "ran")
    assert (done.returncode, done.stdout) == (75, "")
    assert "Waited for 0.1 s. No free GPU devices" in done.stderr


def test_no_driver(machine: Machine) -> None:
    """Without a driver it is exit code 69; with --optional the command runs as it would have."""
    extra = {"LD_LIBRARY_PATH": "", "CUDA_VISIBLE_DEVICES": "3"}
    done = run(machine, "--", "echo", "ran", **extra)
    assert (done.returncode, done.stdout) == (69, "")
    assert machine.command(*US, "status", **extra).returncode == 69
    done = run(machine, "--optional", "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES", **extra)
    assert (done.returncode, done.stdout) == (0, "3\n")
    assert done.stderr.splitlines()[-1] == "Going on without a GPU."


def test_optional(machine: Machine) -> None:
    """With --optional a command runs without a GPU, none visible to it, and the reason is said."""
    with machine.child() as holder:
        holder.reserve("[0, 1]")
        command = ("sh", "-c", "echo [$CUDA_VISIBLE_DEVICES]")
        done = run(machine, "--optional", "--", *command)
        assert (done.returncode, done.stdout) == (0, "[]\n")
        assert done.stderr.startswith("No free GPU devices")
        assert done.stderr.endswith("CUDA_VISIBLE_DEVICES = ''\nGoing on without a GPU.\n")


def test_a_python_that_goes_on_without_can_reserve_later(machine: Machine) -> None:
    """The emptiness that --optional left is no limit to what the same process asks for later."""
    with machine.child() as holder:
        holder.reserve("[0, 1]")
        with child(machine, "--optional") as command:
            assert command.visible() == ""
            holder.kill()
            assert command.reserve().value == "0"
            command.run("reserve_gpu.release()")
            assert command.visible() is None


def test_no_lock_directory(machine: Machine) -> None:
    """A lock directory that can't be used is exit code 78 and one line."""
    done = run(machine, "--", "true", RESERVE_GPU_LOCK_DIR="/dev/null/x")
    assert (done.returncode, done.stderr.count("\n")) == (78, 1)
    assert "RESERVE_GPU_LOCK_DIR" in done.stderr


def test_a_warning_is_a_line(machine: Machine) -> None:
    """A named GPU that is in use is taken with a warning on stderr."""
    machine.use("busy")
    done = run(machine, "0", "--", "true")
    assert done.returncode == 0
    assert done.stderr.startswith("Warning: You asked for GPU0: it is busy")
    assert "Reserving GPU0" in done.stderr


# -- waiting --------------------------------------------------------------------------------------


def test_a_wait_in_a_log(machine: Machine) -> None:
    """Without a terminal a wait is plain lines on stderr, and then the command runs."""
    with machine.child() as holder:
        holder.reserve("[0, 1]")
        with waiter(machine, "--", "echo", "ran") as process:
            holder.kill()
            out, said = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, out) == (0, "ran\n")
    assert said == RESERVED


def test_a_wait_on_a_terminal(machine: Machine) -> None:
    """On a terminal a wait is one line on stderr that is replaced, and gone at the end."""
    terminal, end = pty.openpty()
    said = b""
    with machine.child() as holder:
        holder.reserve("[0, 1]")
        with waiter(machine, "--", "echo", "ran", stderr=end, TERM="vt100") as process:
            os.close(end)
            while b"Waiting" not in said:
                said += os.read(terminal, 4096)
            holder.kill()
            assert process.communicate(timeout=LIMIT_S)[0] == "ran\n"
    with suppress(OSError):
        while select.select([terminal], [], [], LIMIT_S)[0]:
            said += os.read(terminal, 4096)
    os.close(terminal)
    before, _, after = said.decode().partition("Reserving GPU0")
    assert before.startswith("\r\x1b[KWaiting for a GPU")
    assert before.endswith("\r\x1b[K")
    assert "\n" not in before
    assert "\x1b" not in after


@pytest.mark.parametrize(
    ("number", "code"), [("SIGINT", 130), ("SIGTERM", -signal.SIGTERM), ("SIGHUP", -signal.SIGHUP)]
)
def test_a_signal_ends_a_wait(machine: Machine, number: str, code: int) -> None:
    """A signal ends a wait at once, without a traceback, with nothing held and nobody in line."""
    with machine.child() as holder:
        holder.reserve("[0, 1]")
        with waiter(machine, "--", "echo", "ran") as process:
            process.send_signal(getattr(signal, number))
            out, said = process.communicate(timeout=LIMIT_S)
        assert (process.returncode, out) == (code, "")
        assert "Traceback" not in said
        assert not holder.run("reserve_gpu.status().waiting").value
    assert free(machine) == [0, 1]


@pytest.mark.parametrize("words", [["run", "--", "true"], ["status"], ["run", "9", "--", "true"]])
def test_nobody_reads(machine: Machine, words: list[str]) -> None:
    """Closed pipes for stdout and stderr cause no traceback, and keep no command from running."""
    reader, writer = os.pipe()
    os.close(reader)
    for out, error in ((writer, subprocess.PIPE), (subprocess.PIPE, writer)):
        process = subprocess.Popen(
            [*US, *words], env=machine.environ(), cwd=machine.folder, text=True,
            stdin=subprocess.DEVNULL, stdout=out, stderr=error,
        )  # fmt: skip
        _, said = process.communicate(timeout=LIMIT_S)
        assert "Traceback" not in (said or "")
        assert "Broken" not in (said or "")
        if words[:2] == ["run", "--"]:
            assert process.returncode == 0
    os.close(writer)


# -- the reservation goes on in the command -------------------------------------------------------


def test_a_python_command_has_the_reservation(machine: Machine) -> None:
    """A Python command holds what it was started with: asking says so again, release frees it."""
    with child(machine, "-n", "2", "--note", "mine", CUDA_VISIBLE_DEVICES="0,1") as command:
        assert command.run("repr(reserve_gpu.current())").value == "<Reservation of GPU0 and GPU1>"
        assert command.reserve("count=2").value == "0,1"
        assert command.run("reserve_gpu.current().note").value == "mine"
        assert free(machine) == []
        released = command.run("[d.label for d in reserve_gpu.release()]")
        assert released.value == ["GPU0", "GPU1"]
        assert command.visible() == "0,1"  # the limit from outside stands again
        assert command.run("os.environ.get('CUDA_DEVICE_MEMORY')").value is None
        assert free(machine) == [0, 1]
        assert command.run("reserve_gpu.current()").value is None


def test_another_gpu_can_be_asked_for(machine: Machine) -> None:
    """What a command was started with can be given for another GPU; its limit is the outer one."""
    with child(machine) as command:
        assert command.reserve("1").value == "1"
        assert free(machine) == [0]


def test_a_with_does_not_end_it(machine: Machine) -> None:
    """A `with` in the command is an inner one: the command line's reservation outlives it."""
    with child(machine) as command:
        for _ in range(2):
            assert command.run("with reserve_gpu.reserve(): pass").error is None
        assert free(machine) == [1]
        assert command.visible() == "0"


CHILDREN = [
    "import subprocess; subprocess.Popen(['sleep', '1000'], close_fds=False).pid",
    "os.fork() or __import__('time').sleep(1000)",
]


@pytest.mark.parametrize("start", CHILDREN, ids=["exec", "fork"])
def test_children_of_an_adopting_command_do_not_keep_the_gpu(machine: Machine, start: str) -> None:
    """Once a Python command has looked at its reservation, its children have no part in it."""
    with child(machine) as command:
        command.run("reserve_gpu.current()")
        with living(command.run(start).value):
            command.kill()
            assert free(machine) == [0, 1]


def test_sharing_goes_on(machine: Machine) -> None:
    """Two commands that share a GPU both hold it, each for as long as it runs."""
    with child(machine, "--share", "0") as first, child(machine, "--share", "0") as second:
        for command in (first, second):
            assert command.reserve("0, share=True").value == "0"
        first.kill()
        assert free(machine) == [1]
        second.run("reserve_gpu.release()")
        assert free(machine) == [0, 1]


@pytest.mark.parametrize("look", ["None", "reserve_gpu.current()"])
def test_a_deleted_lock_file_frees_nothing(machine: Machine, look: str) -> None:
    """Though somebody deletes its lock file a command holds its GPU, before it looks and after."""
    with child(machine, "0") as command, machine.child() as other:
        command.run(look)
        (path,) = machine.locks.glob("GPU*.lock")
        path.unlink()
        refused = other.reserve("0")
        assert refused.error == "NoFreeDeviceError"
        assert f"(pid {command.pid})" in refused.text
        command.kill()
        assert other.reserve("0").value == "0"


def test_ipython_has_the_reservation(machine: Machine) -> None:
    """%reserve_gpu in a shell that was started with a GPU prints the same GPU again."""
    lines = "%reserve_gpu\n!echo $CUDA_VISIBLE_DEVICES\n%reserve_gpu --release"
    shell = ("-m", "IPython", "--no-banner", "--colors=NoColor", "--ext=reserve_gpu", "-c", lines)
    done = run(machine, "--", sys.executable, *shell)
    assert done.stderr == RESERVED
    assert done.stdout.startswith(f"{RESERVED}0\nReleased GPU0.\n"), done.stdout
    assert "CUDA_VISIBLE_DEVICES is not set" in done.stdout


def test_loading_the_extension_adopts(machine: Machine) -> None:
    """A shell that loads the extension keeps the GPU to itself before it starts its first child."""
    with child(machine) as command:
        command.run("import IPython; IPython.InteractiveShell().run_line_magic")
        command.run("shell = IPython.get_ipython() or IPython.InteractiveShell.instance()")
        assert command.run("shell.extension_manager.load_extension('reserve_gpu')").value is None
        with living(command.run(CHILDREN[0]).value):
            command.kill()
            assert free(machine) == [0, 1]


HELD: dict[str, Any] = {"before": {}, "written": {}, "note": None, "reason": None}


def forgeries() -> dict[str, str]:
    """What RESERVE_GPU_HELD may say without being true; PID is the process's own."""
    device = {"index": 0, "uuid": "GPU-x"}
    held = HELD | {"devices": [device], "locks": [[3, -1, False]]}
    texts = {
        "closed": held | {"locks": [[99, -1, False]]},
        "another file": held | {"locks": [[1, -1, False]]},
        "not locked": held,
        "a lock of another file": held | {"locks": [[4, -1, False]]},
        "negative": held | {"locks": [[-1, -1, False]]},
        "enormous": held | {"locks": [[1 << 80, -1, False]]},
        "no number": held | {"locks": [["3", -1, False]]},
        "other lengths": held | {"locks": []},
        "no device": held | {"devices": [7]},
        "another field": held | {"devices": [device | {"nonsense": 1}]},
        "another type": held | {"devices": [device | {"name": 1}]},
        "a path": held | {"devices": [device | {"uuid": "../../etc/passwd"}]},
        "no text": held | {"note": 1},
        "a list": [],
        "huge": held | {"note": "x" * 110_000},
    }
    known = {name: f"PID {json.dumps(told)}" for name, told in texts.items()}
    return known | {
        "empty": "",
        "rubbish": "PID rubbish",
        "deep": "PID " + "[" * 50_000,
        "no pid": json.dumps(held),
        "another pid": f"1 {json.dumps(held)}",
        "a large pid": "9" * 5000,
        "surrogates": "PID \udcff\udcfe",
    }


def test_forgeries_are_ignored(machine: Machine) -> None:
    """What the environment says of a reservation is ignored without a word where it is not so."""
    machine.locks.mkdir()
    (machine.locks / "GPU-x.lock").touch()
    code = """if True:
        import os, sys, reserve_gpu
        from reserve_gpu import reservation
        from fcntl import LOCK_EX, flock
        os.dup2(os.open(sys.argv[1], os.O_RDWR), 3)
        os.dup2(os.open("another", os.O_RDWR | os.O_CREAT), 4)
        flock(4, LOCK_EX)
        told = os.fsencode(sys.argv[2]).replace(b"PID", b"%d" % os.getpid())
        os.environb[b"RESERVE_GPU_HELD"] = told
        print(reserve_gpu.current(), reserve_gpu.reserve().devices[0].label)
    """
    for name, text in forgeries().items():
        done = subprocess.run(
            [sys.executable, "-c", code, str(machine.locks / "GPU-x.lock"), text],
            env=machine.environ(), cwd=machine.folder, text=True, capture_output=True,
            check=False, timeout=LIMIT_S,
        )  # fmt: skip
        assert (done.stdout, done.stderr) == ("None GPU0\n", ""), name


def test_a_lock_of_another_opening_is_not_adopted(machine: Machine) -> None:
    """A descriptor of a GPU's lock file is nothing, though the same file is locked by another."""
    with machine.child() as holder, machine.child() as forger:
        holder.reserve("0")
        (path,) = machine.locks.glob("GPU*.lock")
        uuid = path.name.removesuffix(".lock")
        told = HELD | {"devices": [{"index": 0, "uuid": uuid}]}
        forger.run(f"lock = os.open({str(path)!r}, os.O_RDWR)")
        forger.run(f"told = {told!r} | {{'locks': [[lock, -1, False]]}}; import json")
        forger.run("os.environ['RESERVE_GPU_HELD'] = f'{os.getpid()} {json.dumps(told)}'")
        assert forger.run("reserve_gpu.current()").value is None
        assert forger.reserve("0").error == "NoFreeDeviceError"


# -- processes below the command ------------------------------------------------------------------


def test_below_a_command_that_holds_it(machine: Machine) -> None:
    """Another process below the command is told that the GPU is set for it; nothing is changed."""
    inner = "import reserve_gpu, os\ntry: reserve_gpu.reserve(wait=True)\n"
    inner += "except reserve_gpu.NoFreeDeviceError as error: print(error)\n"
    inner += "print(os.environ['CUDA_VISIBLE_DEVICES'])"
    (machine.folder / "inner.py").write_text(inner)
    shell = f"echo $$; {sys.executable} inner.py; {' '.join(US)} run -- true; echo $?"
    done = run(machine, "--", "sh", "-c", shell)
    pid, *told, visible, code = done.stdout.splitlines()
    assert told[0].startswith("GPU0 is reserved already, for all that the holder has started")
    assert f"(pid {pid})" in told[1]
    assert "leave out %reserve_gpu here" in told[2]
    assert "%reserve_gpu 0 --share" in told[2]
    assert (visible, code) == ("0", "75")


def test_below_with_optional_and_share(machine: Machine) -> None:
    """Below a command `--optional` goes on with what is set, and `--share` takes part in it."""
    ours = " ".join(US)
    shell = f"{ours} run --optional -- printenv CUDA_VISIBLE_DEVICES\n"
    shell += f"{ours} run --share -- printenv CUDA_VISIBLE_DEVICES"
    done = run(machine, "1", "--", "sh", "-c", shell)
    assert done.stdout == "1\n1\n", done.stderr
    assert "Going on with CUDA_VISIBLE_DEVICES = '1'" in done.stderr


# -- where it is used -----------------------------------------------------------------------------


def test_ranks_each_take_one(machine: Machine) -> None:
    """Four commands at the same moment, as mpirun starts its ranks, get four GPUs."""
    machine.use("eight")
    ranks = [Child(machine.environ(), machine.folder, *US, "run", "--") for _ in range(4)]
    try:
        assert sorted(rank.visible() for rank in ranks) == ["0", "1", "2", "3"]
    finally:
        for rank in ranks:
            rank.kill()


@pytest.mark.skipif(not program("make"), reason="there is no make")
def test_in_a_makefile(machine: Machine, script: str) -> None:
    """Two jobs of one make, side by side, have a GPU each and wait for one if need be."""
    (machine.folder / "Makefile").write_text(
        "all: a b c\na b c:\n"
        "\t@reserve-gpu run --wait -- sh -c 'echo $@ on $$CUDA_VISIBLE_DEVICES'\n"
    )
    path = f"{Path(script).parent}:{os.environ['PATH']}"
    done = machine.command("make", "-s", "-j3", "all", PATH=path)
    assert done.returncode == 0, done.stderr
    assert sorted(line.split()[0] for line in done.stdout.splitlines()) == ["a", "b", "c"]
    assert {line.split()[2] for line in done.stdout.splitlines()} <= {"0", "1"}


def test_as_cron_runs_it(machine: Machine, script: str) -> None:
    """With hardly an environment, no terminal and an ASCII locale it does the same."""
    kept = ("LD_LIBRARY_PATH", "STAND_IN_SCENARIO", "STAND_IN_LOG", "RESERVE_GPU_LOCK_DIR")
    environ = {k: v for k, v in machine.environ().items() if k in kept}
    environ |= {"PYTHONPATH": str(ROOT), "LC_ALL": "C"}
    for words in (["run", "--", "printenv", "CUDA_VISIBLE_DEVICES"], ["status"]):
        done = subprocess.run(
            [script, *words], env=environ, cwd="/", text=True, capture_output=True, check=False,
            timeout=LIMIT_S, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("0\n" if words[0] == "run" else "2 of 2 GPUs are free")


def test_status(machine: Machine) -> None:
    """`status` shows what %reserve_gpu --status shows, and --json the same for programs."""
    with machine.child() as holder:
        holder.reserve("1")
        text = machine.command(*US, "status")
        found = machine.command(*US, "status", "--json")
    assert (text.returncode, text.stderr, found.returncode, found.stderr) == (0, "", 0, "")
    assert f"(pid {holder.pid})" in text.stdout
    assert "\x1b" not in text.stdout
    assert json.loads(found.stdout)


def test_check(machine: Machine) -> None:
    """`check` says whether a framework would use what the command was given, also by exit code."""
    machine.use("two")
    standins = {"PYTHONPATH": STANDINS}  # whatever is installed here
    fits = machine.command(*US, "run", "1", "--", *US, "check", **standins)
    assert (fits.returncode, "Reserved: GPU1." in fits.stdout) == (0, True), fits
    changed = ("env", "CUDA_VISIBLE_DEVICES=0", *US, "check", "--json")
    does_not = machine.command(*US, "run", "1", "--", *changed, **standins)
    assert json.loads(does_not.stdout)
    assert does_not.returncode == 1, does_not


@pytest.mark.needs("frameworks")
def test_torchrun(machine: Machine) -> None:
    """Each rank of a torchrun sees the GPUs that it was started with."""
    (machine.folder / "rank.py").write_text(
        "import os, torch\nprint(os.environ['LOCAL_RANK'], os.environ['CUDA_VISIBLE_DEVICES'])\n"
    )
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "rank.py")
    done = run(machine, "-n", "2", "--", *torchrun)
    assert sorted(done.stdout.splitlines()) == ["0 0,1", "1 0,1"], done.stderr
    assert free(machine) == [0, 1]


@pytest.mark.needs("engines")
def test_jupyterhub(machine: Machine, script: str) -> None:
    """A server that JupyterHub's spawner starts so is the process that it polls and stops."""
    server = machine.folder / "server.py"
    server.write_text(
        "import os, signal, sys\n"
        "with open('started', 'w') as pipe:\n"
        "    print(os.getpid(), os.environ['CUDA_VISIBLE_DEVICES'], sys.argv[0], file=pipe)\n"
        "signal.pause()\n"
    )
    os.mkfifo(machine.folder / "started")
    path = f"{Path(script).parent}:{os.environ['PATH']}"
    command = ("reserve-gpu", "run", "--", sys.executable, "server.py")
    done = machine.command(sys.executable, str(ROOT / "tests" / "hub.py"), *command, PATH=path)
    pid, running, *told, stopped = done.stdout.split()
    assert (running, told, stopped) == ("None", [pid, "0", "server.py"], "False"), done.stderr
    assert free(machine) == [0, 1]


COMPLETIONS = [
    ("reserve-gpu ", {"run", "status", "check", "kernel"}),
    ("reserve-gpu ker", {"kernel "}),
    ("reserve-gpu kernel ", {"install", "uninstall"}),
    ("reserve-gpu run --mi", {"--min-memory "}),
    ("reserve-gpu status --", {"--json"}),
]


@pytest.mark.needs("completion")
@pytest.mark.parametrize(("typed", "expected"), COMPLETIONS)
def test_completion(machine: Machine, script: str, typed: str, expected: set[str]) -> None:
    """A shell that asks by argcomplete's protocol is told the commands and their options."""
    extra = {"_ARGCOMPLETE": "1", "COMP_LINE": typed, "COMP_POINT": str(len(typed))}
    extra |= {"_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_SHELL": "bash"}
    done = machine.command("sh", "-c", f"exec {script} 8>&1 9>/dev/null", **extra)
    found = {word for word in done.stdout.split("\n") if word and not word.startswith("-h")}
    assert found - {"--help", "--version"} == expected
    assert machine.calls() == []


@pytest.mark.needs("completion")
def test_a_shell_completes(machine: Machine, script: str) -> None:
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
    done = machine.command("bash", "-c", code, PATH=path)
    assert done.stdout == "status \n", done.stderr
