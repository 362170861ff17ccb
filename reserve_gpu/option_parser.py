"""The parser for the options of the magic, the command line and the Dask plugin."""

from __future__ import annotations

from argparse import SUPPRESS, ArgumentError, ArgumentParser, Namespace
from typing import TYPE_CHECKING, NoReturn

from reserve_gpu.gpus import names
from reserve_gpu.model.errors import PROGRAM, RequestError, program_command
from reserve_gpu.model.option import likely
from reserve_gpu.model.untrusted import sanitize
from reserve_gpu.system.forks import no_fork

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

MESSAGE_LIMIT = 200  # maximum length of a message from argparse, in characters


def _command_line(program: str) -> str:
    """Return a parser's `prog` as a command, with the path of `reserve-gpu` if necessary."""
    first, *rest = program.split()
    return " ".join([program_command() if first == PROGRAM else first, *rest])


def _flag(word: str) -> str:
    """Return an argument without the value that follows `=`."""
    return word.partition("=")[0]


def _hints() -> ModuleType:
    with no_fork:
        from reserve_gpu import option_hints  # only needed for mistakes

    return option_hints


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
            flags = (error.argument_name or "").split("/")
            action = self._option_string_actions.get(flags[0])
            flag = next((flag for flag in map(_flag, args) if flag in flags), flags[0])
            problem = error.message
            if action and action.nargs == 0:
                problem = "takes no value"
            elif action:
                text = "" if action.help is SUPPRESS else f": {action.help}"
                problem = f"needs a value{text}"
            self.error(f"{flag} {problem}".replace("%%", "%"))
        # Compare names without the hyphens, because the hyphens make all options look similar.
        known = [each[2:] for each in self._option_string_actions if each.startswith("--")]
        for word in unknown:
            flag = _flag(word)
            if flag.startswith("-") and flag != "--":
                hint = _hints().of_unknown_option(word, args, self._option_string_actions)
                hint = hint or likely(flag.lstrip("-"), known, "--")
                raise RequestError(f"Unknown option {sanitize(flag)}. {hint}")
        devices = getattr(arguments, "devices", None)
        wrong = (word for word in devices or () if word.strip(", ") and not names.is_name(word))
        for word in (*unknown, *wrong):
            self._refuse(word, args, devices)
        return arguments, unknown

    def _refuse(self, word: str, args: Sequence[str], devices: Sequence[str] | None) -> NoReturn:
        """Raise RequestError for an unexpected argument, with a hint for common mistakes.

        Args:
            word: The argument.
            args: All arguments.
            devices: The arguments that were parsed as GPU names, or None if this parser has none.
        """
        options = self._option_string_actions
        if text := _hints().of_spaced_value(word, args, options):
            raise RequestError(text)
        if devices is None:
            self.error(f"Unexpected argument: {word}")
        if names.is_name(word):
            typed = sanitize(",".join([*devices, word]), MESSAGE_LIMIT)
            raise RequestError(f"Name all GPUs in one place: {typed}")
        if hint := _hints().of_word(word, args, options):
            raise RequestError(f"{sanitize(word)!r} is not a GPU name. {hint}")
        names.parse(word)
        self.error(f"Unexpected argument: {word}")

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
