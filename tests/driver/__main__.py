"""`python -m tests.driver SCENARIO -- COMMAND...`: run a command on the machine of a scenario."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from . import SCENARIOS, environment

USAGE = "usage: python -m tests.driver SCENARIO -- COMMAND...   (--list: the known scenarios)"


class MistakeError(Exception):
    """A mistake of the caller, described in one line."""


def describe(scenario: Path) -> str:
    """Return the scenario's name and its first comment."""
    first = scenario.read_text().partition("\n")[0]
    return f"{scenario.stem:10}{first.lstrip('# ')}"


def find_scenario(name: str) -> Path:
    """Return the path of a scenario: a file, or a name in scenarios/."""
    for path in (Path(name), SCENARIOS / f"{name}.txt"):
        if path.is_file():
            return path
    known = ", ".join(sorted(path.stem for path in SCENARIOS.glob("*.txt")))
    raise MistakeError(f"no scenario {name!r}: give a file, or one of {known}")


def execute(arguments: list[str]) -> None:
    """Replace this process with the command, on the scenario's machine."""
    if len(arguments) < 3 or arguments[1] != "--":
        raise MistakeError(USAGE)
    scenario, command = find_scenario(arguments[0]), arguments[2:]
    # Several scenarios contain the same GPUs, so each has its own lock directory.
    folder = f"{tempfile.gettempdir()}/reserve_gpu-on-{scenario.stem}-{os.getuid()}"
    base = {"RESERVE_GPU_LOCK_DIR": folder, **os.environ}
    try:
        variables = environment(scenario, base=base)
    except (OSError, ValueError, RuntimeError) as error:
        raise MistakeError(f"{scenario}: {error}") from error
    try:
        os.execvpe(command[0], command, variables)  # noqa: S606 - no shell is wanted
    except OSError as error:
        raise MistakeError(f"{command[0]}: {error.strerror}") from error


def main(arguments: list[str]) -> int:
    """List the scenarios, or run a command."""
    if not arguments or arguments == ["--list"]:
        print("\n".join(describe(path) for path in sorted(SCENARIOS.glob("*.txt"))))
        return 0
    try:
        execute(arguments)
    except MistakeError as error:
        print(error, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
