"""Commands that another process would run, and the lines that keep the reservation instead."""

from __future__ import annotations

import shlex

import pytest

from reserve_gpu.commands.run import handoff
from tests.support.handoff import OURS, suggestion


@pytest.mark.parametrize(
    "line",
    [
        "/usr/bin/sudo -u bob -E A=1 {} python t.py",
        "sudo -ubob -- {} sh -c 'a b'",
        "sudo --user bob {} python t.py",
        "screen -dmS work {} python t.py",
        "systemd-run --user -p A=b {} python t.py",
        "env -u A B=1 nice -n 5 sudo {} python t.py",
        "timeout -k 5 1h sudo {} python t.py",
        "setsid -w stdbuf -oL taskset -c 0-3 sudo {} x",
        "su - bob -c '{} python t.py'",
        "ssh -t -p 22 bob@lab1 {} COMMAND ...",
    ],
)
def test_reserve_gpu_is_put_behind_a_program_that_drops_the_reservation(line: str) -> None:
    command = line.replace(" {} COMMAND ...", "").replace("{} ", "")
    assert suggestion(command) == line.replace("{}", OURS)


def test_a_command_with_shell_syntax_stays_one_word_on_another_machine() -> None:
    words = shlex.split(suggestion("""ssh lab1 'cd x && python "t 1.py"'"""))
    assert words[:2] == ["ssh", "lab1"]
    assert shlex.split(words[2]) == [*OURS.split(), "sh", "-c", 'cd x && python "t 1.py"']


GPUS = '--gpus "\\"device=$CUDA_VISIBLE_DEVICES\\""'


@pytest.mark.parametrize(
    ("line", "inner"),
    [
        (
            "docker -H unix:///x run -d --gpus=0 IMAGE",
            f"exec docker -H unix:///x run {GPUS} IMAGE",
        ),
        (
            "docker run -itd --detach --gpus device=0 -d IMAGE prog -d",
            f"exec docker run {GPUS} -it IMAGE prog -d",
        ),
        (
            "podman container run IMAGE",
            "exec podman container run --device nvidia.com/gpu=$CUDA_VISIBLE_DEVICES IMAGE",
        ),
    ],
)
def test_a_container_runs_in_the_foreground_with_the_reserved_gpu(line: str, inner: str) -> None:
    assert shlex.split(suggestion(line)) == [*OURS.split(), "sh", "-c", inner]


@pytest.mark.parametrize(
    "line",
    [
        "python train.py -d sudo",
        "env A=1 python t.py",
        "env -S 'sudo x'",
        "timeout 5",
        "sh -c 'sudo python t.py'",
        "systemd-run --user --scope python t.py",
        "su bob -c 'python t.py'",
        "docker ps",
        "docker run -e CUDA_VISIBLE_DEVICES --gpus all IMAGE prog -d",
        "docker run --gpus device=0 IMAGE",
    ],
)
def test_a_program_that_keeps_the_reservation_is_allowed(line: str) -> None:
    """The argument of `sh -c` is not parsed."""
    handoff.require_kept_reservation(shlex.split(line), lambda: OURS)


@pytest.mark.parametrize(
    ("line", "typed"),
    [
        ("env A=b CUDA_VISIBLE_DEVICES=0,1 python", "reserve-gpu run 0,1 -- env A=b python"),
        ("nice env CUDA_VISIBLE_DEVICES= python t.py", "reserve-gpu run -- nice python t.py"),
    ],
)
def test_a_command_may_not_set_the_variable_itself(line: str, typed: str) -> None:
    assert suggestion(line) == typed
