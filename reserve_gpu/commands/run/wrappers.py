"""Command-line syntax of wrapper programs such as `nice`, `env` and `timeout`.

A wrapper either becomes the command that it starts or waits for that command. In both cases, it
passes on variables and locks. So `nice -n 5 timeout 1h tmux new -d train` is checked like
`tmux new -d train`.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence


def is_assignment(word: str) -> bool:
    """Return whether a word has the form NAME=VALUE."""
    return re.fullmatch(r"[A-Za-z_]\w*=.*", word, re.DOTALL) is not None


class Syntax(NamedTuple):
    """The argument syntax of a program that starts a command.

    The syntax is used to find the command's first word.

    Attributes:
        short: The letters of the short options that take a value.
        long: The long options whose value may be a separate word.
        operands: The number of words between the options and the command.
        has_variables: Whether words of the form NAME=VALUE may precede the command.
    """

    short: str = ""
    long: tuple[str, ...] = ()
    operands: int = 0
    has_variables: bool = False

    def start(self, words: Sequence[str]) -> int:
        """Return the index of the command's first word, or `len(words)` if there is no command.

        Args:
            words: The program and its arguments.
        """
        at = 1
        while at < len(words) and words[at].startswith("-") and words[at] != "--":
            at += 1 + self._takes_next(words[at])
        at += at < len(words) and words[at] == "--"
        while self.has_variables and at < len(words) and is_assignment(words[at]):
            at += 1
        return min(at + self.operands, len(words))

    def _takes_next(self, word: str) -> bool:
        """Return whether an option's value is the next word."""
        if word.startswith("--"):
            return word in self.long
        # In a group such as -dmS, an option's value is the rest of the word. If the option's letter
        # comes last, the value is the next word.
        first = next((at for at, letter in enumerate(word[1:], 1) if letter in self.short), None)
        return first == len(word) - 1


ENV = Syntax("uCa", ("--unset", "--chdir", "--argv0"), has_variables=True)
WRAPPERS = {
    "env": ENV,
    "nice": Syntax("n", ("--adjustment",)),
    "nohup": Syntax(),
    "setsid": Syntax(),
    "timeout": Syntax("ks", ("--kill-after", "--signal"), operands=1),
    "stdbuf": Syntax("ioe", ("--input", "--output", "--error")),
    "ionice": Syntax("cn", ("--class", "--classdata")),
    "chrt": Syntax("TPD", ("--sched-runtime", "--sched-period", "--sched-deadline"), operands=1),
    "taskset": Syntax(operands=1),
    "numactl": Syntax("NmCpilPw"),
    "prlimit": Syntax(),
    "time": Syntax("fo", ("--format", "--output")),
    "xvfb-run": Syntax("efnpsw", ("--error-file", "--auth-file", "--server-num", "--server-args")),
    "strace": Syntax("abeEIoOpPsSuUX"),
    "flock": Syntax("wE", ("--wait", "--timeout", "--conflict-exit-code"), operands=1),
    "unbuffer": Syntax(),
    "chronic": Syntax(),
    "catchsegv": Syntax(),
    "tini": Syntax("pe"),
    "dumb-init": Syntax("r", ("--rewrite",)),
}


def name_of(words: Sequence[str]) -> str:
    """Return the base name of the program that a command line starts, or an empty string."""
    return os.path.basename(words[0]) if words else ""


def levels(words: Sequence[str]) -> list[int]:
    """Return the index of each program in a command line: any wrappers, then the command.

    Args:
        words: The program and its arguments.
    """
    indexes = [0]
    while syntax := WRAPPERS.get(name_of(words[indexes[-1] :])):
        index = indexes[-1] + syntax.start(words[indexes[-1] :])
        if index >= len(words):
            break
        indexes.append(index)
    return indexes
