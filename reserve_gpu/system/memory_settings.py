"""Environment variables that hold an amount of memory."""

import os

from reserve_gpu.model.errors import RequestError
from reserve_gpu.model.parsing import parse_size
from reserve_gpu.system.settings import CONTEXT_MEMORY, IDLE_MEMORY


def idle_mib() -> float | None:
    """Return the memory in MiB up to which a device is idle, or None for the default.

    Raises:
        RequestError: The variable is not a size.
    """
    return _size_mib(IDLE_MEMORY)


def context_mib() -> float | None:
    """Return the memory in MiB to leave for a CUDA context, or None for the default.

    Raises:
        RequestError: The variable is not a size.
    """
    return _size_mib(CONTEXT_MEMORY)


def _size_mib(variable: str) -> float | None:
    size = os.environ.get(variable)
    if not size:
        return None
    try:
        return parse_size(size)
    except RequestError as error:
        raise RequestError(f"{variable}: {error}") from error
