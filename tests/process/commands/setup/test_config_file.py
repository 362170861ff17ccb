"""Interrupted changes of ipython_config.py."""

from __future__ import annotations

import itertools
import os
import signal

import pytest

from reserve_gpu.commands.setup import config_file, setup
from tests.support.locked import watched
from tests.support.profiles import CONFIG_FILE, Home

PYTHON = b"/one/bin/python3.11"
BLOCK = config_file.added(b"", PYTHON)
COPY = f"{CONFIG_FILE}.before-reserve_gpu"


def interrupt(home: Home, verb: str, number: int, at: int) -> int:
    """Run a step in a child process that gets a signal, and return the exit status.

    Args:
        home: The home directory.
        verb: The step.
        number: The signal.
        at: The number of the system call before which the signal is sent.
    """
    calls = itertools.count(1)

    def send_signal(event: str, _: object) -> None:
        if event.startswith(("open", "os.", "shutil.")) and next(calls) == at:
            signal.raise_signal(number)

    if pid := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    status: object = 128 + number
    try:
        setup.exit_on_signals()
        with watched(send_signal):
            getattr(config_file.Config(str(home.config), PYTHON), verb)()
        status = 0
    except SystemExit as end:
        status = end.code
    finally:
        os._exit(int(f"{status}"))


@pytest.mark.parametrize("verb", ["add", "remove"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_interruption_leaves_the_old_file_or_the_new(
    verb: str, number: signal.Signals, home: Home
) -> None:
    """A signal at any time leaves a complete file, and the content from before the lines."""
    original = b"x = 1\n" * 1000
    before = original + (BLOCK if verb == "remove" else b"")
    after = original + (BLOCK if verb == "add" else b"")
    seen, code, at = set(), -1, 0
    while code:
        at += 1
        home.write(before)
        (home.path / COPY).unlink(missing_ok=True)
        code = interrupt(home, verb, number, at)
        assert code in (0, -number, 128 + number)
        files = home.files()
        seen.add(files.pop(CONFIG_FILE))
        assert files.pop(COPY, original) == original
        assert number == signal.SIGKILL or not files
        for name in files:
            (home.path / name).unlink()
    assert seen == {before, after}
