"""Hints for common mistakes in options and their values.

Users put spaces into values, type option names of other tools, and write `all` for a number.
"""

from __future__ import annotations

import re
import shlex
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from reserve_gpu.gpus import names
from reserve_gpu.gpus.nvml import Nvml
from reserve_gpu.model import parsing
from reserve_gpu.model.errors import DriverError, RequestError
from reserve_gpu.model.untrusted import sanitize

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    Options = Mapping[str, argparse.Action]  # a parser's options by name, such as `--memory`

DRIVER_LIMIT_S = 2.0  # timeout for each driver call, in seconds
VALUE_LIMIT = 80  # maximum length of a suggested value, in characters
EVERY = {"all", "*", "every", "any", "everything"}
GPU_WORDS = {"gpu", "gpus", "card", "cards", "device", "devices"}
MODEL = r"(?:rtx|gtx|[a-z]{1,2})[0-9]{1,4}[a-z]*"  # such as A100, L40S or RTX3090
# Names of options in nvidia-smi, Docker, Slurm and similar tools.
FOR_A_GPU = {"g", "gpu", "i", "id", "ids", "index", "device", "devices", "gpu-id", "gpu-ids"}
FOR_A_COUNT = {
    "gpus",
    "number",
    "num",
    "num-gpus",
    "num_gpus",
    "ngpus",
    "gpu-count",
    "gpus-per-node",
    "N",
}
_SAME = {
    "--wait": "timeout block queue w",
    "--for": "time duration t walltime lease extend renew prolong",
    "--until": "deadline end",
    "--note": "comment message msg m",
    "--name": "model type constraint",
    "--memory": "mem",
    "--min-memory": "vram",
}
SAME = {name: flag for flag, listed in _SAME.items() for name in listed.split()}


def of_unknown_option(word: str, args: Sequence[str], options: Options) -> str:
    """Return a hint for an option of another tool, or an empty string.

    Args:
        word: The option as typed, such as `--gpus` or `--gpus=2`.
        args: All typed arguments.
        options: The parser's options.
    """
    flag, has_value, value = word.partition("=")
    if not has_value and word in args:
        value = next(iter(args[args.index(word) + 1 :]), "")
    return _suggest(flag.lstrip("-"), "" if value.startswith("-") else value, options)


def of_word(word: str, args: Sequence[str], options: Options) -> str:
    """Return a hint for an argument that is not a GPU name, or an empty string.

    Args:
        word: The argument.
        args: All typed arguments.
        options: The parser's options.
    """
    position = args.index(word) if word in args else len(args)
    before, after = ["", *args][position], [*args, "", ""][position + 1]
    key, equals, value = word.partition("=")
    name_flag = _flag("name", options)
    if word.lower() in EVERY:
        return _every_gpu()
    if equals:
        return _suggest(key, value, options)
    if word.lower() in GPU_WORDS and before.isdecimal():
        return f"Did you mean -n {sanitize(before, VALUE_LIMIT)}?"
    if word.lower() in GPU_WORDS and names.is_name(after):
        return f"Did you mean {sanitize(after)}?"
    if f"--{word}" in options:
        return f"Did you mean --{word}?"
    if word.lower() in SAME and (hint := _suggest(word.lower(), after, options)):
        return hint
    if name_flag and re.fullmatch(MODEL, word, re.IGNORECASE | re.ASCII):
        return f"Did you mean {name_flag} {sanitize(word, VALUE_LIMIT)}?"
    return ""


def of_spaced_value(word: str, args: Sequence[str], options: Options) -> str:
    """Return a message about a value that was typed with a space, or an empty string.

    Args:
        word: The first argument that does not belong to any option, such as `GB`.
        args: All typed arguments, such as `["--memory", "10", "GB"]`.
        options: The parser's options.
    """
    if word not in args:
        return ""
    position = start = args.index(word)
    while start > 0 and not args[start].startswith("-"):
        start -= 1
    flag, has_value, value = args[start].partition("=")
    option = options.get(flag)
    if option is None or option.nargs not in (None, "?"):
        return ""
    end = next((i for i in range(start + 1, len(args)) if args[i].startswith("-")), len(args))
    before = [value] if has_value else []
    for last in range(end, position, -1):
        words = [*before, *args[start + 1 : last]]
        if len(words) > 1 and (hint := _as_one_value(flag, words, str(option.metavar))):
            typed = sanitize(" ".join(args[start:position]), VALUE_LIMIT)
            return f"Unexpected {sanitize(word)!r} after {typed}. {hint}"
    return ""


def is_value(text: str, kind: str) -> bool:
    """Return whether a text is a valid value for options of one kind.

    Args:
        text: The text.
        kind: The placeholder in the help, such as `SIZE`, or `SINCE` for the option `--since`.
    """
    with suppress(RequestError):
        if kind == "SIZE":
            return bool(parsing.parse_percent(text) or parsing.size_and_unit(text))
        if kind == "DURATION":
            return parsing.parse_duration(text) >= 0
        if kind == "TIME":
            return parsing.parse_moment(text, time.time()) > 0
        if kind == "SINCE":
            return parsing.parse_since(text, time.time())[0] >= 0
        if kind == "COUNT":
            return text.isdecimal()
        return kind == "TEXT"
    return False


def quoted(text: str) -> str:
    """Quote a value for a shell or a magic, in double quotes if possible."""
    return f'"{text}"' if re.fullmatch(r"[\w .,:+%-]+", text, re.ASCII) else shlex.quote(text)


def _as_one_value(flag: str, words: Sequence[str], kind: str) -> str:
    """Return how to type several words as one value of an option, or an empty string."""
    joined, spaced = "".join(words), " ".join(words)
    if kind == "COUNT" and words[0].isdecimal():
        return f"Did you mean {flag} {words[0]}?"
    kind = "SINCE" if flag == "--since" else kind  # accepts durations and times in the past
    if kind in ("SIZE", "DURATION", "SINCE") and is_value(joined, kind):
        return f"Leave out the space: {flag} {joined}"
    if kind == "DURATION" and flag == "--for" and is_value(spaced, "TIME"):
        return f"For an end time: --until {quoted(spaced)}"
    for text in (spaced, " ".join(reversed(words))):
        if kind in ("TEXT", "TIME", "SINCE") and is_value(text, kind):
            return f"Put the value in quotes: {flag} {sanitize(quoted(text), VALUE_LIMIT)}"
    return ""


def _suggest(name: str, value: str, options: Options) -> str:
    """Return a hint for an option name of another tool, or for `count=2` without hyphens."""
    if name in FOR_A_COUNT and "-n" in options and re.fullmatch("[1-9][0-9]{0,3}", value, re.ASCII):
        return f"Did you mean -n {value}?"
    if name in FOR_A_GPU | FOR_A_COUNT and "-n" in options:
        if value.lower() in EVERY:
            return _every_gpu()
        typed = f": {sanitize(value)}" if names.is_name(value) else ", such as 0 or 1,3"
        return f"Name GPUs without an option{typed}"
    flag = _flag(name, options)
    if not flag or (value and options[flag].nargs == 0):
        return ""
    has_unit = not (options[flag].metavar == "SIZE" and value.isdecimal())
    has_value = value and has_unit and is_value(value, str(options[flag].metavar))
    typed = f" {sanitize(shlex.quote(value), VALUE_LIMIT)}" if has_value else ""
    return f"Did you mean {flag}{typed}?"


def _flag(name: str, options: Options) -> str:
    """Return the option for a name that might be another tool's, or an empty string."""
    flags = (f"-{name}", f"--{name}", SAME.get(name, ""))
    flag = next((each for each in flags if each in options), "")
    # In `kernel install`, --name is the name of the kernel.
    return "--gpu-name" if flag == "--name" and "--gpu-name" in options else flag


def _every_gpu() -> str:
    """Return how to request all GPUs of this machine."""
    count = 0
    with suppress(DriverError), Nvml(DRIVER_LIMIT_S) as gpus:
        count = gpus.count()
    if not count:
        return "To reserve several GPUs, give a range (0-3) or a number (-n 4)."
    if count == 1:
        return "This machine has one GPU: 0"
    return f"For all {count} GPUs: 0-{count - 1} or -n {count}"
