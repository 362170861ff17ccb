"""Commands that another process would run, so that they would not keep the reservation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from reserve_gpu.commands.run import lookup
from reserve_gpu.model.errors import CommandError, RequestError
from tests.support.commandline import CommandLine

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.here import Here


OURS = "reserve-gpu run --"


@pytest.fixture
def typed(here: Here, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    here.use("two")
    return CommandLine(capsys)


def test_a_refused_command_reserves_nothing(here: Here, typed: CommandLine, tmp_path: Path) -> None:
    """`run -- sudo ...` ends with 2 before anything is reserved, and repeats what was asked for."""
    sudo = tmp_path / "sudo"
    sudo.write_text("#!/bin/sh\n")
    sudo.chmod(0o755)
    done = typed("run", "-n", "2", "--wait", "1h", "--", str(sudo), "id")
    assert (done.code, done.stdout, done.argv) == (2, "", None)
    assert done.stderr.endswith("/reserve-gpu run --count=2 --wait=1h -- id\n")
    assert not here.locks.exists()


# -- not a program ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "typed"),
    [
        (["A=1", "B=x y", "python", "t.py"], f"{OURS} env A=1 'B=x y' python t.py"),
        (["CUDA_VISIBLE_DEVICES=1", "python", "t.py"], "reserve-gpu run 1 -- python t.py"),
        (["A=1", "CUDA_VISIBLE_DEVICES=0,2", "python"], "reserve-gpu run 0,2 -- env A=1 python"),
        (["CUDA_VISIBLE_DEVICES=GPU-8f2a", "python"], f"{OURS} python"),
        (["nohup", "A=1", "python", "t.py"], f"{OURS} nohup env A=1 python t.py"),
        (["nohup", "CUDA_VISIBLE_DEVICES=1", "python"], "reserve-gpu run 1 -- nohup python"),
        (["python t.py --lr 1"], f"{OURS} python t.py --lr 1"),
        (["CUDA_VISIBLE_DEVICES=1 python t.py"], "reserve-gpu run 1 -- python t.py"),
        (["A=1 python t.py"], f"{OURS} env A=1 python t.py"),
        (["cd x && python t.py"], f"{OURS} sh -c 'cd x && python t.py'"),
        (["cd", "a", "&&", "python", "t.py"], f"{OURS} bash -c 'cd a && python t.py'"),
        (["cd", "x"], f"{OURS} bash -c 'cd x && COMMAND ...'"),
        (["source", "a/b"], f"{OURS} bash -c 'source a/b && COMMAND ...'"),
        (["exec", "python", "t.py"], f"{OURS} python t.py"),
        (["nosuch", "x", "|", "tee", "log"], f"{OURS} bash -c 'nosuch x | tee log'"),
        (["train.py", "-n", "1"], f"{OURS} python train.py -n 1"),
        (["./train.py"], f"{OURS} python ./train.py"),
        (["run.sh"], f"{OURS} ./run.sh"),
        (["~/tool", "x"], f"{OURS} HOME/tool x"),
        (["$HOME/tool"], f"{OURS} HOME/tool"),
        (["./crlf.sh"], "sed -i 's/\\r$//' ./crlf.sh"),
        (["nice", "./crlf.sh"], "sed -i 's/\\r$//' ./crlf.sh"),
        (["./envcrlf.py"], "sed -i 's/\\r$//' ./envcrlf.py"),
        (["./stale.py", "x"], f"{OURS} python ./stale.py x"),
        (["./envstale.py"], f"{OURS} python ./envstale.py"),
        (["myalias", "a b"], f"""{OURS} bash -ic 'myalias '"'"'a b'"'"''"""),
    ],
)  # fmt: skip
def test_not_a_program(
    here: Here, monkeypatch: pytest.MonkeyPatch, words: list[str], typed: str
) -> None:
    """A command that does not begin with a program is explained, with the line that works."""
    monkeypatch.setenv("SHELL", "/bin/bash")
    files = {
        "home/tool": b"#!/bin/sh\n",
        "crlf.sh": b"#!/bin/bash\r\necho\r\n",
        "envcrlf.py": b"#!/usr/bin/env python\r\n",
        "stale.py": b"#!/opt/gone/bin/python\n",
        "envstale.py": b"#!/usr/bin/env python2.4\n",
        "run.sh": b"#!/bin/sh\n",
    }
    for name, content in files.items():
        path = here.folder / name
        path.write_bytes(content)
        path.chmod(0o755)
    (here.folder / "train.py").write_text("")
    with pytest.raises((RequestError, CommandError)) as caught:
        lookup.find(words, lambda: OURS)
    lines = str(caught.value).splitlines()
    assert lines[-1] == typed.replace("HOME", str(here.home))
    assert len(lines) == 2


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--wait", "python"], "Put options and GPUs before the --."),
        (["1", "python"], "Put options and GPUs before the --."),
        (["./binary"], "./binary names /etc/passwd, which is not executable."),
        ([""], "Command not found: ."),
        (["a\x1b[1m=1"], "Command not found: a\ufffd[1m=1."),
        (["'python"], "Command not found: 'python."),
        (["'python x"], "Command not found: 'python x."),
        (["./loop"], "Command not found: ./loop."),
    ],
)
def test_unexplained_errors(here: Here, words: list[str], text: str) -> None:
    """An error that has no better explanation is one printable line."""
    path = here.folder / "binary"
    path.write_text("#!/etc/passwd\n")
    path.chmod(0o755)
    (here.folder / "loop").symlink_to("loop")
    with pytest.raises(CommandError) as caught:
        lookup.find(words, lambda: OURS)
    assert str(caught.value).endswith(text)


@pytest.mark.parametrize(
    "first",
    [b"#!/bin/sh -e\n", b"#! /usr/bin/env  sh\n", b"#!/usr/bin/env -S sh -e\n", b"\x7fELF", b""],
)
def test_programs_that_may_run(here: Here, first: bytes) -> None:
    """A script with an interpreter that exists is found, and so is a binary or an empty file."""
    path = here.folder / "program"
    path.write_bytes(first)
    path.chmod(0o755)
    assert lookup.find(["./program"], lambda: OURS) == "./program"
