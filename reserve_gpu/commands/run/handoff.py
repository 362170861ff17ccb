"""Refuse commands that hand off work to a process without the reservation's variables and lock.

For example, `reserve-gpu run -- tmux new -d train.sh` would reserve a GPU only for the tmux client.
The tmux server, which might already be running, would start `train.sh` with access to all GPUs, and
the reserved GPU would be free again. Such a command is refused before anything is reserved, and the
error shows a command line that works. The argument of `sh -c` is not parsed, so users can bypass
this check.
"""

from __future__ import annotations

import re
from contextlib import suppress
from itertools import pairwise
from shlex import join, quote
from shutil import which
from typing import TYPE_CHECKING

from reserve_gpu.commands.run.wrappers import ENV, Syntax, levels, name_of
from reserve_gpu.gpus.cuda_environment import VISIBLE
from reserve_gpu.model.errors import COMMAND_LIMIT, PROGRAM, RequestError, program_command
from reserve_gpu.model.untrusted import sanitize
from reserve_gpu.render.frontends import COMMAND

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

TMUX_LIMIT_S = 3.0  # seconds to wait for tmux to report whether its server is running
NOT_KEPT = "The command would run without the reservation's variables and lock."
PLAIN_WORD = r"[\w@%+=:,./-]+"  # pattern for a word that needs no quoting in a shell

TMUX = Syntax("cfLST")
# The tmux subcommands that start a command.
TMUX_STARTS = {
    "new-session": Syntax("ceFfnstxy"),
    "new": Syntax("ceFfnstxy"),
    "new-window": Syntax("ceFnt"),
    "neww": Syntax("ceFnt"),
    "split-window": Syntax("ceFlpt"),
    "splitw": Syntax("ceFlpt"),
}
# The long options of systemd-run and run0 that take a value.
UNIT_OPTIONS = (
    *("--unit", "--property", "--setenv", "--description", "--slice", "--uid", "--gid", "--nice"),
    *("--working-directory", "--host", "--machine", "--service-type"),
)
# Programs that start a command in a new environment or from another process.
STARTERS = {
    "sudo": Syntax(
        "CDghpRrTtUu",
        ("--user", "--group", "--host", "--chdir", "--chroot", "--prompt", "--close-from"),
        has_variables=True,
    ),
    "doas": Syntax("Cu"),
    "pkexec": Syntax(long=("--user",)),
    "run0": Syntax("u", UNIT_OPTIONS),
    "screen": Syntax("cehpstST"),
    "systemd-run": Syntax("pEMHu", UNIT_OPTIONS),
}
REASONS = {
    "sudo": "drops environment variables and closes files",
    "doas": "drops environment variables and may close files",
    "pkexec": "drops environment variables",
    "run0": "lets systemd start the command",
    "systemd-run": "lets systemd start the command",
    "screen": "closes files before it starts the command",
}
SSH = Syntax("BbcDEeFIiJLlmOopQRSWw", operands=1)
DOCKER = Syntax("cHl", ("--config", "--context", "--host", "--log-level", "--connection"))
CONTAINERS = {
    "docker": '--gpus "\\"device=$CUDA_VISIBLE_DEVICES\\""',
    "podman": "--device nvidia.com/gpu=$CUDA_VISIBLE_DEVICES",
    "nerdctl": '--gpus "\\"device=$CUDA_VISIBLE_DEVICES\\""',
}
DETACHED = "leaves the container running after the reservation has ended"
SHORT_DETACH = r"-[itPq]*d[itPq]*"  # pattern for -d, alone or grouped with other short options
CONTAINER_STARTS = {"run", "create", "exec", "start", "restart", "compose"}
# Programs that hand the command off to another process, either running already or started later.
QUEUES = {
    **dict.fromkeys(("at", "batch"), "starts the command later"),
    **dict.fromkeys(("sbatch", "qsub", "bsub"), "queues a job that may run on another machine"),
    **dict.fromkeys(("tsp", "pueue", "pm2", "byobu"), "lets its server start the command"),
    **dict.fromkeys(("docker-compose", "podman-compose"), "lets a daemon start the containers"),
    "gnome-terminal": "lets a running process start the command",
}


def require_kept_reservation(command: Sequence[str], prefix: Callable[[], str]) -> None:
    """Raise RequestError if a command would not keep the reservation.

    Args:
        command: The program and its arguments.
        prefix: A function that returns the text before the command, such as
            `reserve-gpu run -n 2 --`.
    """
    for index in levels(command):
        before, words = command[:index], command[index:]
        name = name_of(words)
        if name == "env":
            _require_variables(before, words, prefix)
        if reason := _refusal_reason(words, name):
            wrapper = f"{join(before)} " if before else ""
            text = f"{name} {reason}." if reason == DETACHED else f"{name} {reason}. {NOT_KEPT}"
            raise _error(text, *_advice(words, name, wrapper, prefix))


def _error(problem: str, advice: str, line: str = "") -> RequestError:
    text = f"{problem} Nothing was reserved. {advice}"
    return RequestError(f"{text}:\n{sanitize(line, COMMAND_LIMIT)}" if line else f"{text}.")


def _refusal_reason(words: Sequence[str], name: str) -> str:
    """Return the reason for refusing a program, or "" if it keeps the reservation."""
    if name == "tmux":
        return "lets its running server start the command" if _has_server(words) else ""
    if name == "systemd-run":
        is_scope = "--scope" in words[: STARTERS[name].start(words)]
        return "" if is_scope else REASONS[name]
    if name in ("su", "runuser"):
        is_login = any(re.fullmatch(r"-|--login|-[a-z]*l[a-z]*", word) for word in words[1:])
        return "with a login shell drops environment variables" if is_login else ""
    if name in CONTAINERS:
        return _container_reason(words)
    if name in ("ssh", "mosh"):
        return "starts the command on another machine"
    return REASONS.get(name) or QUEUES.get(name, "")


def _advice(
    words: Sequence[str], name: str, wrapper: str, prefix: Callable[[], str]
) -> tuple[str, str]:
    """Return advice for the user, and a command line that works, or "" if there is none.

    Args:
        words: The refused program and its arguments.
        name: The program's base name.
        wrapper: The part of the command line with the wrappers that precede the program.
        prefix: A function that returns the text before the command.
    """
    inside = f"Run {PROGRAM} inside {name}"
    if name in STARTERS:
        start = STARTERS[name].start(words)
        own = prefix() if name == "screen" else _absolute(prefix())
        return inside, f"{wrapper}{join(words[:start])} {own} {join(words[start:]) or COMMAND}"
    if name == "tmux":
        return inside, wrapper + _inside_tmux(words, _absolute(prefix()))
    if name in ("su", "runuser"):
        return inside, wrapper + _inside_su(words, _absolute(prefix()))
    if name in ("ssh", "mosh"):
        remote = PROGRAM + prefix().removeprefix(program_command())
        advice = f"Run {PROGRAM} on that machine, if it is installed there"
        return advice, wrapper + _inside_ssh(words, remote)
    if name in CONTAINERS:
        return _in_container(words, name, prefix())
    return f"Put {PROGRAM} run -- before the program that {name} starts", ""


# -- environments ----------------------------------------------------------------------------------


def _require_variables(
    before: Sequence[str], words: Sequence[str], prefix: Callable[[], str]
) -> None:
    """Raise RequestError if `env` overrides CUDA_VISIBLE_DEVICES.

    `env -u CUDA_VISIBLE_DEVICES` is allowed, because it is never typed by mistake.
    """
    start = ENV.start(words)
    env_arguments, rest = [*words[1:start]], words[start:]
    overrides = [word for word in env_arguments if word.startswith(f"{VISIBLE}=")]
    if overrides:
        remaining = [word for word in env_arguments if word not in overrides]
        env = ["env", *remaining] if remaining else []
        raise named_by_variable(overrides[-1], [*before, *env, *rest], prefix)


def named_by_variable(
    assignment: str, rest: Sequence[str], prefix: Callable[[], str]
) -> RequestError:
    """Return the error for a command that sets CUDA_VISIBLE_DEVICES itself.

    Args:
        assignment: The word `CUDA_VISIBLE_DEVICES=VALUE`.
        rest: The command without this word.
        prefix: A function that returns the text before the command.
    """
    value, line, advice = assignment.partition("=")[2], prefix(), "Omit the variable"
    run = f"{program_command()} run "
    if re.fullmatch(r"[0-9]+(,[0-9]+)*", value) and line.startswith(run):
        advice = f"To choose GPU {value}, pass its number"
        if f" {value} " not in line:
            line = f"{run}{value} {line.removeprefix(run)}"
    return _error(f"{PROGRAM} sets {VISIBLE} itself.", advice, f"{line} {join(rest) or COMMAND}")


def _absolute(line: str) -> str:
    """Replace `reserve-gpu` at the start of a command line with its full path.

    The program that runs the command line might have a different PATH.
    """
    path = which(PROGRAM)
    if path and line.startswith(f"{PROGRAM} "):
        return f"{quote(path)}{line.removeprefix(PROGRAM)}"
    return line


# -- servers and other machines --------------------------------------------------------------------


def _has_server(words: Sequence[str]) -> bool:
    """Return whether the server that a tmux command line selects is running."""
    import subprocess  # needed only for tmux

    options = words[: TMUX.start(words)]
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            [*options, "list-sessions"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=TMUX_LIMIT_S,
            check=False,
        )
        return done.returncode == 0
    return False


def _inside_tmux(words: Sequence[str], prefix: str) -> str:
    """Return a tmux command line that starts `reserve-gpu`."""
    index = TMUX.start(words)
    syntax = TMUX_STARTS.get(words[index]) if index < len(words) else None
    if syntax is None:
        return f"{join([*words[:index], 'new-session'])} {quote(f'{prefix} {COMMAND}')}"
    start = index + syntax.start(words[index:])
    rest = words[start:]
    text = _as_text(rest) if rest else COMMAND
    return f"{join(words[:start])} {quote(f'{prefix} {text}')}"


def _inside_su(words: Sequence[str], prefix: str) -> str:
    """Return a `su` command line whose login shell starts `reserve-gpu`."""
    for index, word in enumerate(words[:-1]):
        if word in ("-c", "--command"):
            inner = quote(f"{prefix} {_as_text(words[index + 1 : index + 2])}")
            parts = [join(words[: index + 1]), inner, join(words[index + 2 :])]
            return " ".join(filter(None, parts))
    return f"{join(words)} -c {quote(f'{prefix} {COMMAND}')}"


def _inside_ssh(words: Sequence[str], prefix: str) -> str:
    """Return an SSH command line that starts `reserve-gpu` on the other machine."""
    start = SSH.start(words)
    head, rest = join(words[:start]), words[start:]
    if all(re.fullmatch(PLAIN_WORD, word, re.ASCII) for word in rest):
        return f"{head} {prefix} {' '.join(rest) or COMMAND}"
    # SSH joins the command's words, and a shell on the other machine splits them again.
    return f"{head} {quote(f'{prefix} {_as_text([chr(32).join(rest)])}')}"


def _as_text(words: Sequence[str]) -> str:
    """Return a command as text that can follow `reserve-gpu run --`.

    Args:
        words: The command. A single word that contains shell syntax is wrapped in `sh -c`.
    """
    if len(words) == 1 and not re.fullmatch(rf"{PLAIN_WORD}( +{PLAIN_WORD})*", words[0], re.ASCII):
        return f"sh -c {quote(words[0])}"
    return words[0] if len(words) == 1 else join(words)


# -- containers ------------------------------------------------------------------------------------


def _container_reason(words: Sequence[str]) -> str:
    """Return the reason for refusing a container command, or "" if the command is allowed.

    A command is allowed if it starts no container, or if it starts a container in the foreground
    and passes the reserved GPU to it.
    """
    index = _subcommand_index(words)
    if not index:
        return ""
    if any(map(_is_detach, _options(words[index + 1 :]))):
        return DETACHED
    if any(VISIBLE in word or "device=" in word for word in words):
        return ""
    return "lets another process start the container"


def _subcommand_index(words: Sequence[str]) -> int:
    """Return the index of the subcommand if it starts a container, otherwise 0."""
    index = DOCKER.start(words)
    index += index < len(words) and words[index] == "container"
    return index if index < len(words) and words[index] in CONTAINER_STARTS else 0


def _options(words: Sequence[str]) -> Sequence[str]:
    """Return the options of `docker run` and their values, which are the words before the image.

    This package does not know which options take a value, so a word after an option counts as the
    option's value.
    """
    pairs = pairwise(["-", *words])
    ends = (at for at, pair in enumerate(pairs) if not any(each.startswith("-") for each in pair))
    return words[: next(ends, len(words))]


def _is_detach(option: str) -> bool:
    """Return whether a `docker run` option runs the container in the background."""
    return option == "--detach" or re.fullmatch(SHORT_DETACH, option) is not None


def _in_container(words: Sequence[str], name: str, prefix: str) -> tuple[str, str]:
    """Return advice, and a command line that runs a container on the reserved GPU.

    The command line is empty if the subcommand is not `run`.
    """
    index = _subcommand_index(words)
    if words[index] != "run":
        return f"Start the container with {name} run, in the foreground", ""
    options = _options(words[index + 1 :])
    attached = [re.sub(r"^--detach$|d", "", word) if _is_detach(word) else word for word in options]
    rest = [word for word in attached if word not in ("", "-")]
    rest += words[index + 1 + len(options) :]
    for position, word in enumerate(rest):
        if word == "--gpus":
            del rest[position : position + 2]
            break
    rest = [word for word in rest if not word.startswith("--gpus=")]
    inner = f"exec {join(words[: index + 1])} {CONTAINERS[name]} {join(rest)}"
    return f"Pass the GPU's number to {name}, and run the container in the foreground", (
        f"{prefix} sh -c {quote(inner)}"
    )
