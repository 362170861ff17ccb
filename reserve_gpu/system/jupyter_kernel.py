"""Which kernel of Jupyter's this process is, and from which machine it was started."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import TYPE_CHECKING

from reserve_gpu.model import untrusted
from reserve_gpu.system import process_identity, procfs, settings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def connection_file(words: Sequence[str] = ()) -> str | None:
    """Return the path of this kernel's connection file, None if this is no kernel of Jupyter's.

    Of a kernel that was started by ssh it is the name that it has been given: over a restart its
    connection file is removed.
    words: the command that this process becomes, if that is a kernel.
    """
    path = _connection_file(words)
    return path and (started().get("id") or path)


def _connection_file(words: Sequence[str]) -> str | None:
    for place, word in enumerate(words):
        if word == "-f" and words[place + 1 :]:
            return os.path.abspath(words[place + 1])
        if word.startswith(("-f=", "--f=", "--IPKernelApp.connection_file=")):
            return os.path.abspath(word.partition("=")[2])
    kernel = process_identity.application("ipykernel.kernelapp", "IPKernelApp")
    path = getattr(kernel, "abs_connection_file", None)
    return os.path.abspath(path) if path else None


def started() -> dict[str, str]:
    """Return what the machine that has started this kernel by ssh has said of it; mostly nothing.

    `id` names the kernel over its restarts, `notebook` is its path, `machine` the user's, `wishes`
    the options, divided by NUL. Once the kernel is known, `pid` and `began` are its pid and start
    time: another process has inherited the variable. Older versions wrote no `began`.
    """
    with suppress(ValueError):  # as without the variable
        fields = untrusted.parsed(bytes.fromhex(os.environ.get(settings.STARTED, "")))
        pid, _, began = procfs.stamp(os.getpid()).partition(" ")
        if not isinstance(fields, dict) or fields.get("pid") not in (None, pid):
            return {}
        if fields.get("began") in (None, "", began):
            return {name: value for name, value in fields.items() if isinstance(value, str)}
    return {}


def as_started(fields: Mapping[str, str]) -> str:
    """Return the variable that says so of a kernel."""
    return json.dumps(dict(fields)).encode().hex()


def origin() -> str | None:
    """Return the machine from which this kernel was started, where that is another one."""
    return started().get("machine")
