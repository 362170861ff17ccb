"""The parser for the options of the magic, the command line and the Dask plugin."""

from __future__ import annotations

from argparse import ArgumentError, ArgumentParser, Namespace
from typing import TYPE_CHECKING, NoReturn

from reserve_gpu.gpus import names
from reserve_gpu.model.errors import PROGRAM, RequestError, program_command
from reserve_gpu.model.option import likely
from reserve_gpu.model.untrusted import sanitize

if TYPE_CHECKING:
    from collections.abc import Sequence

MESSAGE_LIMIT = 200  # maximum length of a message from argparse, in characters


def _command_line(program: str) -> str:
    """Return a parser's `prog` as a command, with the path of `reserve-gpu` if necessary."""
    first, *rest = program.split()
    return " ".join([program_command() if first == PROGRAM else first, *rest])


class Parser(ArgumentParser):
    """An argument parser that raises RequestError instead of exiting the process."""

    def parse_known_args(  # type: ignore[override] # argparse always passes these two arguments
        self, args: Sequence[str], namespace: Namespace | None = None
    ) -> tuple[Namespace, list[str]]:
        """Parse the arguments. argparse also calls this method for a subcommand's arguments.

        Args:
            args: The arguments.
            namespace: The namespace to which the values are added.

        Returns:
            The namespace, and an empty list.

        Raises:
            RequestError: An argument is unknown or invalid.
        """
        # Reject abbreviated options, but suggest the most similar option.
        self.allow_abbrev = self.exit_on_error = False
        try:
            arguments, unknown = super().parse_known_args(args, namespace)
        except ArgumentError as error:
            if isinstance(error.__context__, RequestError):  # raised by the option's `type`
                raise error.__context__ from None
            flag = (error.argument_name or "").partition("/")[0]
            action = self._option_string_actions.get(flag)
            needs = f"needs a value: {action.help}" if action and action.nargs != 0 else ""
            self.error(f"{flag} {needs or error.message}".replace("%%", "%"))
        # Compare names without the hyphens, because the hyphens make all options look similar.
        known = [each[2:] for each in self._option_string_actions if each.startswith("--")]
        for word in unknown:
            flag = word.partition("=")[0]
            if flag.startswith("-") and flag != "--":
                suggestion = likely(flag.lstrip("-"), known, "--")
                raise RequestError(f"Unknown option {sanitize(flag)}. {suggestion}")
        if unknown:
            self.error(
                f"Unexpected argument: {' '.join(unknown)}. Quote values that contain spaces"
            )
        if devices := getattr(arguments, "devices", ()):
            for word in {*known}.intersection(devices):
                raise RequestError(f"{word!r} is not a GPU name. Did you mean --{word}?")
            names.parse(devices)
        return arguments, unknown

    def error(self, message: str) -> NoReturn:
        """Raise RequestError with a message and the command that shows the help.

        Args:
            message: The message without a full stop at the end.

        Raises:
            RequestError: Always.
        """
        hint = f" See {_command_line(self.prog)} --help" if self.add_help else ""
        if self.prog.startswith("%"):
            hint = f" See {self.prog}?"
        raise RequestError(f"{sanitize(message, MESSAGE_LIMIT)}.{hint}")
