"""Commands that another process would run, so that they would not keep the reservation."""

from __future__ import annotations

import shlex
import shutil

import pytest

from reserve_gpu.commands.run import handoff
from reserve_gpu.model.errors import RequestError

OURS = "reserve-gpu run --"


def refused(line: str) -> str:
    """Return the error for a line behind `reserve-gpu run --`."""
    with pytest.raises(RequestError) as caught:
        handoff.require_kept_reservation(shlex.split(line), lambda: OURS)
    return str(caught.value)


def hint(line: str) -> str:
    """Return the line that the error suggests, without the path of `reserve-gpu`."""
    *_, typed = refused(line).splitlines()
    path = shutil.which("reserve-gpu")
    return typed.replace(f"{path} ", "reserve-gpu ")


@pytest.mark.parametrize(
    ("line", "typed"),
    [
        ("sudo python train.py", f"sudo {OURS} python train.py"),
        (
            "/usr/bin/sudo -u bob -E A=1 python t.py",
            f"/usr/bin/sudo -u bob -E A=1 {OURS} python t.py",
        ),
        ("sudo -ubob -- sh -c 'a b'", f"sudo -ubob -- {OURS} sh -c 'a b'"),
        ("sudo --user bob python t.py", f"sudo --user bob {OURS} python t.py"),
        ("sudo -i", f"sudo -i {OURS} COMMAND ..."),
        ("doas -u bob python t.py", f"doas -u bob {OURS} python t.py"),
        ("pkexec --user bob python t.py", f"pkexec --user bob {OURS} python t.py"),
        ("run0 python t.py", f"run0 {OURS} python t.py"),
        ("screen -d -m python t.py", f"screen -d -m {OURS} python t.py"),
        ("screen -dmS work python t.py", f"screen -dmS work {OURS} python t.py"),
        ("systemd-run --user -p A=b python t.py", f"systemd-run --user -p A=b {OURS} python t.py"),
        ("systemd-run --unit x python t.py", f"systemd-run --unit x {OURS} python t.py"),
        ("nohup sudo python t.py", f"nohup sudo {OURS} python t.py"),
        (
            "env -u A B=1 nice -n 5 sudo python t.py",
            f"env -u A B=1 nice -n 5 sudo {OURS} python t.py",
        ),
        ("timeout -k 5 1h sudo python t.py", f"timeout -k 5 1h sudo {OURS} python t.py"),
        ("xvfb-run -a -s '-screen 0' sudo x", f"xvfb-run -a -s '-screen 0' sudo {OURS} x"),
        (
            "setsid -w stdbuf -oL taskset -c 0-3 sudo x",
            f"setsid -w stdbuf -oL taskset -c 0-3 sudo {OURS} x",
        ),
        ("su - bob -c 'python t.py'", f"su - bob -c '{OURS} python t.py'"),
        ("su -l", f"su -l -c '{OURS} COMMAND ...'"),
        ("ssh lab1 python t.py", f"ssh lab1 {OURS} python t.py"),
        ("ssh -t -p 22 bob@lab1", f"ssh -t -p 22 bob@lab1 {OURS} COMMAND ..."),
    ],
)
def test_starters(line: str, typed: str) -> None:
    """A program that drops the variables or the lock is refused, with the line that keeps both."""
    assert hint(line) == typed


def test_text_for_a_shell() -> None:
    """A line for a shell on another machine stays one word there, however it is quoted."""
    words = shlex.split(hint("""ssh lab1 'cd x && python "t 1.py"'"""))
    assert words[:2] == ["ssh", "lab1"]
    assert shlex.split(words[2]) == [*OURS.split(), "sh", "-c", 'cd x && python "t 1.py"']


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("at now", "at starts the command later"),
        ("sbatch job.sh", "sbatch queues a job that may run on another machine"),
        ("docker exec box python t.py", "docker lets another process start the container"),
        ("docker compose up", "docker lets another process start the container"),
        ("docker-compose up", "docker-compose lets a daemon start the containers"),
        ("podman start box", "podman lets another process start the container"),
    ],
)
def test_queues_and_containers(line: str, why: str) -> None:
    """A program that leaves the command to a daemon or to later is refused with the reason."""
    assert refused(line).startswith(
        f"{why}. The command would run without the reservation's variables"
    )


@pytest.mark.parametrize(
    ("line", "inner"),
    [
        (
            "docker run --rm --gpus all IMAGE python t.py",
            'exec docker run --gpus "\\"device=$CUDA_VISIBLE_DEVICES\\"" --rm IMAGE python t.py',
        ),
        (
            "docker -H unix:///x run -d --gpus=0 IMAGE",
            'exec docker -H unix:///x run --gpus "\\"device=$CUDA_VISIBLE_DEVICES\\"" IMAGE',
        ),
        (
            "podman container run IMAGE",
            "exec podman container run --device nvidia.com/gpu=$CUDA_VISIBLE_DEVICES IMAGE",
        ),
    ],
)
def test_docker(line: str, inner: str) -> None:
    """A container is started with the number of the reserved GPU, in the foreground."""
    assert shlex.split(hint(line)) == [*OURS.split(), "sh", "-c", inner]


def test_a_detached_container() -> None:
    """A container in the background outlives the reservation, even if it has the right GPU."""
    line = "docker run -itd --detach --gpus device=0 -d IMAGE prog -d"
    assert refused(line).startswith("docker leaves the container running")
    assert shlex.split(hint(line))[-1].endswith('CUDA_VISIBLE_DEVICES\\"" -it IMAGE prog -d')


@pytest.mark.parametrize(
    "line",
    [
        "python train.py -d sudo",
        "nohup nice -n 5 python sudo",
        "env A=1 python t.py",
        "env -S 'sudo x'",
        "timeout 5",
        "sh -c 'sudo python t.py'",
        "systemd-run --user --scope python t.py",
        "su bob -c 'python t.py'",
        "runuser -u bob -- python t.py",
        "docker ps",
        "docker build -t x .",
        "docker run -e CUDA_VISIBLE_DEVICES --gpus all IMAGE prog -d",
        "docker run --gpus device=0 IMAGE",
        "srun python t.py",
        "mpirun -n 4 python t.py",
        "setsid -f python t.py",
    ],
)
def test_programs_that_keep_the_reservation(line: str) -> None:
    """Programs that become the command, or wait for it, are let through; so is `sh -c`."""
    handoff.require_kept_reservation(shlex.split(line), lambda: OURS)


@pytest.mark.parametrize(
    ("line", "typed"),
    [
        ("env CUDA_VISIBLE_DEVICES=1 python t.py", "reserve-gpu run 1 -- python t.py"),
        ("env A=b CUDA_VISIBLE_DEVICES=0,1 python", "reserve-gpu run 0,1 -- env A=b python"),
        ("nice env CUDA_VISIBLE_DEVICES= python t.py", "reserve-gpu run -- nice python t.py"),
    ],
)
def test_an_env_that_replaces_the_variables(line: str, typed: str) -> None:
    """A command that sets CUDA_VISIBLE_DEVICES itself is refused."""
    assert hint(line) == typed


@pytest.mark.parametrize(
    ("line", "typed"),
    [
        ("new -d -s work ./train.sh", f"new -d -s work '{OURS} ./train.sh'"),
        ("-S /x -2 new-session -d 'python t.py'", f"-S /x -2 new-session -d '{OURS} python t.py'"),
        ("neww -n x python t.py", f"neww -n x '{OURS} python t.py'"),
        ("new -s work", f"new -s work '{OURS} COMMAND ...'"),
        ("attach", f"new-session '{OURS} COMMAND ...'"),
        ("", f"new-session '{OURS} COMMAND ...'"),
    ],
)
def test_a_running_tmux(tmux: str, line: str, typed: str) -> None:
    """If a tmux server runs, the line has tmux start reserve-gpu."""
    assert hint(f"{tmux} {line}") == f"{tmux} {typed}"


def test_a_line_for_tmux(tmux: str) -> None:
    """A whole line for the shell of tmux is run by a shell behind reserve-gpu."""
    words = shlex.split(hint(f"{tmux} new -d 'cd x && python t.py'"))
    assert shlex.split(words[-1]) == [*OURS.split(), "sh", "-c", "cd x && python t.py"]
