"""What a framework's answer comes to: does it see exactly the devices that were reserved?

Pure functions of plain values.
"""

from __future__ import annotations

import re
import signal
from contextlib import suppress
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from reserve_gpu.commands.check.probes import MISSING
from reserve_gpu.gpus import names
from reserve_gpu.model import untrusted
from reserve_gpu.model.untrusted import sanitize
from reserve_gpu.render.phrases import listed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reserve_gpu.model.devices import Device

NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE (cuda.h)
TEXT_LIMIT = 200  # characters of what a framework says

# What to do about an error of cuInit; docs/check.md says where that is from. What can be typed
# stands on a line of its own.
REMEDIES: dict[int, str] = {
    MISSING: "CUDA's part of the NVIDIA driver was not found. A container needs "
    "NVIDIA_DRIVER_CAPABILITIES=compute,utility; Debian has it in the package libcuda1.",
    # CUDA_ERROR_STUB_LIBRARY
    34: "This libcuda.so.1 is the stub of the CUDA toolkit, made for linking: no program can run "
    "with it. Take its folder (.../stubs) out of LD_LIBRARY_PATH.",
    # CUDA_ERROR_DEVICE_UNAVAILABLE
    46: "A GPU in exclusive mode lets in one process at a time, a prohibited one none. Its mode:\n"
    "nvidia-smi --query-gpu=index,compute_mode --format=csv",
    NO_DEVICE: "CUDA can open no GPU. Start a container with its GPUs (docker run --gpus all). "
    "Elsewhere see what nvidia-smi says, and who may open the GPUs:\nls -l /dev/nvidia*",
    # CUDA_ERROR_SYSTEM_NOT_READY
    802: "On a machine with NVSwitch (HGX, DGX) the Fabric Manager must run, in the version of the "
    "driver. Ask the administrator to look:\nsystemctl status nvidia-fabricmanager",
    # CUDA_ERROR_SYSTEM_DRIVER_MISMATCH
    803: "libcuda.so.1 and the kernel module are of different versions of the driver. After an "
    "update of the driver, the administrator can reload the module or reboot, once the programs "
    "that use a GPU have ended. A container must not bring a driver of its own.",
    # CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE
    804: "libcuda.so.1 is newer than the kernel module, which not every GPU supports. Take "
    "cuda-compat out of LD_LIBRARY_PATH. After an update of the driver, the administrator can "
    "reload the module or reboot, once the programs that use a GPU have ended.",
    # CUDA_ERROR_UNKNOWN
    999: "A container needs /dev/nvidia-uvm. After a suspend, the administrator can reload that "
    "module, once the programs that use a GPU have ended:\n"
    "sudo modprobe -r nvidia_uvm && sudo modprobe nvidia_uvm",
}


class Verdict(Enum):
    """What an answer comes to, in a word."""

    FITS = "fits"
    UNRESERVED = "unreserved"  # all is well, but nothing is reserved
    OTHER = "other devices"
    NONE = "no device"
    FAILS = "fails"
    ABSENT = "not installed"


class FrameworkAnswer(NamedTuple):
    """What a framework's process said; see `probes.ask`.

    version: None if it could not be imported.
    build: the CUDA version that it is built for, "" for one unnamed, None for none.
    visible: CUDA_VISIBLE_DEVICES after its import. doing: what it did last.
    devices: the UUIDs, without `GPU-`, that the driver gives what the framework sees, None for one
        that the driver does not show; None if it did not come so far.
    targets: what it has code for, as `sm_90` and `compute_90`; empty if it does not say.
    capabilities: the compute capability of each device, as [9, 0].
    error: what went wrong. driver_code: the CUresult of the call that failed, if it was one.
    stderr: the last line of its output.
    code: its exit code, or minus the signal that ended it; None: it was stopped after limit_s.
    """

    version: str | None = None
    build: str | None = None
    visible: str | None = None
    doing: str = "being started"
    devices: Sequence[str | None] | None = None
    targets: Sequence[str] = ()
    capabilities: Sequence[Sequence[int]] = ()
    error: str | None = None
    driver_code: int | None = None
    is_done: bool = False
    stderr: str = ""
    code: int | None = 0
    limit_s: float = 0.0


class Expectation(NamedTuple):
    """What the answers are compared with.

    reserved: the devices of the reservation, in CUDA's order; empty if there is none.
    known: all devices that we have labels for. visible: CUDA_VISIBLE_DEVICES as it is now.
    expected: CUDA_VISIBLE_DEVICES as the reservation set it, None if that is not known.
    driver: the answer of the bare driver.
    """

    reserved: tuple[Device, ...] = ()
    known: tuple[Device, ...] = ()
    visible: str | None = None
    expected: str | None = None
    driver: FrameworkAnswer = FrameworkAnswer()

    def named(self, uuid: str | None) -> tuple[str, str | None]:
        """Return the label and the UUID that we have for what CUDA knows by that one."""
        for device in (*self.reserved, *self.known):
            if cuda_uuid(device) == uuid:
                return device.label, device.uuid
        return uuid or "?", uuid


class Finding(NamedTuple):
    """One row: a framework, what it sees, and what that comes to.

    build: the CUDA version that it is built for, "" for one unnamed, None for none.
    sees: for each device its label and its UUID, None where that is not known.
    reason: why, where it does not fit. remedy: of the driver, what to do about its error. cap: the
    variable that keeps it within a part. to_type: the line that would, where no variable does.
    """

    name: str
    verdict: Verdict
    version: str | None = None
    build: str | None = None
    sees: tuple[tuple[str, str | None], ...] = ()
    reason: str = ""
    remedy: str | None = None
    cap: str | None = None
    to_type: str | None = None

    @property
    def is_well(self) -> bool:
        """Tell whether nothing has to be done about it."""
        return self.verdict in (Verdict.FITS, Verdict.UNRESERVED, Verdict.ABSENT)


def evaluate(name: str, answer: FrameworkAnswer, place: Expectation) -> Finding:
    """Return the row of a framework, from its answer."""
    verdict, reason = _verdict(answer, place)
    is_cause = answer is place.driver and reason == _foreign(answer.error or "")
    return Finding(
        name,
        verdict,
        version=answer.version and sanitize(answer.version, 40),
        build=None if answer.build is None else sanitize(answer.build, 20),
        sees=tuple(map(place.named, answer.devices or ())),
        reason=reason,
        remedy=REMEDIES.get(answer.driver_code or 0) if is_cause else None,
    )


def cuda_uuid(device: Device) -> str:
    """Return the UUID that CUDA gives the device, without `GPU-`.

    Before driver 470 a MIG instance is called `MIG-GPU-...`, and CUDA gives it that of its GPU.
    """
    is_old_instance = device.uuid.startswith("MIG-GPU-")
    return names.bare_uuid((is_old_instance and device.gpu_uuid) or device.uuid)


def runs_on(target: str, capability: tuple[int, int]) -> bool:
    """Tell whether code for that target of nvcc runs on a GPU of that compute capability.

    What was compiled (`sm_86`) runs on the same major and a minor that is not lower; PTX
    (`compute_86`) is compiled by the driver, for this GPU and all above. `a` is for that capability
    alone, `f` for its family. A target that we can't read may run.
    https://docs.nvidia.com/cuda/ada-compatibility-guide
    https://docs.nvidia.com/cuda/cuda-programming-guide/05-appendices/compute-capabilities.html
    """
    match = re.fullmatch(r"(sm|compute)_([0-9]+)([0-9])([af]?)", target, re.ASCII)
    if match is None:
        return True
    built_for = int(match[2]), int(match[3])
    if match[4] == "a":
        return built_for == capability
    is_plain_ptx = match[1] == "compute" and not match[4]
    return built_for <= capability and (is_plain_ptx or built_for[0] == capability[0])


def answer(out: bytes, err: bytes, code: int | None, limit_s: float) -> FrameworkAnswer:
    """Return the answer of a process: lines of JSON on stdout.

    code: how it ended, None if it did not within limit_s.
    """
    merged: dict[str, Any] = {}
    for line in out.splitlines():
        with suppress(ValueError):
            news = untrusted.parsed(line)
            merged |= news if isinstance(news, dict) else {}
    fields = {name: value for name, value in merged.items() if name in FrameworkAnswer._fields}
    lines = [line for line in err.decode("utf-8", "replace").splitlines() if line.strip()]
    return FrameworkAnswer(**fields, stderr=lines[-1] if lines else "", code=code, limit_s=limit_s)


def _verdict(answer: FrameworkAnswer, place: Expectation) -> tuple[Verdict, str]:
    """Return the verdict, and the reason for it."""
    if not answer.is_done:
        return Verdict.FAILS, _how_it_ended(answer)
    if answer.error and answer.version is None and answer is not place.driver:
        return Verdict.FAILS, _foreign(answer.error)
    if not answer.devices:
        return Verdict.NONE, _why_none(answer, place)
    reserved = [cuda_uuid(device) for device in place.reserved]
    if answer.devices != (reserved or place.driver.devices):
        return Verdict.OTHER, _why_other(answer, reserved, place)
    for major, minor in answer.capabilities:
        if not any(runs_on(target, (major, minor)) for target in answer.targets):
            return Verdict.FAILS, (
                f"no code for sm_{major}{minor} in this build, only for "
                f"{_foreign(listed(answer.targets))}; install another one"
            )
    return (Verdict.FITS if reserved else Verdict.UNRESERVED), ""


def _how_it_ended(answer: FrameworkAnswer) -> str:
    if answer.code is None:
        how = f"no answer within {answer.limit_s:g} s"
    elif answer.code < 0:
        how = f"crashed ({signal.strsignal(-answer.code)})"
    else:
        how = f"ended with exit code {answer.code}"
    last_words = f": {_foreign(answer.stderr)}" if answer.stderr else ""
    return f"{how} while {answer.doing}{last_words}"


def _why_none(answer: FrameworkAnswer, place: Expectation) -> str:
    """Return the likeliest cause of seeing no device; of several, the one to fix first."""
    driver = place.driver
    is_imported = answer.version is not None
    error = _foreign(driver.error or "")
    failure = error if answer is driver else "the CUDA driver does not start"
    if is_imported and answer.build is None:
        return "a CPU build; install the one for CUDA"
    if driver.version is None:
        return failure
    if is_imported and answer.visible != place.visible:
        return _at_import(answer)
    if driver.driver_code == NO_DEVICE and place.visible is not None:
        if not place.visible.strip():
            return "CUDA_VISIBLE_DEVICES is empty"
        if not names.visible(names.entries(place.visible), (*place.reserved, *place.known)):
            return f"CUDA_VISIBLE_DEVICES={sanitize(place.visible)!r} names no device here"
    if driver.error:
        return failure
    if _major(driver.version) < _major(answer.build):
        return (
            f"the driver is too old: it knows CUDA {driver.version}, "
            f"this build is for {sanitize(answer.build or '', 20)}"
        )
    return _foreign(answer.error or answer.stderr or "it gives no reason")


def _why_other(answer: FrameworkAnswer, reserved: Sequence[str], place: Expectation) -> str:
    if answer.visible != place.visible:
        return _at_import(answer)
    if place.expected is not None and place.visible != place.expected:
        now = "unset" if place.visible is None else f"set to {sanitize(place.visible)!r}"
        return f"CUDA_VISIBLE_DEVICES was {now} after the reservation; reserve again"
    devices = answer.devices or ()
    if len(devices) == len(reserved) and {*devices} == {*reserved}:
        return "the reserved ones in another order"
    if {*devices} & {*reserved} and len(devices) < len(reserved):
        return "not all that are reserved"
    return ""


def _at_import(answer: FrameworkAnswer) -> str:
    if answer.visible is None:
        return "importing it unsets CUDA_VISIBLE_DEVICES"
    return f"importing it sets CUDA_VISIBLE_DEVICES to {sanitize(answer.visible)!r}"


def _foreign(text: str) -> str:
    return sanitize(text.strip(), TEXT_LIMIT)


def _major(version: str | None) -> int:
    first = (version or "").partition(".")[0]
    return int(first) if first.isdecimal() and len(first) < 5 else 0
