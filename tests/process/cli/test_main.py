"""`reserve-gpu` as a process: interrupts, standard streams, exit codes and completion."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from reserve_gpu.commands.registry import COMMANDS
from tests.support.machine import LIMIT_S, ROOT
from tests.support.processes import US

if TYPE_CHECKING:
    from tests.support.here import Here

# A sitecustomize module that sends SIGINT to the process at the import of a module.
INTERRUPT_AT_IMPORT = """
import os, sys
def watch(event, arguments):
    if event == "import" and arguments[0] == os.environ["AT"]:
        os.kill(os.getpid(), 2)
sys.addaudithook(watch)
"""


@pytest.mark.parametrize("name", ["reserve-gpu", "python -m reserve_gpu"])
@pytest.mark.parametrize("at", ["signal", "reserve_gpu.model.errors", "gettext"])
def test_interrupt_at_startup(here: Here, script: str, name: str, at: str) -> None:
    """Ctrl-C during startup ends the command line with at most one line of output."""
    (here.folder / "sitecustomize.py").write_text(INTERRUPT_AT_IMPORT)
    program = (script,) if name == "reserve-gpu" else US
    path = f"{here.folder}:{ROOT}"
    done = here.command(*program, "run", "--", "touch", "started", AT=at, PYTHONPATH=path)
    assert done.returncode in (-signal.SIGINT, 130)  # both are 130 to a shell
    assert (done.stdout + done.stderr).count("\n") <= 1
    assert "Traceback" not in done.stderr
    assert not (here.folder / "started").exists()


def test_ignored_interrupt_stays_ignored(here: Here, script: str) -> None:
    """SIGINT stays ignored after nohup and in background jobs."""
    (here.folder / "sitecustomize.py").write_text(INTERRUPT_AT_IMPORT)
    ignoring = ("sh", "-c", f"trap '' INT; exec {script} run -- echo started")
    path = f"{here.folder}:{ROOT}"
    done = here.command(*ignoring, AT="reserve_gpu.model.errors", PYTHONPATH=path)
    assert done.stdout == "started\n", done.stderr


def test_closed_standard_streams_become_dev_null(here: Here) -> None:
    """No other file gets the descriptors 0 to 2 if they are closed."""
    code = """if True:
        import os, sys
        from reserve_gpu.cli.main import main
        ends = main(["status"]), main(["nonsense"])
        files = [os.readlink(f"/proc/self/fd/{n}") for n in range(3)]
        open("out.txt", "w").write(f"{ends} {set(files)}")
    """
    here.command("sh", "-c", 'exec "$@" <&- >&- 2>&-', "-", sys.executable, "-c", code)
    assert (here.folder / "out.txt").read_text() == "(0, 2) {'/dev/null'}"


@pytest.mark.parametrize("words", ["status --json", "--version"])
def test_full_disk(here: Here, words: str) -> None:
    """If stdout can't be written, there is one line on stderr, and the exit code is 74."""
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*US, *words.split()], env=here.environ(), cwd=here.folder, text=True, check=False,
            stdin=subprocess.DEVNULL, stdout=full, stderr=subprocess.PIPE, timeout=LIMIT_S,
        )  # fmt: skip
    assert (done.returncode, done.stderr.count("\n")) == (74, 1)
    assert "No space left on device" in done.stderr


@pytest.mark.parametrize(
    ("words", "closed", "code"),
    [
        ("run -- true", "stderr", 0),
        ("status", "stdout", -signal.SIGPIPE),
    ],
)
def test_pipe_without_a_reader(here: Here, words: str, closed: str, code: int) -> None:
    """A closed pipe causes no traceback, and does not keep a command from running."""
    reader, writer = os.pipe()
    os.close(reader)
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, closed: writer}
    process = subprocess.Popen(
        [*US, *words.split()], env=here.environ(), cwd=here.folder, text=True,
        stdin=subprocess.DEVNULL, **pipes,
    )  # fmt: skip
    os.close(writer)
    assert not any(process.communicate(timeout=LIMIT_S))
    assert process.returncode == code


def test_cron_environment(here: Here, script: str) -> None:
    """A small environment, no terminal and an ASCII locale are enough."""
    kept = ("LD_LIBRARY_PATH", "STAND_IN_SCENARIO", "STAND_IN_LOG", "RESERVE_GPU_LOCK_DIR")
    environ = {k: v for k, v in here.environ().items() if k in kept}
    environ |= {"PYTHONPATH": str(ROOT), "LC_ALL": "C"}
    for words, output in (("run -- printenv CUDA_VISIBLE_DEVICES", "0\n"), ("status", "Both GPUs")):
        done = subprocess.run(
            [script, *words.split()], env=environ, cwd="/", text=True, capture_output=True,
            check=False, timeout=LIMIT_S, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(output)


COMMAND_WORDS = {name.partition(" ")[0] for name, command in COMMANDS.items() if command.help}


@pytest.mark.needs("completion")
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("reserve-gpu ", COMMAND_WORDS),
        ("reserve-gpu kernel ", {"install"}),
        ("reserve-gpu run --mi", {"--min-memory "}),
        ("reserve-gpu report --by ", {"user", "notebook", "gpu", "day"}),
    ],
)
def test_completion(here: Here, script: str, line: str, expected: set[str]) -> None:
    """A shell that uses argcomplete's protocol gets the commands and their options."""
    extra = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line))}
    extra |= {"_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_SHELL": "bash"}
    done = here.command("sh", "-c", f"exec {script} 8>&1 9>/dev/null", **extra)
    found = {word for word in done.stdout.split("\n") if word and not word.startswith("-h")}
    assert found - {"--help", "--version"} == expected
    assert here.calls() == []
