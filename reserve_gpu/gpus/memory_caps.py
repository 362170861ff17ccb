"""The variables that keep frameworks within a part of a GPU.

A cap is for who means well. A value that the user has set is never replaced. Where a framework
reads no variable, the user gets the line to type.
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

# What a CUDA context takes beside what a framework counts: about 300 MB with PyTorch's kernels,
# which are loaded at their first use since CUDA 11.7
# (https://github.com/pytorch/pytorch/issues/107667), and more on larger GPUs. At most half of a
# part is left for it: who asks for less than that knows of something smaller.
DEFAULT_CONTEXT_MIB = 512.0
# In PYTORCH_ALLOC_CONF since this version; older ones raise on a word that they don't know
# (https://github.com/pytorch/pytorch/blob/v2.10.0/c10/cuda/CUDAAllocatorConfig.cpp).
FRACTION_WORD, FRACTION_SINCE = "per_process_memory_fraction", (2, 10)
# Beside an installed package stands a folder that names its version
# (https://packaging.python.org/en/latest/specifications/recording-installed-packages/); Conda
# and Debian have some that end with .egg-info.
MODULES, INSTALLED = ("torch", "tensorflow"), (".dist-info", ".egg-info")
UNLIMITED = ("platform", "cuda_async")  # of JAX's allocators


def cap(devices: Sequence[Device], memory_limit_mib: float) -> tuple[float, str]:
    """Return what frameworks are kept to with this part of each device. Raises RequestError.

    First what is left of the part beside the CUDA context, in MiB; then the fraction that this is
    of the memory of the largest device, empty where that is not known.
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
    """Return what to set for a part of each of these devices.

    JAX reads its fraction when it first uses a device, and takes it of the total. CuPy reads its
    limit at the first allocation on a device (cupy/cuda/memory.pyx, SingleDeviceMemoryPool).
    PyTorch reads its own when CUDA starts (c10/cuda/CUDACachingAllocator.cpp,
    DeviceCachingAllocator), by its older name if that is set: then nothing is set beside it. JAX
    raises where both of its names are set (jaxlib's xla_client.py,
    generate_pjrt_gpu_plugin_options).

    inherited: the variables without our changes.
    """
    room_mib, fraction = cap(devices, memory_limit_mib)
    theirs = capped_by(inherited)
    values = {}
    if "cupy" not in theirs:
        values[cuda_environment.CUPY_LIMIT] = str(int(room_mib * MIB))
    if fraction and "jax" not in theirs:
        values[cuda_environment.XLA_FRACTION] = fraction
    is_old = bool(inherited.get(cuda_environment.OLD_TORCH_ALLOCATOR))
    has_word = not is_old and knows_fraction(installed().get("torch"))
    if fraction and has_word and "torch" not in theirs:
        words = filter(None, (_torch_words(inherited), f"{FRACTION_WORD}:{fraction}"))
        values[cuda_environment.TORCH_ALLOCATOR] = ",".join(words)
    if not inherited.get(cuda_environment.TF_GROWTH):
        values[cuda_environment.TF_GROWTH] = "true"
    return values


def marked(
    devices: Sequence[Device], memory_limit_mib: float, inherited: Variables
) -> dict[str, str]:
    """Return the variables, and a mark by which children don't take them for the user's."""
    values = variables(devices, memory_limit_mib, inherited)
    if values:
        values[cuda_environment.OWN_CAPS] = cuda_environment.own_caps(values, inherited)
    return values


def capped_by(values: Variables) -> dict[str, str]:
    """Return the name of the variable that caps each framework, by the framework's module."""
    names = {
        "torch": _torch_name(values) if FRACTION_WORD in _torch_words(values) else None,
        "jax": _first(values, cuda_environment.OLD_XLA_FRACTION, cuda_environment.XLA_FRACTION),
        "cupy": _first(values, cuda_environment.CUPY_LIMIT),
    }
    return {key: name for key, name in names.items() if name}


def kept_by(values: Variables) -> dict[str, str]:
    """Return what caps each framework, without one whose allocator keeps to no limit.

    https://docs.jax.dev/en/latest/gpu_memory_allocation.html
    """
    names = capped_by(values)
    if values.get("XLA_PYTHON_CLIENT_ALLOCATOR") in UNLIMITED:
        names.pop("jax", None)
    return names


def to_type(devices: Sequence[Device], memory_limit_mib: float) -> dict[str, str]:
    """Return the line that caps each framework for which there may be no variable, by its module.

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
    """Return the versions of the frameworks that this Python can import, by their modules.

    Goes by names of folders: `importlib.metadata` takes 25 ms to import, a framework seconds.
    """
    found: dict[str, str] = {}
    entries: list[object] = [*sys.path]  # anybody may have added anything
    for entry in entries:
        if isinstance(entry, str):
            with suppress(OSError, ValueError):
                for name in os.listdir(entry or "."):
                    module, _, rest = name.partition("-")
                    if module in MODULES and rest[:1].isdigit() and rest.endswith(INSTALLED):
                        found.setdefault(module, os.path.splitext(rest)[0].partition("-")[0])
    return found


def knows_fraction(version: str | None) -> bool:
    """Tell whether that PyTorch takes its limit from a variable; a strange version does not."""
    match = re.match(r"[0-9]{1,4}(\.[0-9]{1,4})*", version or "")
    return match is not None and tuple(map(int, match[0].split("."))) >= FRACTION_SINCE


def _torch_name(values: Variables) -> str | None:
    """Return the name that PyTorch reads: the first that is set."""
    return _first(values, cuda_environment.OLD_TORCH_ALLOCATOR, cuda_environment.TORCH_ALLOCATOR)


def _torch_words(values: Variables) -> str:
    name = _torch_name(values)
    return ((name and values[name]) or "").strip(", ")


def _first(values: Variables, *names: str) -> str | None:
    """Return the first of these names with a value that is not empty."""
    return next((name for name in names if values.get(name)), None)
