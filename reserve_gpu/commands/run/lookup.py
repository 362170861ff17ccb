"""Find a command's program before anything is reserved, or explain why it can't be run.

Typical mistakes are a variable assignment after `run --`, a whole command line in quotation marks,
a shell builtin, and a script whose interpreter is missing.
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
from reserve_gpu.model.errors import CANNOT_RUN, COMMAND_LIMIT, NOT_FOUND, CommandError
from reserve_gpu.model.untrusted import sanitize
from reserve_gpu.render.frontends import COMMAND

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reserve_gpu.model.errors import ReserveGPUError

HEAD_SIZE = 4096  # number of bytes to read from a script's start; Linux itself reads only 256
OPERATORS = {"&&", "||", ";", "|", "&", ">", ">>", "<"}
SHELL_SYNTAX = r"[&|;<>$`*?()]"  # pattern for characters that only a shell interprets
# These builtins affect only the shell that runs them. Some systems also have programs with these
# names, but running them has no effect. In `reserve-gpu run -- cd folder && python train.py`, such
# a `cd` program would succeed, and the shell would then start Python without a GPU.
SHELL_ONLY = {"cd", "alias", "unalias", "ulimit", "umask"}
SHELL_BUILTINS = {
    *SHELL_ONLY,
    *(".", "source", "pushd", "popd", "export", "declare", "typeset", "local", "set", "unset"),
    *("eval", "exec", "shopt", "time"),
}


def find(command: Sequence[str], prefix: Callable[[], str]) -> str:
    """Return the path of a command's program.

    Args:
        command: The program and its arguments. There must be at least one word.
        prefix: A function that returns the text before the command, such as
            `reserve-gpu run -n 2 --`.

    Raises:
        CommandError: The program does not exist, or this machine can't run it.
        RequestError: The command sets CUDA_VISIBLE_DEVICES.
    """
    path = _path(command, prefix)
    for index in levels(command)[1:]:  # the programs that wrappers such as `nohup` start
        _require_program(command[index:], lambda: f"{prefix()} {join(command[:index])}")  # noqa: B023
    return path


def _path(command: Sequence[str], prefix: Callable[[], str]) -> str:
    name = command[0]
    if name not in SHELL_ONLY:
        if path := shutil.which(name):
            _require_interpreter(path, command, prefix)
            return path
        if os.path.dirname(name) and os.path.isdir(name):
            raise CommandError(f"{sanitize(name)} is a directory.")
        if file := shutil.which(name, os.F_OK):
            text = f"{sanitize(name)} is not executable by this user."
            line = _interpreter_line(file, command, prefix)
            raise _error(text, "Run it with its interpreter", line, CANNOT_RUN)
    raise _not_found(command, prefix)


def _require_program(command: Sequence[str], prefix: Callable[[], str]) -> None:
    """Raise an error if a wrapper such as `nohup` clearly can't start its command.

    A missing program is not an error here, because this package might have misread the wrapper's
    options.
    """
    path = shutil.which(command[0])
    if path:
        _require_interpreter(path, command, prefix)
    elif error := _explain_assignment(command, prefix):
        raise error


def _error(text: str, advice: str, line: str, code: int = NOT_FOUND) -> CommandError:
    return CommandError(
        f"{text} {advice}:\n{sanitize(line, COMMAND_LIMIT)}" if line else text, code
    )


# -- scripts ---------------------------------------------------------------------------------------


def _first_line(path: str) -> str:
    """Return a file's first line without the line break, or "" if the file is unreadable."""
    if not os.path.isfile(path):  # reading from a pipe would block
        return ""
    with suppress(OSError), open(path, "rb") as file:
        return os.fsdecode(file.read(HEAD_SIZE).partition(b"\n")[0])
    return ""


def _interpreter(first_line: str) -> str:
    """Return the interpreter named in a script's first line, or an empty string."""
    if not first_line.startswith("#!"):
        return ""
    program, _, rest = first_line[2:].strip(" \t").partition(" ")
    word = rest.strip(" \t").partition(" ")[0]
    is_env = os.path.basename(program) == "env" and word and not word.startswith("-")
    return word if is_env else program


def _interpreter_line(file: str, command: Sequence[str], prefix: Callable[[], str]) -> str:
    """Return a command line that runs a script with its interpreter, or "" if none is known."""
    by_extension = {".py": "python", ".sh": "bash"}.get(os.path.splitext(file)[1], "")
    name = os.path.basename(_interpreter(_first_line(file)).strip()) or by_extension
    for program in (name, f"{name}3"):
        if name and shutil.which(program):
            return f"{prefix()} {program} {join(command)}"
    return ""


def _require_interpreter(path: str, command: Sequence[str], prefix: Callable[[], str]) -> None:
    """Raise CommandError if a script's interpreter is missing or not executable."""
    name, interpreter = sanitize(command[0]), _interpreter(_first_line(path))
    if not interpreter or shutil.which(interpreter):
        return
    if interpreter.endswith("\r"):
        shown = sanitize(repr(interpreter))
        text = f"{name} has Windows line endings, so its first line names {shown}."
        raise _error(text, "Convert it", f"sed -i 's/\\r$//' {quote(path)}")
    if os.path.isfile(interpreter):
        text = f"The first line of {name} names {sanitize(interpreter)}, which is not executable."
        raise CommandError(text)
    text = f"The first line of {name} names {sanitize(interpreter)}, which does not exist."
    kind = re.match(r"python|bash|sh|perl|ruby", os.path.basename(interpreter))
    program = kind and (shutil.which(kind[0]) or shutil.which(f"{kind[0]}3"))
    line = f"{prefix()} {os.path.basename(program)} {join([path, *command[1:]])}" if program else ""
    raise _error(text, "Correct that line, or run the script with another interpreter", line)


# -- missing programs ------------------------------------------------------------------------------


def _not_found(command: Sequence[str], prefix: Callable[[], str]) -> ReserveGPUError:
    """Return the error for a command whose first word is not a program."""
    explanations = (
        *(_explain_quotes, _explain_assignment, _explain_shell, _explain_misplaced),
        *(_explain_unexpanded, _explain_file_or_alias),
    )
    for explain in explanations:
        if error := explain(command, prefix):
            return error
    return CommandError(f"{_unknown(command)}.", NOT_FOUND)


def _unknown(command: Sequence[str]) -> str:
    return f"Command not found: {sanitize(command[0])}"


def _explain_quotes(command: Sequence[str], prefix: Callable[[], str]) -> ReserveGPUError | None:
    """Return an error if the whole command line is in quotation marks."""
    line = command[0]
    if len(command) > 1 or not re.search(r"\s", line.strip()):
        return None
    text = f"{_unknown(command)}. The quotation marks make it one word."
    if re.search(SHELL_SYNTAX, line):
        return _error(text, "Run it in a shell", f"{prefix()} sh -c {quote(line)}")
    with suppress(ValueError):  # unbalanced quotation marks
        words = split(line)
        error = _error(text, "Omit the quotation marks", f"{prefix()} {join(words)}")
        return _explain_assignment(words, prefix) or error
    return None


def _explain_assignment(
    command: Sequence[str], prefix: Callable[[], str]
) -> ReserveGPUError | None:
    """Return an error if the command begins with NAME=VALUE, which only shells understand."""
    count = 0
    while count < len(command) and is_assignment(command[count]):
        count += 1
    if not count:
        return None
    overrides = [word for word in command[:count] if word.startswith(f"{VISIBLE}=")]
    assignments = [word for word in command[:count] if word not in overrides]
    words = [*(["env", *assignments] if assignments else []), *command[count:]]
    if overrides:
        return named_by_variable(overrides[-1], words, prefix)
    text = f"{_unknown(command)}. Only a shell sets variables this way."
    line = f"{prefix()} {join(words)}" + ("" if command[count:] else f" {COMMAND}")
    return _error(text, "Put env before it", line)


def _explain_shell(command: Sequence[str], prefix: Callable[[], str]) -> ReserveGPUError | None:
    """Return an error for a shell builtin, or for shell operators as in `a && b`."""
    name, rest = command[0], command[1:]
    has_operators = not OPERATORS.isdisjoint(rest)
    if name not in SHELL_BUILTINS and not has_operators:
        return None
    if name == "exec" and rest:
        return _error("exec is a shell builtin.", "Omit it", f"{prefix()} {join(rest)}")
    line = " ".join(word if word in OPERATORS else quote(word) for word in command)
    if not has_operators and name != "time":
        line += f" && {COMMAND}"
    text = f"{_unknown(command)}."
    if name in SHELL_BUILTINS:
        text = f"{name} is a shell builtin, which only affects the shell that runs it."
    shell = "bash" if shutil.which("bash") else "sh"
    return _error(text, "Run the whole line in one shell", f"{prefix()} {shell} -c {quote(line)}")


def _explain_misplaced(command: Sequence[str], _: Callable[[], str]) -> ReserveGPUError | None:
    """Return an error for an option or a GPU that follows the `--`."""
    name = command[0]
    if not (len(name) > 1 and name.startswith("-")) and not names.is_name(name):
        return None
    text = f"{_unknown(command)}. Put options and GPUs before the --."
    return CommandError(text, NOT_FOUND)


def _explain_unexpanded(
    command: Sequence[str], prefix: Callable[[], str]
) -> ReserveGPUError | None:
    """Return an error for `~/x` or `$HOME/x` in quotation marks."""
    name = command[0]
    path = os.path.expanduser(os.path.expandvars(name))
    if path == name or not os.path.exists(path):
        return None
    text = f"{_unknown(command)}. The quotation marks keep the shell from expanding {name[0]}."
    return _error(text, "Omit the quotation marks", f"{prefix()} {join([path, *command[1:]])}")


def _explain_file_or_alias(
    command: Sequence[str], prefix: Callable[[], str]
) -> ReserveGPUError | None:
    """Return an error for a file in the current directory, a missing `python`, or an alias."""
    name, rest = command[0], command[1:]
    if os.path.dirname(name) or not name:
        return None
    text = _unknown(command)
    if os.path.isfile(name):
        line = f"{prefix()} {join([f'./{name}', *rest])}"
        if not os.access(name, os.X_OK):
            line = _interpreter_line(name, command, prefix)
        text += ". The current directory has a file with that name."
        return _error(text, "Run it", line)
    if name == "python" and shutil.which("python3"):
        return _error(f"{text}.", "Use python3", f"{prefix()} {join(['python3', *rest])}")
    shell = os.path.basename(os.environ.get("SHELL", ""))
    if shell not in ("bash", "zsh") or not re.fullmatch(r"[\w.+-]+", name, re.ASCII):
        return None
    line = f"{prefix()} {shell} -ic {quote(join(command))}"
    return _error(f"{text}.", f"If it is an alias or a function, run it with {shell}", line)
