"""Find the program of a command before anything is reserved, and explain a failure.

Users also type a variable behind `run --`, a whole line in quotation marks, a word of the shell, or
a script whose interpreter is missing.
"""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from shlex import join, quote, split
from typing import TYPE_CHECKING

from reserve_gpu.commands.run.handoff import named_by_variable
from reserve_gpu.commands.run.wrappers import is_assignment, levels
from reserve_gpu.gpus import names
from reserve_gpu.gpus.cuda_environment import VISIBLE
from reserve_gpu.model.errors import COMMAND_LIMIT, ReserveGPUError
from reserve_gpu.model.untrusted import sanitize
from reserve_gpu.render.frontends import COMMAND

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

CANNOT_RUN, NOT_FOUND = 126, 127  # as shells have it
HEAD = 4096  # bytes of a file; Linux reads 256 of its first line
OPERATORS = {"&&", "||", ";", "|", "&", ">", ">>", "<"}
IN_A_LINE = r"[&|;<>$`*?()]"  # what only a shell understands
# These words only change the shell that runs them. Some systems have programs of these names, which
# change nothing: in `reserve-gpu run -- cd folder && python train.py` the shell would then start
# Python without a GPU.
OF_A_SHELL_ALONE = {"cd", "alias", "unalias", "ulimit", "umask"}
OF_A_SHELL = {
    *OF_A_SHELL_ALONE,
    *(".", "source", "pushd", "popd", "export", "declare", "typeset", "local", "set", "unset"),
    *("eval", "exec", "shopt", "time"),
}


class CommandError(ReserveGPUError):
    """The command can't be run."""

    def __init__(self, text: str, exit_code: int = CANNOT_RUN) -> None:
        super().__init__(text)
        self.exit_code = exit_code


def find(command: Sequence[str], ours: Callable[[], str]) -> str:
    """Return the path of the program of a command.

    Args:
        command: The words to run, one at least.
        ours: Returns the text that was typed before them, as `reserve-gpu run -n 2 --`.

    Raises:
        CommandError: There is no such program, or nothing here can run it.
        RequestError: The command sets CUDA_VISIBLE_DEVICES.
    """
    path = _path(command, ours)
    for place in levels(command)[1:]:  # what `nohup` and others start
        _require_program(command[place:], lambda: f"{ours()} {join(command[:place])}")  # noqa: B023
    return path


def _path(command: Sequence[str], ours: Callable[[], str]) -> str:
    name = command[0]
    if name not in OF_A_SHELL_ALONE:
        if path := shutil.which(name):
            _require_interpreter(path, command, ours)
            return path
        if os.path.dirname(name) and os.path.isdir(name):
            raise CommandError(f"{sanitize(name)} is a directory.")
        if file := shutil.which(name, os.F_OK):
            text = f"{sanitize(name)} may not be executed by this user."
            line = _run_by(file, command, ours)
            raise _error(text, "Have its interpreter run it", line, CANNOT_RUN)
    raise _not_found(command, ours)


def _require_program(command: Sequence[str], ours: Callable[[], str]) -> None:
    """Raise an error for what a wrapper such as `nohup` can't start either, as far as that is sure.

    How the wrapper reads its words may not be known, so that a program is missing proves nothing.
    """
    path = shutil.which(command[0])
    if path:
        _require_interpreter(path, command, ours)
    elif error := _assigned(command, ours):
        raise error


def _error(text: str, way_out: str, line: str, code: int = NOT_FOUND) -> CommandError:
    return CommandError(
        f"{text} {way_out}:\n{sanitize(line, COMMAND_LIMIT)}" if line else text, code
    )


# -- scripts ---------------------------------------------------------------------------------------


def _first_line(path: str) -> str:
    """Return the first line of a file, without the line break; empty for what can't be read."""
    if not os.path.isfile(path):  # a pipe would be waited for
        return ""
    with suppress(OSError), open(path, "rb") as file:
        return os.fsdecode(file.read(HEAD).partition(b"\n")[0])
    return ""


def _interpreter(first: str) -> str:
    """Return the program that a script's first line names; empty if it names none."""
    if not first.startswith("#!"):
        return ""
    program, _, rest = first[2:].strip(" \t").partition(" ")
    word = rest.strip(" \t").partition(" ")[0]
    is_env = os.path.basename(program) == "env" and word and not word.startswith("-")
    return word if is_env else program


def _run_by(file: str, command: Sequence[str], ours: Callable[[], str]) -> str:
    """Return the line that has a script's interpreter run it; empty if that is not known."""
    by_ending = {".py": "python", ".sh": "bash"}.get(os.path.splitext(file)[1], "")
    name = os.path.basename(_interpreter(_first_line(file)).strip()) or by_ending
    for program in (name, f"{name}3"):
        if name and shutil.which(program):
            return f"{ours()} {program} {join(command)}"
    return ""


def _require_interpreter(path: str, command: Sequence[str], ours: Callable[[], str]) -> None:
    """Raise CommandError for a script whose first line names a program that is not here."""
    name, interpreter = sanitize(command[0]), _interpreter(_first_line(path))
    if not interpreter or shutil.which(interpreter):
        return
    if interpreter.endswith("\r"):
        named = sanitize(repr(interpreter))
        text = f"{name} has the line ends of Windows, so its first line names {named}."
        raise _error(text, "To convert it", f"sed -i 's/\\r$//' {quote(path)}")
    if os.path.isfile(interpreter):
        text = f"The first line of {name} names {sanitize(interpreter)}, which may not be executed."
        raise CommandError(text)
    text = f"The first line of {name} names {sanitize(interpreter)}, which is not here."
    kind = re.match(r"python|bash|sh|perl|ruby", os.path.basename(interpreter))
    here = kind and (shutil.which(kind[0]) or shutil.which(f"{kind[0]}3"))
    line = f"{ours()} {os.path.basename(here)} {join([path, *command[1:]])}" if here else ""
    raise _error(text, "Correct that line, or have another program run it", line)


# -- not a program ---------------------------------------------------------------------------------


def _not_found(command: Sequence[str], ours: Callable[[], str]) -> ReserveGPUError:
    """Return the error for a command that does not begin with a program."""
    for explained in (_quoted, _assigned, _for_a_shell, _misplaced, _unexpanded, _elsewhere):
        if error := explained(command, ours):
            return error
    return CommandError(f"{_unknown(command)}.", NOT_FOUND)


def _unknown(command: Sequence[str]) -> str:
    return f"There is no command {sanitize(command[0])}"


def _quoted(command: Sequence[str], ours: Callable[[], str]) -> ReserveGPUError | None:
    """Explain a whole line in quotation marks."""
    line = command[0]
    if len(command) > 1 or not re.search(r"\s", line.strip()):
        return None
    text = f"{_unknown(command)}: in quotation marks it is one word."
    if re.search(IN_A_LINE, line):
        return _error(text, "Have a shell run it", f"{ours()} sh -c {quote(line)}")
    with suppress(ValueError):  # a quotation mark that is not closed
        words = split(line)
        return _assigned(words, ours) or _error(text, "Leave them out", f"{ours()} {join(words)}")
    return None


def _assigned(command: Sequence[str], ours: Callable[[], str]) -> ReserveGPUError | None:
    """Explain a command that begins with NAME=VALUE, as in a shell."""
    count = 0
    while count < len(command) and is_assignment(command[count]):
        count += 1
    if not count:
        return None
    given = [word for word in command[:count] if word.startswith(f"{VISIBLE}=")]
    others = [word for word in command[:count] if word not in given]
    words = [*(["env", *others] if others else []), *command[count:]]
    if given:
        return named_by_variable(given[-1], words, ours)
    text = f"{_unknown(command)}: only a shell sets a variable in this way."
    line = f"{ours()} {join(words)}" + ("" if command[count:] else f" {COMMAND}")
    return _error(text, "Put env before it", line)


def _for_a_shell(command: Sequence[str], ours: Callable[[], str]) -> ReserveGPUError | None:
    """Explain a word of the shell, and a line such as `a && b`."""
    name, rest = command[0], command[1:]
    has_operators = not OPERATORS.isdisjoint(rest)
    if name not in OF_A_SHELL and not has_operators:
        return None
    if name == "exec" and rest:
        return _error("exec is a word of the shell.", "Leave it out", f"{ours()} {join(rest)}")
    line = " ".join(word if word in OPERATORS else quote(word) for word in command)
    if not has_operators and name != "time":
        line += f" && {COMMAND}"
    text = f"{_unknown(command)}."
    if name in OF_A_SHELL:
        text = f"{name} is a word of the shell, and only changes the shell that runs it."
    shell = "bash" if shutil.which("bash") else "sh"
    return _error(text, "Have one shell run all of it", f"{ours()} {shell} -c {quote(line)}")


def _misplaced(command: Sequence[str], _: Callable[[], str]) -> ReserveGPUError | None:
    """Explain an option or a GPU that follows the `--`."""
    name = command[0]
    if not (len(name) > 1 and name.startswith("-")) and not names.is_name(name):
        return None
    text = f"{_unknown(command)}. Options and GPUs go before the --."
    return CommandError(text, NOT_FOUND)


def _unexpanded(command: Sequence[str], ours: Callable[[], str]) -> ReserveGPUError | None:
    """Explain `~/x` or `$HOME/x` in quotation marks."""
    name = command[0]
    path = os.path.expanduser(os.path.expandvars(name))
    if path == name or not os.path.exists(path):
        return None
    text = f"{_unknown(command)}: in quotation marks no shell replaces {name[0]}."
    return _error(text, "Leave them out", f"{ours()} {join([path, *command[1:]])}")


def _elsewhere(command: Sequence[str], ours: Callable[[], str]) -> ReserveGPUError | None:
    """Explain a file of this folder, a `python` that is called python3, and an alias."""
    name, rest = command[0], command[1:]
    if os.path.dirname(name) or not name:
        return None
    text = _unknown(command)
    if os.path.isfile(name):
        line = f"{ours()} {join([f'./{name}', *rest])}"
        if not os.access(name, os.X_OK):
            line = _run_by(name, command, ours)
        return _error(f"{text} on PATH, but a file in this folder.", "To run it", line)
    if name == "python" and shutil.which("python3"):
        return _error(
            f"{text}.", "Its name is python3 here", f"{ours()} {join(['python3', *rest])}"
        )
    shell = os.path.basename(os.environ.get("SHELL", ""))
    if shell not in ("bash", "zsh") or not re.fullmatch(r"[\w.+-]+", name, re.ASCII):
        return None
    line = f"{ours()} {shell} -ic {quote(join(command))}"
    return _error(f"{text}.", f"If it is an alias or a function, have {shell} run it", line)
