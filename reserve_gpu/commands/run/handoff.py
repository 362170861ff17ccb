"""Programs that hand a command to another process, which has neither our variables nor our lock.

`reserve-gpu run -- tmux new -d train.sh` would reserve a GPU for the client of tmux. A server that
runs already starts `train.sh`, on all GPUs, while the reserved one is free again. Such a command is
refused before anything is reserved, and the error has the line that works. The text of `sh -c
'...'` is not read, so a user who knows better can use that.
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
from reserve_gpu.model.errors import COMMAND_LIMIT, PROGRAM, RequestError, own_command
from reserve_gpu.model.untrusted import sanitize
from reserve_gpu.render.frontends import COMMAND

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LIMIT_S = 3.0  # for tmux to say whether its server runs
LOST = "The command would run without the variables and the lock of the reservation."
SIMPLE = r"[\w@%+=:,./-]+"  # a word that no shell changes

TMUX = Syntax("cfLST")
# Subcommands of tmux that start a command.
TMUX_STARTS = {
    "new-session": Syntax("ceFfnstxy"),
    "new": Syntax("ceFfnstxy"),
    "new-window": Syntax("ceFnt"),
    "neww": Syntax("ceFnt"),
    "split-window": Syntax("ceFlpt"),
    "splitw": Syntax("ceFlpt"),
}
UNIT = (
    *("--unit", "--property", "--setenv", "--description", "--slice", "--uid", "--gid", "--nice"),
    *("--working-directory", "--host", "--machine", "--service-type"),
)
# These start the command with a new environment, or from another process.
STARTERS = {
    "sudo": Syntax(
        "CDghpRrTtUu",
        ("--user", "--group", "--host", "--chdir", "--chroot", "--prompt", "--close-from"),
        has_variables=True,
    ),
    "doas": Syntax("Cu"),
    "pkexec": Syntax(long=("--user",)),
    "run0": Syntax("u", UNIT),
    "screen": Syntax("cehpstST"),
    "systemd-run": Syntax("pEMHu", UNIT),
}
WHY = {
    "sudo": "drops variables, and closes files",
    "doas": "drops variables, and it may close files",
    "pkexec": "drops variables",
    "run0": "has systemd start the command",
    "systemd-run": "has systemd start the command",
    "screen": "closes files before it starts the command",
}
SSH = Syntax("BbcDEeFIiJLlmOopQRSWw", operands=1)
DOCKER = Syntax("cHl", ("--config", "--context", "--host", "--log-level", "--connection"))
CONTAINERS = {
    "docker": '--gpus "\\"device=$CUDA_VISIBLE_DEVICES\\""',
    "podman": "--device nvidia.com/gpu=$CUDA_VISIBLE_DEVICES",
    "nerdctl": '--gpus "\\"device=$CUDA_VISIBLE_DEVICES\\""',
}
DETACHED = "leaves the container running, while the reservation ends with this command"
SHORT_DETACH = r"-[itPq]*d[itPq]*"  # also among other short options
CONTAINER_STARTS = {"run", "create", "exec", "start", "restart", "compose"}
# Programs that leave the command to a process which runs already, or starts later.
QUEUES = {
    **dict.fromkeys(("at", "batch"), "starts the command later"),
    **dict.fromkeys(("sbatch", "qsub", "bsub"), "queues a job, which another machine may start"),
    **dict.fromkeys(("tsp", "pueue", "pm2", "byobu"), "has its server start the command"),
    **dict.fromkeys(("docker-compose", "podman-compose"), "starts containers, which get neither"),
    "gnome-terminal": "has a process that runs already start the command",
}


def require_own(command: Sequence[str], ours: Callable[[], str]) -> None:
    """Raise RequestError for a command that would not keep the reservation.

    Args:
        command: The words to run.
        ours: Returns the text that was typed before them, as `reserve-gpu run -n 2 --`.
    """
    for place in levels(command):
        before, words = command[:place], command[place:]
        name = name_of(words)
        if name == "env":
            _require_variables(before, words, ours)
        if why := _why(words, name):
            wrapped = f"{join(before)} " if before else ""
            text = f"{name} {why}." if why == DETACHED else f"{name} {why}. {LOST}"
            raise _error(text, *_way_out(words, name, wrapped, ours))


def _error(why: str, way_out: str, line: str = "") -> RequestError:
    text = f"{why} Nothing was reserved. {way_out}"
    return RequestError(f"{text}:\n{sanitize(line, COMMAND_LIMIT)}" if line else f"{text}.")


def _why(words: Sequence[str], name: str) -> str:
    """Return the reason for refusing a program; empty if it keeps the reservation."""
    if name == "tmux":
        return "has its running server start the command" if _has_server(words) else ""
    if name == "systemd-run":
        is_scope = "--scope" in words[: STARTERS[name].start(words)]
        return "" if is_scope else WHY[name]
    if name in ("su", "runuser"):
        is_login = any(re.fullmatch(r"-|--login|-[a-z]*l[a-z]*", word) for word in words[1:])
        return "with a login drops variables" if is_login else ""
    if name in CONTAINERS:
        return _why_container(words)
    if name in ("ssh", "mosh"):
        return "starts the command on another machine"
    return WHY.get(name) or QUEUES.get(name, "")


def _way_out(
    words: Sequence[str], name: str, wrapped: str, ours: Callable[[], str]
) -> tuple[str, str]:
    """Return the advice to the user, and the line to type instead.

    Args:
        words: The program and what follows.
        name: The program's base name.
        wrapped: The text before it.
        ours: As above.
    """
    inside = f"Put {PROGRAM} inside"
    if name in STARTERS:
        start = STARTERS[name].start(words)
        typed = ours() if name == "screen" else _absolute(ours())
        return inside, f"{wrapped}{join(words[:start])} {typed} {join(words[start:]) or COMMAND}"
    if name == "tmux":
        return inside, wrapped + _inside_tmux(words, _absolute(ours()))
    if name in ("su", "runuser"):
        return inside, wrapped + _inside_su(words, _absolute(ours()))
    if name in ("ssh", "mosh"):
        there = PROGRAM + ours().removeprefix(own_command())
        return f"{inside}, if that machine has it", wrapped + _inside_ssh(words, there)
    if name in CONTAINERS:
        return _in_container(words, name, ours())
    return f"Put {PROGRAM} run -- before the program that needs the GPU, in what {name} starts", ""


# -- environments ----------------------------------------------------------------------------------


def _require_variables(
    before: Sequence[str], words: Sequence[str], ours: Callable[[], str]
) -> None:
    """Raise RequestError for an `env` that replaces the variable of the reservation.

    `env -u CUDA_VISIBLE_DEVICES` is let through, because it can't be typed by mistake.
    """
    start = ENV.start(words)
    own, rest = [*words[1:start]], words[start:]
    given = [word for word in own if word.startswith(f"{VISIBLE}=")]
    if given:
        kept = [word for word in own if word not in given]
        env = ["env", *kept] if kept else []
        raise named_by_variable(given[-1], [*before, *env, *rest], ours)


def named_by_variable(
    assignment: str, rest: Sequence[str], ours: Callable[[], str]
) -> RequestError:
    """Return the error for a command that sets CUDA_VISIBLE_DEVICES itself."""
    value, line, way_out = assignment.partition("=")[2], ours(), "Leave it out"
    run = f"{own_command()} run "
    if re.fullmatch(r"[0-9]+(,[0-9]+)*", value) and line.startswith(run):
        way_out = f"To choose GPU {value}, name it"
        if f" {value} " not in line:
            line = f"{run}{value} {line.removeprefix(run)}"
    return _error(f"{PROGRAM} sets {VISIBLE} itself.", way_out, f"{line} {join(rest) or COMMAND}")


def _absolute(line: str) -> str:
    """Return the line with the full path of `reserve-gpu`, for a process with another PATH."""
    path = which(PROGRAM)
    if path and line.startswith(f"{PROGRAM} "):
        return f"{quote(path)}{line.removeprefix(PROGRAM)}"
    return line


# -- servers and other machines --------------------------------------------------------------------


def _has_server(words: Sequence[str]) -> bool:
    """Return whether the tmux server that these words mean runs already."""
    import subprocess  # only for tmux

    own = words[: TMUX.start(words)]
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            [*own, "list-sessions"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=LIMIT_S,
            check=False,
        )
        return done.returncode == 0
    return False


def _inside_tmux(words: Sequence[str], ours: str) -> str:
    """Return the line that has tmux start `reserve-gpu`."""
    at = TMUX.start(words)
    syntax = TMUX_STARTS.get(words[at]) if at < len(words) else None
    if syntax is None:
        return f"{join([*words[:at], 'new-session'])} {quote(f'{ours} {COMMAND}')}"
    start = at + syntax.start(words[at:])
    rest = words[start:]
    text = _as_text(rest) if rest else COMMAND
    return f"{join(words[:start])} {quote(f'{ours} {text}')}"


def _inside_su(words: Sequence[str], ours: str) -> str:
    """Return the line that has a login shell start `reserve-gpu`."""
    for at, word in enumerate(words[:-1]):
        if word in ("-c", "--command"):
            inner = quote(f"{ours} {_as_text(words[at + 1 : at + 2])}")
            return " ".join(filter(None, [join(words[: at + 1]), inner, join(words[at + 2 :])]))
    return f"{join(words)} -c {quote(f'{ours} {COMMAND}')}"


def _inside_ssh(words: Sequence[str], ours: str) -> str:
    """Return the line that starts `reserve-gpu` on the other machine."""
    start = SSH.start(words)
    head, rest = join(words[:start]), words[start:]
    if all(re.fullmatch(SIMPLE, word, re.ASCII) for word in rest):
        return f"{head} {ours} {' '.join(rest) or COMMAND}"
    # ssh joins its words, and a shell reads the result there.
    return f"{head} {quote(f'{ours} {_as_text([chr(32).join(rest)])}')}"


def _as_text(words: Sequence[str]) -> str:
    """Return words as `reserve-gpu run --` takes them; a single word may be a line for a shell."""
    if len(words) == 1 and not re.fullmatch(rf"{SIMPLE}( +{SIMPLE})*", words[0], re.ASCII):
        return f"sh -c {quote(words[0])}"
    return words[0] if len(words) == 1 else join(words)


# -- containers ------------------------------------------------------------------------------------


def _why_container(words: Sequence[str]) -> str:
    """Return the reason for refusing to start a container; empty if the words name its GPU."""
    starts = _started(words)
    if not starts:
        return ""
    if any(map(_is_detach, _options(words[starts + 1 :]))):
        return DETACHED
    if any(VISIBLE in word or "device=" in word for word in words):
        return ""
    return "has another process start the container"


def _started(words: Sequence[str]) -> int:
    """Return the place of the subcommand that starts something; 0 if none does."""
    at = DOCKER.start(words)
    at += at < len(words) and words[at] == "container"
    return at if at < len(words) and words[at] in CONTAINER_STARTS else 0


def _options(words: Sequence[str]) -> Sequence[str]:
    """Return the options of `docker run`, and their values, up to the image.

    Which options take a value is not known, so the word after an option counts as one.
    """
    pairs = pairwise(["-", *words])
    end = (at for at, pair in enumerate(pairs) if not any(each.startswith("-") for each in pair))
    return words[: next(end, len(words))]


def _is_detach(option: str) -> bool:
    """Return whether an option of `docker run` leaves the container in the background."""
    return option == "--detach" or re.fullmatch(SHORT_DETACH, option) is not None


def _in_container(words: Sequence[str], name: str, ours: str) -> tuple[str, str]:
    """Return the advice and the line that start a container with the reserved GPU."""
    at = _started(words)
    if words[at] != "run":
        return f"Have the container started by {PROGRAM}, with {name} run in the foreground", ""
    options = _options(words[at + 1 :])
    kept = [re.sub(r"^--detach$|d", "", word) if _is_detach(word) else word for word in options]
    rest = [word for word in kept if word not in ("", "-")] + [*words[at + 1 + len(options) :]]
    for place, word in enumerate(rest):
        if word == "--gpus":
            del rest[place : place + 2]
            break
    rest = [word for word in rest if not word.startswith("--gpus=")]
    inner = f"exec {join(words[: at + 1])} {CONTAINERS[name]} {join(rest)}"
    return f"Give {name} the number of the GPU, and let it run in the foreground", (
        f"{ours} sh -c {quote(inner)}"
    )
