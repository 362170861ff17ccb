"""How common programs read the words before the command that they start.

`nice -n 5 timeout 1h tmux new -d train` ends in tmux: programs such as nice, env and timeout become
the command, or wait for it, and pass on variables and locks.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence


def is_assignment(word: str) -> bool:
    """Return whether a word is NAME=VALUE."""
    return re.fullmatch(r"[A-Za-z_]\w*=.*", word, re.DOTALL) is not None


class Syntax(NamedTuple):
    """The options of a program that starts a command, to find where that command begins.

    Attributes:
        short: The letters of short options that take a value.
        long: The long options whose value may be the next word.
        operands: The number of words between the options and the command.
        has_variables: Words such as NAME=VALUE may precede the command.
    """

    short: str = ""
    long: tuple[str, ...] = ()
    operands: int = 0
    has_variables: bool = False

    def start(self, words: Sequence[str]) -> int:
        """Return the place of the command's first word, or the number of words without a command.

        Args:
            words: The program and what follows.
        """
        at = 1
        while at < len(words) and words[at].startswith("-") and words[at] != "--":
            at += 1 + self._takes_next(words[at])
        at += at < len(words) and words[at] == "--"
        while self.has_variables and at < len(words) and is_assignment(words[at]):
            at += 1
        return min(at + self.operands, len(words))

    def _takes_next(self, word: str) -> bool:
        """Return whether an option has its value in the next word."""
        if word.startswith("--"):
            return word in self.long
        # In a cluster, such as -dmS, the first letter with a value takes the rest of the word.
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
    """Return the base name of the program that these words start."""
    return os.path.basename(words[0]) if words else ""


def levels(words: Sequence[str]) -> list[int]:
    """Return the places at which programs begin: the first word, and what each wrapper starts."""
    places = [0]
    while syntax := WRAPPERS.get(name_of(words[places[-1] :])):
        place = places[-1] + syntax.start(words[places[-1] :])
        if place >= len(words):
            break
        places.append(place)
    return places
