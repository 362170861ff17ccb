"""Find the program of a command, or explain why the command is not one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from reserve_gpu.commands.run import lookup
from reserve_gpu.model.errors import CommandError, RequestError
from tests.support.handoff import OURS, suggestion

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.commandline import CommandLine
    from tests.support.here import Here

FILES = {
    "home/tool": b"#!/bin/sh\n",
    "crlf.sh": b"#!/bin/bash\r\necho\r\n",
    "stale.py": b"#!/opt/gone/bin/python\n",
    "env_stale.py": b"#!/usr/bin/env python2.4\n",
    "data": b"#!/etc/passwd\n",
    "run.sh": b"#!/bin/sh\n",
}


def write_program(folder: Path, name: str, content: bytes) -> None:
    """Write an executable file."""
    (folder / name).write_bytes(content)
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["A=1", "CUDA_VISIBLE_DEVICES=0,2", "python"], "reserve-gpu run 0,2 -- env A=1 python"),
        (["nohup", "A=1", "python", "t.py"], f"{OURS} nohup env A=1 python t.py"),
        (["train.py", "-n", "1"], f"{OURS} python train.py -n 1"),
        (["./train.py"], f"{OURS} python ./train.py"),
        (["run.sh"], f"{OURS} ./run.sh"),
        (["~/tool", "x"], f"{OURS} HOME/tool x"),
        (["./crlf.sh"], "sed -i 's/\\r$//' ./crlf.sh"),
        (["nice", "./crlf.sh"], "sed -i 's/\\r$//' ./crlf.sh"),
        (["./stale.py", "x"], f"{OURS} python ./stale.py x"),
        (["./env_stale.py"], f"{OURS} python ./env_stale.py"),
        (["myalias", "a b"], f"""{OURS} bash -ic 'myalias '"'"'a b'"'"''"""),
    ],
)
def test_a_command_that_is_not_a_program_gets_a_line_that_works(
    here: Here, monkeypatch: pytest.MonkeyPatch, words: list[str], line: str
) -> None:
    monkeypatch.setenv("SHELL", "/bin/bash")
    for name, content in FILES.items():
        write_program(here.folder, name, content)
    (here.folder / "train.py").write_text("")
    with pytest.raises((RequestError, CommandError)) as caught:
        lookup.find(words, lambda: OURS)
    _, suggested = str(caught.value).splitlines()
    assert suggested == line.replace("HOME", str(here.home))


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["1", "python"], "--"),
        (["./data"], "/etc/passwd"),
        (["'python x"], "'python x"),
        (["python t.py", "x"], "python t.py"),
    ],
)
def test_other_errors_are_one_printable_line(here: Here, words: list[str], key: str) -> None:
    write_program(here.folder, "data", FILES["data"])
    with pytest.raises(CommandError) as caught:
        lookup.find(words, lambda: OURS)
    text = str(caught.value)
    assert key in text
    assert text.isprintable()


def test_a_refused_command_reserves_nothing(here: Here, typed: CommandLine, tmp_path: Path) -> None:
    """The suggested line repeats the options of the request."""
    write_program(tmp_path, "sudo", b"#!/bin/sh\n")
    done = typed("run", "-n", "2", "--wait", "1h", "--", str(tmp_path / "sudo"), "id")
    assert (done.code, done.stdout, done.argv) == (2, "", None)
    assert done.stderr.endswith("/reserve-gpu run --count=2 --wait=1h -- id\n")
    assert not here.locks.exists()


# -- a running tmux server -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "suggested"),
    [
        ("new -d -s work ./train.sh", f"new -d -s work '{OURS} ./train.sh'"),
        ("-S /x -2 new-session -d 'python t.py'", f"-S /x -2 new-session -d '{OURS} python t.py'"),
        ("neww -n x python t.py", f"neww -n x '{OURS} python t.py'"),
        ("new -s work", f"new -s work '{OURS} COMMAND ...'"),
        ("attach", f"new-session '{OURS} COMMAND ...'"),
        ("", f"new-session '{OURS} COMMAND ...'"),
    ],
)
def test_a_running_tmux_starts_reserve_gpu(tmux: str, arguments: str, suggested: str) -> None:
    assert suggestion(f"{tmux} {arguments}") == f"{tmux} {suggested}"
