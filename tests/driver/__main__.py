"""`python -m tests.driver SCENARIO -- COMMAND...`: run a command on the machine of a scenario."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from . import SCENARIOS, environment

USAGE = "usage: python -m tests.driver SCENARIO -- COMMAND...   (--list: the scenarios at hand)"


class MistakeError(Exception):
    """What the caller got wrong, in one line."""


def describe(scenario: Path) -> str:
    """Give the scenario's name and its first comment."""
    first = scenario.read_text().partition("\n")[0]
    return f"{scenario.stem:10}{first.lstrip('# ')}"


def find_scenario(name: str) -> Path:
    """Find a scenario: a file, or the name of one at hand."""
    for path in (Path(name), SCENARIOS / f"{name}.txt"):
        if path.is_file():
            return path
    known = ", ".join(sorted(path.stem for path in SCENARIOS.glob("*.txt")))
    raise MistakeError(f"no scenario {name!r}: give a file, or one of {known}")


def run(arguments: list[str]) -> None:
    """Become the command, on the scenario's machine."""
    if len(arguments) < 3 or arguments[1] != "--":
        raise MistakeError(USAGE)
    scenario, command = find_scenario(arguments[0]), arguments[2:]
    # A machine of its own, with its own locks: the same GPUs are in many scenarios.
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
        run(arguments)
    except MistakeError as error:
        print(error, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
