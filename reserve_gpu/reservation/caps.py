"""The variables that keep frameworks within a part of a GPU, and what the user is told about them.

A cap is for who means well: only MPS is enforced by the driver. A value that the user has set is
never replaced. Where a framework reads no variable, the user gets the line to type.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from reserve_gpu import host
from reserve_gpu.model import MIB, Promise, Request
from reserve_gpu.notices import Capped, Exceeded
from reserve_gpu.reservation.environment import (
    CUPY_LIMIT,
    MPS_LIMIT,
    OLD_XLA_FRACTION,
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
    from reserve_gpu.notices import Notice
    from reserve_gpu.reservation.held import Held

# What a CUDA context takes beside what a framework counts: about 300 MB with PyTorch's kernels,
# which are loaded at their first use since CUDA 11.7
# (https://github.com/pytorch/pytorch/issues/107667), and more on larger GPUs. At most half of a
# part is left for it: who asks for less than that knows of something smaller.
DEFAULT_CONTEXT_MIB = 512.0
# In PYTORCH_ALLOC_CONF since this version; older ones raise on a word that they don't know
# (https://github.com/pytorch/pytorch/blob/v2.10.0/c10/cuda/CUDAAllocatorConfig.cpp).
FRACTION_WORD, FRACTION_SINCE = "per_process_memory_fraction", (2, 10)
# https://docs.nvidia.com/deploy/mps/appendix-tools-and-interface-reference.html
MPS_DIRECTORY, MPS_PID = "/tmp/nvidia-mps", "nvidia-cuda-mps-control.pid"  # noqa: S108
# Beside an installed package stands a folder that names its version
# (https://packaging.python.org/en/latest/specifications/recording-installed-packages/); Conda
# and Debian have some that end with .egg-info.
MODULES, INSTALLED = ("torch", "tensorflow", "jaxlib"), (".dist-info", ".egg-info")
# Since this jaxlib its xla_client.py reads the newer name (seen in the wheels 0.4.31 and 0.4.32).
NEW_XLA_NAME_SINCE = (0, 4, 32)
UNLIMITED = ("platform", "cuda_async")  # of JAX's allocators
DRIVER = "driver"  # beside the modules of frameworks: MPS keeps all of them to a limit


class Cap(NamedTuple):
    """What frameworks are kept to. fractions: of each device's memory, none where it is not known.

    room_mib: of each device, what is left of the part beside the CUDA context.
    """

    room_mib: float
    fractions: tuple[float, ...]


def cap(devices: Sequence[Device], part_mib: float) -> Cap:
    """Return the limits of frameworks with this part of each device."""
    room_mib = part_mib - min(context_mib(), part_mib / 2)
    totals = [device.memory_mib for device in devices if device.memory_mib]
    fractions = [_rounded_down(room_mib / total) for total in totals]
    return Cap(room_mib, tuple(fractions) if len(totals) == len(devices) else ())


def variables(
    devices: Sequence[Device], part_mib: float, inherited: Mapping[str, str | None]
) -> dict[str, str]:
    """Return what to set for a part of each of these devices.

    JAX reads its fraction when it first uses a device, and takes it of the total; it raises where
    both of its names are set (jaxlib's xla_client.py, generate_pjrt_gpu_plugin_options). So the one
    that its documents name is set, unless the installed one is too old to know it. CuPy reads
    its limit at the first allocation on a device (cupy/cuda/memory.pyx, SingleDeviceMemoryPool).
    PyTorch reads its own when CUDA starts (c10/cuda/CUDACachingAllocator.cpp,
    DeviceCachingAllocator), by its older name if that is set. A fraction is one number for all
    devices: the smallest.

    inherited: the variables without our changes.
    """
    room_mib, fractions = cap(devices, part_mib)
    ours = {"cupy": (CUPY_LIMIT, str(int(room_mib * MIB)))}
    if fractions:
        fraction, versions = f"{min(fractions):.6f}", installed()
        is_old = "jaxlib" in versions and not _is_since(versions["jaxlib"], NEW_XLA_NAME_SINCE)
        ours["jax"] = OLD_XLA_FRACTION if is_old else XLA_FRACTION, fraction
        if knows_fraction(versions.get("torch")):
            words = filter(None, (_torch_words(inherited), f"{FRACTION_WORD}:{fraction}"))
            ours["torch"] = _first(inherited, *TORCH_NAMES) or TORCH_ALLOCATOR, ",".join(words)
    # It goes by the numbers that a process has for its devices. One that names a device that a
    # process below does not see makes it drop all limits, so it is set where there is only one.
    if mps_runs() and len(devices) == 1:
        ours[DRIVER] = MPS_LIMIT, f"0={int(room_mib)}M"
    theirs = capped_by(inherited)
    values = dict(pair for key, pair in ours.items() if key not in theirs)
    return values if inherited.get(TF_GROWTH) else {**values, TF_GROWTH: "true"}


def marked(
    devices: Sequence[Device], part_mib: float, inherited: Mapping[str, str | None]
) -> dict[str, str]:
    """Return the same, and a mark by which child processes don't take them for the user's."""
    values = variables(devices, part_mib, inherited)
    return {**values, OWN_CAPS: own_caps(values, inherited)} if values else {}


def capped_by(values: Mapping[str, str | None]) -> dict[str, str]:
    """Return the name of the variable that caps each framework, by the framework's module."""
    names = {
        "torch": _first(values, *TORCH_NAMES) if FRACTION_WORD in _torch_words(values) else None,
        "jax": _first(values, *XLA_NAMES),
        "cupy": _first(values, CUPY_LIMIT),
        DRIVER: _first(values, MPS_LIMIT) if mps_runs() else None,
    }
    return {key: name for key, name in names.items() if name}


def kept_by(values: Mapping[str, str | None]) -> dict[str, str]:
    """Return the same, without a framework whose allocator keeps to no limit.

    https://docs.jax.dev/en/latest/gpu_memory_allocation.html
    """
    names = capped_by(values)
    if values.get("XLA_PYTHON_CLIENT_ALLOCATOR") in UNLIMITED:
        names.pop("jax", None)
    return names


def to_type(devices: Sequence[Device], part_mib: float) -> dict[str, str]:
    """Return the line that caps each framework for which there may be no variable, by its module.

    https://docs.pytorch.org/docs/stable/generated/torch.cuda.memory.set_per_process_memory_fraction.html
    https://www.tensorflow.org/api_docs/python/tf/config/set_logical_device_configuration
    """
    room_mib, fractions = cap(devices, part_mib)
    limit = f"tf.config.LogicalDeviceConfiguration(memory_limit={int(room_mib)})"
    lines = {
        "tensorflow": 'for gpu in tf.config.list_physical_devices("GPU"): '
        f"tf.config.set_logical_device_configuration(gpu, [{limit}])"
    }
    if fractions:
        call = f"torch.cuda.set_per_process_memory_fraction({min(fractions):.6f}"
        is_one = len(devices) == 1
        lines["torch"] = f"{call})" if is_one else f"for n in range({len(devices)}): {call}, n)"
    return lines


def notes(
    devices: Sequence[Device],
    part_mib: float,
    inherited: Mapping[str, str | None],
    written: Mapping[str, str | None],
    *,
    is_late: bool,
) -> Capped:
    """Return what to tell the user about the caps of a part of each of these devices.

    inherited: the variables without our changes. written: the caps that are set. is_late: CUDA runs
    in this process, and what has started reads no variable any more.
    """
    theirs, capped = capped_by(inherited), capped_by({**inherited, **written})
    found = {} if DRIVER in capped else installed()
    lines = {
        key: line
        for key, line in to_type(devices, part_mib).items()
        if key in found and key not in (theirs if is_late else capped)
    }
    return Capped([*theirs.values()], is_late, lines)


def exceeded(
    held: Held,
    written: Mapping[str, str | None],
    uses: Mapping[Device, float | None],
    before: frozenset[Device],
) -> tuple[frozenset[Device], list[Notice]]:
    """Return the devices of which more than the part is used, and a notice for each new one.

    written: the variables that are set for the part. uses: by this process and its children, in
    MiB, None where it can't be seen: then the device stays as it was. before: what was returned
    after the last cell.
    """
    part_mib = held.part_mib
    if part_mib is None:
        return frozenset(), []
    over = frozenset(
        device
        for device, used_mib in uses.items()
        if (device in before if used_mib is None else used_mib > part_mib)
    )
    request = Request(promise=Promise(held.promise.size))
    names = sorted(capped_by(written).values())
    new = [device for device in held.devices if device in over - before]
    return over, [Exceeded(device, uses[device] or 0.0, request, names) for device in new]


def context_mib() -> float:
    """Return the allowance for a CUDA context in MiB. Raises RequestError for a bad setting."""
    size = setting_mib(host.CONTEXT_MEMORY)
    return DEFAULT_CONTEXT_MIB if size is None else size


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
    """Tell whether that PyTorch takes its limit from a variable."""
    return _is_since(version or "", FRACTION_SINCE)


def mps_runs() -> bool:
    """Tell whether an MPS control daemon runs that this process would use.

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
    """Return what PyTorch would read: the first of its names that is set."""
    name = _first(values, *TORCH_NAMES)
    return ((name and values[name]) or "").strip(", ")


def _is_since(version: str, first: tuple[int, ...]) -> bool:
    """Tell whether a version is that one or a later one; what can't be read is earlier."""
    match = re.match(r"[0-9]{1,4}(\.[0-9]{1,4})*", version)
    return match is not None and tuple(map(int, match[0].split("."))) >= first


def _first(values: Mapping[str, str | None], *names: str) -> str | None:
    """Return the first of these names with a value that is not empty."""
    return next((name for name in names if values.get(name)), None)


def _rounded_down(fraction: float) -> float:
    return int(fraction * 1e6) / 1e6
