"""What keeps frameworks within a part of a GPU: the variables that they read.

A cap is for who means well: only MPS is enforced by the driver. A value that the user has set is
never replaced.
"""

from __future__ import annotations

import os
import re
import stat
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from reserve_gpu import host
from reserve_gpu.calls import no_fork
from reserve_gpu.model import MIB
from reserve_gpu.report import capping
from reserve_gpu.reservation.environment import (
    CUPY_LIMIT,
    MPS_LIMIT,
    OWN_CAPS,
    TF_GROWTH,
    TORCH_ALLOCATOR,
    TORCH_NAMES,
    XLA_FRACTION,
    XLA_NAMES,
    own_caps,
)
from reserve_gpu.reservation.request import setting_mib

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reserve_gpu.model import Device

# What a CUDA context takes beside what a framework counts: about 300 MB with PyTorch's kernels,
# which are loaded at their first use since CUDA 11.7
# (https://github.com/pytorch/pytorch/issues/107667), and more on larger GPUs. At most half of a
# part is left for it: who asks for less than that knows of something smaller.
DEFAULT_CONTEXT_MIB = 512.0
# In PYTORCH_CUDA_ALLOC_CONF since this version; older ones raise on a word that they don't know
# (https://github.com/pytorch/pytorch/blob/v2.10.0/c10/cuda/CUDAAllocatorConfig.cpp).
FRACTION_WORD, FRACTION_SINCE = "per_process_memory_fraction", (2, 10)
# https://docs.nvidia.com/deploy/mps/appendix-tools-and-interface-reference.html
MPS_DIRECTORY, MPS_PID = "/tmp/nvidia-mps", "nvidia-cuda-mps-control.pid"  # noqa: S108


class Cap(NamedTuple):
    """What frameworks are kept to. fractions: of each device's memory, none where it is not known.

    room_mib: of each device, what is left of the part beside the CUDA context.
    """

    room_mib: float
    fractions: tuple[float, ...]


def cap(devices: Sequence[Device], part_mib: float) -> Cap:
    """What frameworks are kept to with this part of each of the devices."""
    room_mib = part_mib - min(context_mib(), part_mib / 2)
    totals = [device.memory_mib for device in devices if device.memory_mib]
    fractions = [_rounded_down(room_mib / total) for total in totals]
    return Cap(room_mib, tuple(fractions) if len(totals) == len(devices) else ())


def variables(
    devices: Sequence[Device], part_mib: float | None, outside: Mapping[str, str | None]
) -> dict[str, str]:
    """What to set for a part of each of these devices; nothing where all of them is reserved.

    JAX reads its fraction when it first uses a device, and takes it of the total; it raises where
    both of its names are set (jaxlib's xla_client.py, generate_pjrt_gpu_plugin_options). CuPy reads
    its limit at the first allocation on a device (cupy/cuda/memory.pyx, SingleDeviceMemoryPool).
    PyTorch reads its own when CUDA starts (c10/cuda/CUDACachingAllocator.cpp,
    DeviceCachingAllocator). A fraction is one number for all devices: the smallest.

    outside: the variables as somebody outside of this package set them.
    """
    if part_mib is None:
        return {}
    room_mib, fractions = cap(devices, part_mib)
    values = {CUPY_LIMIT: str(int(room_mib * MIB)), TF_GROWTH: "true"}
    if fractions:
        fraction = f"{min(fractions):.6f}"
        values[XLA_FRACTION] = fraction
        if knows_fraction(installed_torch()):
            word = f"{FRACTION_WORD}:{fraction}"
            values[TORCH_ALLOCATOR] = ",".join(filter(None, (_torch_words(outside), word)))
    if mps_runs():  # by the numbers that this process has for its devices
        values[MPS_LIMIT] = ",".join(f"{n}={int(room_mib)}M" for n, _ in enumerate(devices))
    theirs = {name for name in (CUPY_LIMIT, TF_GROWTH, MPS_LIMIT) if outside.get(name)}
    theirs |= {XLA_FRACTION} if _first(outside, *XLA_NAMES) else set()
    theirs |= {TORCH_ALLOCATOR} if FRACTION_WORD in _torch_words(outside) else set()
    return {name: value for name, value in values.items() if name not in theirs}


def marked(
    devices: Sequence[Device], part_mib: float | None, outside: Mapping[str, str | None]
) -> dict[str, str]:
    """The same, with the mark by which processes below take them for nobody's own."""
    values = variables(devices, part_mib, outside)
    return {**values, OWN_CAPS: own_caps(values, outside)} if values else {}


def standing(outside: Mapping[str, str | None]) -> list[str]:
    """The names of the caps that the user has set, which stay as they are."""
    names = [_first(outside, *XLA_NAMES), _first(outside, CUPY_LIMIT)]
    if FRACTION_WORD in _torch_words(outside):
        names.append(_first(outside, *TORCH_NAMES))
    if mps_runs():
        names.append(_first(outside, MPS_LIMIT))
    return [name for name in names if name]


def uneven(
    devices: Sequence[Device], part_mib: float | None, written: Mapping[str, str | None]
) -> list[str]:
    """What to say where one fraction was set for devices of different sizes, else nothing.

    written: the variables that were set.
    """
    names = [name for name in (XLA_FRACTION, TORCH_ALLOCATOR) if name in written]
    is_uneven = part_mib is not None and len({*cap(devices, part_mib).fractions}) > 1
    return [capping.uneven(names)] if names and is_uneven else []


def context_mib() -> float:
    """The allowance for a CUDA context in MiB. Raises RequestError for a setting that is none."""
    size = setting_mib(host.CONTEXT_MEMORY)
    return DEFAULT_CONTEXT_MIB if size is None else size


def installed_torch() -> str | None:
    """The version of PyTorch that this Python has, by its metadata; None if that is not known.

    Metadata is what anybody has installed, and finders are anybody's code: whatever goes wrong in
    them, a GPU can be had.
    """
    with suppress(Exception):
        with no_fork:
            from importlib import metadata
        return metadata.version("torch")
    return None


def knows_fraction(version: str | None) -> bool:
    """Whether that PyTorch takes its limit from a variable."""
    match = re.match(r"([0-9]{1,4})\.([0-9]{1,4})", version or "")
    return match is not None and (int(match[1]), int(match[2])) >= FRACTION_SINCE


def mps_runs() -> bool:
    """Whether an MPS control daemon runs that this process would use.

    It has its pid in a file in its directory, as long as it runs. Anybody may make such a
    directory, so it is believed only of root's and of this user's.
    """
    folder = os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or MPS_DIRECTORY
    with suppress(OSError):
        found = [os.stat(folder), os.lstat(os.path.join(folder, MPS_PID))]
        is_file = stat.S_ISREG(found[1].st_mode)
        return is_file and {each.st_uid for each in found} <= {0, os.geteuid()}
    return False


def _torch_words(values: Mapping[str, str | None]) -> str:
    """What PyTorch would read: the first of its names that is set."""
    name = _first(values, *TORCH_NAMES)
    return ((name and values[name]) or "").strip(", ")


def _first(values: Mapping[str, str | None], *names: str) -> str | None:
    """The first of these names with a value that is not empty."""
    return next((name for name in names if values.get(name)), None)


def _rounded_down(fraction: float) -> float:
    return int(fraction * 1e6) / 1e6
