"""Environment variables that limit each framework to the reserved part of a GPU.

The limits are cooperative, because the frameworks enforce them and the GPU does not. A limit that
the user has set is never replaced. For a framework that reads no such variable, the user is given a
line of code to run instead.
"""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from reserve_gpu.gpus import cuda_environment
from reserve_gpu.model.devices import MIB
from reserve_gpu.system import settings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reserve_gpu.model.devices import Device
    from reserve_gpu.model.requests import Variables

# Memory in MiB that a CUDA context needs in addition to the memory that a framework counts. On an
# H100 with driver 580 and CUDA 13, a bare context takes 518 MiB. With the kernels that a framework
# has loaded, the context takes 586 MiB (matrix product) to 734 MiB (attention, SVD and FFT) for
# PyTorch 2.11, 618 MiB for JAX 0.11, 586 MiB for CuPy 14, and 520 MiB for Numba. At most half of
# the reserved memory is set aside for the context, because a user who reserves very little memory
# expects a small context.
DEFAULT_CONTEXT_MIB = 768.0
# A PYTORCH_ALLOC_CONF option, and the first PyTorch version that accepts it. Older versions raise
# an error for unknown options
# (https://github.com/pytorch/pytorch/blob/v2.10.0/c10/cuda/CUDAAllocatorConfig.cpp).
FRACTION_WORD, FRACTION_SINCE = "per_process_memory_fraction", (2, 10)
# An installed package has a metadata folder next to it. The folder's name contains the package's
# version (https://packaging.python.org/en/latest/specifications/recording-installed-packages/). For
# some Conda and Debian packages, the name ends with .egg-info.
MODULES, INSTALLED = ("torch", "tensorflow"), (".dist-info", ".egg-info")
UNLIMITED = ("platform", "cuda_async")  # JAX allocators that ignore the memory fraction


def cap(devices: Sequence[Device], memory_limit_mib: float) -> tuple[float, str]:
    """Return the memory limit that keeps a framework within its reserved part of each device.

    Args:
        devices: The reserved devices.
        memory_limit_mib: The memory reserved on each device in MiB.

    Returns:
        The reserved memory minus the CUDA context, first in MiB and then as a fraction of the
        largest device's memory. The fraction is an empty string if it is unknown or rounds to zero.

    Raises:
        RequestError: The environment variable for the CUDA context's size is invalid.
    """
    context_mib = cuda_environment.read_size_mib(settings.CONTEXT_MEMORY)
    context_mib = DEFAULT_CONTEXT_MIB if context_mib is None else context_mib
    room_mib = memory_limit_mib - min(context_mib, memory_limit_mib / 2)
    totals = [device.memory_mib or 0 for device in devices]
    fraction = int(room_mib / max(totals) * 1e6) / 1e6 if all(totals) else 0.0  # rounded down
    return room_mib, f"{fraction:.6f}" if fraction else ""


def variables(
    devices: Sequence[Device], memory_limit_mib: float, inherited: Variables
) -> dict[str, str]:
    """Return the variables that limit frameworks to the reserved memory of each device.

    JAX reads its memory fraction when it first uses a device, and raises an error if both the older
    and the newer variable are set (jaxlib's xla_client.py, generate_pjrt_gpu_plugin_options). CuPy
    reads its limit on the first allocation on a device (cupy/cuda/memory.pyx,
    SingleDeviceMemoryPool). PyTorch reads its limit when CUDA starts
    (c10/cuda/CUDACachingAllocator.cpp, DeviceCachingAllocator). PyTorch's older variable takes
    precedence over the newer one, which is not set here if the user has set the older one.

    Args:
        devices: The reserved devices.
        memory_limit_mib: The memory reserved on each device in MiB.
        inherited: The variables without this process's changes.
    """
    room_mib, fraction = cap(devices, memory_limit_mib)
    user_caps = capped_by(inherited)
    values = {}
    if "cupy" not in user_caps:
        values[cuda_environment.CUPY_LIMIT] = str(int(room_mib * MIB))
    if fraction and "jax" not in user_caps:
        values[cuda_environment.XLA_FRACTION] = fraction
    is_old = bool(inherited.get(cuda_environment.OLD_TORCH_ALLOCATOR))
    can_set_fraction = not is_old and knows_fraction(installed().get("torch"))
    if fraction and can_set_fraction and "torch" not in user_caps:
        words = filter(None, (_torch_words(inherited), f"{FRACTION_WORD}:{fraction}"))
        values[cuda_environment.TORCH_ALLOCATOR] = ",".join(words)
    if not inherited.get(cuda_environment.TF_GROWTH):
        values[cuda_environment.TF_GROWTH] = "true"
    return values


def marked_variables(
    devices: Sequence[Device], memory_limit_mib: float, inherited: Variables
) -> dict[str, str]:
    """Return the result of `variables`, and mark the limits as this package's.

    RESERVE_GPU_CAPS is the mark. Without it, a child process would assume that the user set the
    limits.
    """
    values = variables(devices, memory_limit_mib, inherited)
    if values:
        values[cuda_environment.OWN_CAPS] = cuda_environment.own_caps(values, inherited)
    return values


def capped_by(values: Variables) -> dict[str, str]:
    """Map each limited framework's module name to the variable that sets its limit."""
    names = {
        "torch": _torch_name(values) if FRACTION_WORD in _torch_words(values) else None,
        "jax": _first(values, cuda_environment.OLD_XLA_FRACTION, cuda_environment.XLA_FRACTION),
        "cupy": _first(values, cuda_environment.CUPY_LIMIT),
    }
    return {key: name for key, name in names.items() if name}


def limiting_variables(values: Variables) -> dict[str, str]:
    """Return the result of `capped_by`, without JAX if JAX's allocator ignores limits.

    https://docs.jax.dev/en/latest/gpu_memory_allocation.html
    """
    names = capped_by(values)
    if values.get("XLA_PYTHON_CLIENT_ALLOCATOR") in UNLIMITED:
        names.pop("jax", None)
    return names


def code_lines(devices: Sequence[Device], memory_limit_mib: float) -> dict[str, str]:
    """Return a line of code to limit PyTorch and one to limit TensorFlow, keyed by module name.

    TensorFlow and older PyTorch versions can't be limited by an environment variable.

    https://docs.pytorch.org/docs/stable/generated/torch.cuda.memory.set_per_process_memory_fraction.html
    https://www.tensorflow.org/api_docs/python/tf/config/set_logical_device_configuration
    """
    room_mib, fraction = cap(devices, memory_limit_mib)
    limit = f"tf.config.LogicalDeviceConfiguration(memory_limit={int(room_mib)})"
    lines = {
        "tensorflow": 'for gpu in tf.config.list_physical_devices("GPU"): '
        f"tf.config.set_logical_device_configuration(gpu, [{limit}])"
    }
    if fraction:
        call = f"torch.cuda.set_per_process_memory_fraction({fraction}"
        is_one = len(devices) == 1
        lines["torch"] = f"{call})" if is_one else f"for n in range({len(devices)}): {call}, n)"
    return lines


def installed() -> dict[str, str]:
    """Return the versions of the installed frameworks, keyed by module name.

    The versions are taken from folder names, because importing `importlib.metadata` takes 25 ms,
    and importing a framework takes seconds.
    """
    versions: dict[str, str] = {}
    entries: list[object] = [*sys.path]  # other code might have added objects of any type
    for entry in entries:
        if isinstance(entry, str):
            with suppress(OSError, ValueError):
                for name in os.listdir(entry or "."):
                    module, _, rest = name.partition("-")
                    if module in MODULES and rest[:1].isdigit() and rest.endswith(INSTALLED):
                        versions.setdefault(module, os.path.splitext(rest)[0].partition("-")[0])
    return versions


def knows_fraction(version: str | None) -> bool:
    """Return whether this version of PyTorch reads its limit from an environment variable.

    A version that can't be parsed is treated as too old.
    """
    match = re.match(r"[0-9]{1,4}(\.[0-9]{1,4})*", version or "")
    return match is not None and tuple(map(int, match[0].split("."))) >= FRACTION_SINCE


def _torch_name(values: Variables) -> str | None:
    """Return the name of the PyTorch variable that is set. The older name takes precedence."""
    return _first(values, cuda_environment.OLD_TORCH_ALLOCATOR, cuda_environment.TORCH_ALLOCATOR)


def _torch_words(values: Variables) -> str:
    name = _torch_name(values)
    return ((name and values[name]) or "").strip(", ")


def _first(values: Variables, *names: str) -> str | None:
    """Return the first of these names with a nonempty value, or None."""
    return next((name for name in names if values.get(name)), None)
