"""Decide whether a framework sees exactly the reserved devices, based on its probe's results.

All functions are pure.
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
from reserve_gpu.render import notices
from reserve_gpu.render.phrases import listed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reserve_gpu.model.devices import Device

# Values from cuda.h: CUDA_ERROR_NO_DEVICE and CUDA_ERROR_SYSTEM_NOT_READY
NO_DEVICE, NOT_READY = 100, 802
TEXT_LIMIT = 200  # maximum length of a framework's message, in characters

# Advice for errors returned by cuInit; docs/frameworks.md lists the sources. Each command is on
# its own line.
REMEDIES: dict[int, str] = {
    MISSING: "The CUDA library of the NVIDIA driver was not found. In a container, set "
    "NVIDIA_DRIVER_CAPABILITIES=compute,utility. On Debian, install the libcuda1 package.",
    # CUDA_ERROR_STUB_LIBRARY
    34: "This libcuda.so.1 is the CUDA toolkit's stub, which is only for linking. Remove its "
    "folder (.../stubs) from LD_LIBRARY_PATH.",
    # CUDA_ERROR_DEVICE_UNAVAILABLE
    46: "A GPU in exclusive mode admits one process at a time, and a prohibited GPU admits none. "
    "To see the mode of each GPU:\nnvidia-smi --query-gpu=index,compute_mode --format=csv",
    NO_DEVICE: "CUDA can't open any GPU. In a container, start it with GPUs (docker run --gpus "
    "all). Otherwise, check the output of nvidia-smi and the permissions of the device files:\n"
    "ls -l /dev/nvidia*",
    NOT_READY: "A machine with NVSwitch (HGX, DGX) needs a running Fabric Manager of the same "
    "version as the driver. Ask the administrator to check it:\n"
    "systemctl status nvidia-fabricmanager",
    # CUDA_ERROR_SYSTEM_DRIVER_MISMATCH
    803: "libcuda.so.1 and the kernel module have different driver versions. After a driver "
    "update, the administrator can reload the module or reboot once all programs that use a GPU "
    "have ended. A container must not contain its own driver.",
    # CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE
    804: "libcuda.so.1 is newer than the kernel module. Not every GPU supports this. Remove "
    "cuda-compat from LD_LIBRARY_PATH. After a driver update, the administrator can reload the "
    "module or reboot once all programs that use a GPU have ended.",
    # CUDA_ERROR_UNKNOWN
    999: "A container needs /dev/nvidia-uvm. After the machine has been suspended, the "
    "administrator can reload the nvidia_uvm module once all programs that use a GPU have ended:\n"
    "sudo modprobe -r nvidia_uvm && sudo modprobe nvidia_uvm",
}

# GPUs in confidential-computing mode refuse CUDA until they are ready
# (https://github.com/NVIDIA/nvtrust/issues/39, https://github.com/google/go-tpm-tools/pull/542).
SET_READY = "nvidia-smi conf-compute -srs 1"
AWAITS_READY_STATE = (
    "Confidential computing is on, and the GPUs do not accept work yet. If your site attests its "
    f"GPUs, that comes first. Then ask the administrator to run:\n{SET_READY}"
)
MAY_AWAIT_READY_STATE = (
    f"If confidential computing is on, ask the administrator to make the GPUs ready:\n{SET_READY}"
)


class Verdict(Enum):
    """The outcome of checking one framework."""

    FITS = "fits"
    UNRESERVED = "unreserved"  # the framework works, but no device is reserved
    OTHER = "other devices"
    NONE = "no device"
    FAILS = "fails"
    ABSENT = "not installed"


class FrameworkAnswer(NamedTuple):
    """The result of probing one framework; see `probes.probe`.

    Attributes:
        version: The framework's version; None if the framework could not be imported.
        build: The CUDA version that the framework was built for; empty if unknown, None for a CPU
            build.
        visible: The value of CUDA_VISIBLE_DEVICES after the import.
        doing: The last step that the probe started, as a phrase for messages.
        devices: The UUIDs, without the `GPU-` prefix, of the devices that the framework sees. A
            device that the driver does not list is None. The whole field is None if the probe did
            not get this far.
        targets: The architectures that the framework was compiled for, such as `sm_90` and
            `compute_90`; empty if the framework does not list them.
        capabilities: The compute capability of each device, such as [9, 0].
        error: The error message; None if there was no error.
        driver_code: The CUresult of a failed driver call; None if no call failed.
        is_done: Whether the probe finished.
        stderr: The last line that the probe wrote to stderr.
        code: The probe's exit code, or the negated number of the signal that killed it. None if
            the probe was stopped after the timeout.
        limit_s: The timeout in seconds.
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
    """The values that a framework's result is checked against.

    Attributes:
        reserved: The reserved devices, in CUDA order; empty without a reservation.
        known: All devices on this machine.
        visible: The current value of CUDA_VISIBLE_DEVICES.
        expected: The value that the reservation gave CUDA_VISIBLE_DEVICES; None if it is unknown.
        driver: The result of probing the driver itself.
        awaits_ready_state: Whether confidential computing is on and the GPUs are not ready. None if
            this is unknown; it is read only if CUDA is not ready.
    """

    reserved: tuple[Device, ...] = ()
    known: tuple[Device, ...] = ()
    visible: str | None = None
    expected: str | None = None
    driver: FrameworkAnswer = FrameworkAnswer()
    awaits_ready_state: bool | None = None

    def identify(self, uuid: str | None) -> tuple[str, str | None]:
        """Return a device's label and NVML UUID, given its CUDA UUID."""
        for device in (*self.reserved, *self.known):
            if cuda_uuid(device) == uuid:
                return device.label, device.uuid
        return uuid or "?", uuid


class Finding(NamedTuple):
    """One framework's row in a check.

    Attributes:
        name: The framework's name.
        verdict: The outcome of the check.
        version: The framework's version.
        build: The CUDA version that the framework was built for; empty if unknown, None for a CPU
            build.
        sees: The label and UUID of each device that the framework sees. An unknown UUID is None.
        reason: The reason for a bad verdict; otherwise empty.
        remedy: Advice about a CUDA driver error.
        cap: The variable that limits the framework's memory, as `NAME=VALUE`.
        to_type: A line of Python that limits the framework's memory, if no variable does.
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
        """Return whether the framework needs no attention."""
        return self.verdict in (Verdict.FITS, Verdict.UNRESERVED, Verdict.ABSENT)


def evaluate(name: str, answer: FrameworkAnswer, expectation: Expectation) -> Finding:
    """Evaluate the result of probing one framework.

    Args:
        name: The framework's name.
        answer: The probe's result.
        expectation: The values to check the result against.
    """
    verdict, reason = _verdict(answer, expectation)
    is_cause = answer is expectation.driver and reason == _sanitized(answer.error or "")
    return Finding(
        name,
        verdict,
        version=answer.version and sanitize(answer.version, 40),
        build=None if answer.build is None else sanitize(answer.build, 20),
        sees=tuple(map(expectation.identify, answer.devices or ())),
        reason=reason,
        remedy=_remedy(answer.driver_code, awaits_ready_state=expectation.awaits_ready_state)
        if is_cause
        else None,
    )


def with_early_count(finding: Finding, count: int | None, reserved: Sequence[Device]) -> Finding:
    """Return the finding, changed if this process keeps a different number of devices.

    Args:
        finding: The result for PyTorch in a child process, which counts the devices again.
        count: The number of devices that PyTorch counted in this process; None if it has not
            counted, or counts again.
        reserved: The reserved devices.
    """
    if finding.verdict is not Verdict.FITS or count in (None, len(reserved)):
        return finding
    return finding._replace(
        verdict=Verdict.OTHER,
        reason=f"{notices.cause_of_early_count(count)} in this process",
        remedy=notices.COUNT_AGAIN,
    )


def cuda_uuid(device: Device) -> str:
    """Return the UUID that CUDA uses for a device, without the `GPU-` prefix.

    Before driver 470, a MIG instance's UUID starts with `MIG-GPU-`, and CUDA uses the UUID of the
    instance's GPU instead.
    """
    is_old_instance = device.uuid.startswith("MIG-GPU-")
    return names.bare_uuid((is_old_instance and device.gpu_uuid) or device.uuid)


def runs_on(target: str, capability: tuple[int, int]) -> bool:
    """Return whether code compiled for a target runs on a GPU with the given compute capability.

    Machine code (`sm_86`) runs on GPUs with the same major version and the same or a higher minor
    version. The driver compiles PTX code (`compute_86`) for GPUs with the same or any higher
    version. The suffix `a` restricts code to exactly its version, and `f` restricts it to its
    family. Code for an unknown target is assumed to run.

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


def parse_answer(out: bytes, err: bytes, code: int | None, limit_s: float) -> FrameworkAnswer:
    """Parse the output of a probe.

    Args:
        out: The probe's stdout. Its lines of JSON are merged.
        err: The probe's stderr.
        code: The probe's exit code; None if the probe did not finish in time.
        limit_s: The timeout in seconds.
    """
    merged: dict[str, Any] = {}
    for line in out.splitlines():
        with suppress(ValueError):
            results = untrusted.parsed(line)
            merged |= results if isinstance(results, dict) else {}
    fields = {name: value for name, value in merged.items() if name in FrameworkAnswer._fields}
    lines = [line for line in err.decode("utf-8", "replace").splitlines() if line.strip()]
    return FrameworkAnswer(**fields, stderr=lines[-1] if lines else "", code=code, limit_s=limit_s)


def _verdict(answer: FrameworkAnswer, expectation: Expectation) -> tuple[Verdict, str]:
    """Return the verdict and the reason for it."""
    if not answer.is_done:
        return Verdict.FAILS, _failure(answer)
    if answer.error and answer.version is None and answer is not expectation.driver:
        return Verdict.FAILS, _sanitized(answer.error)
    if not answer.devices:
        return Verdict.NONE, _why_none(answer, expectation)
    reserved = [cuda_uuid(device) for device in expectation.reserved]
    if answer.devices != (reserved or expectation.driver.devices):
        return Verdict.OTHER, _why_other(answer, reserved, expectation)
    for major, minor in answer.capabilities:
        if not any(runs_on(target, (major, minor)) for target in answer.targets):
            return Verdict.FAILS, (
                f"no code for sm_{major}{minor} in this build, only for "
                f"{_sanitized(listed(answer.targets))}; install another build"
            )
    return (Verdict.FITS if reserved else Verdict.UNRESERVED), ""


def _remedy(code: int | None, *, awaits_ready_state: bool | None) -> str | None:
    """Return advice about an error of cuInit, with the likely cause first."""
    advice = REMEDIES.get(code or 0)
    if advice is None or code != NOT_READY or awaits_ready_state is False:
        return advice
    if awaits_ready_state:
        return f"{AWAITS_READY_STATE}\n{advice}"
    return f"{advice}\n{MAY_AWAIT_READY_STATE}"


def _failure(answer: FrameworkAnswer) -> str:
    if answer.code is None:
        how = f"no answer within {answer.limit_s:g} s"
    elif answer.code < 0:
        how = f"crashed ({signal.strsignal(-answer.code)})"
    else:
        how = f"ended with exit code {answer.code}"
    last_line = f": {_sanitized(answer.stderr)}" if answer.stderr else ""
    return f"{how} while {answer.doing}{last_line}"


def _why_none(answer: FrameworkAnswer, expectation: Expectation) -> str:
    """Return the most likely reason that the framework sees no device.

    If there are several reasons, return the one that the user should fix first.
    """
    driver = expectation.driver
    is_imported = answer.version is not None
    error = _sanitized(driver.error or "")
    failure = error if answer is driver else "the CUDA driver does not start"
    if is_imported and answer.build is None:
        return "a CPU build; install the CUDA build"
    if driver.version is None:
        return failure
    if is_imported and answer.visible != expectation.visible:
        return _at_import(answer)
    if driver.driver_code == NO_DEVICE and expectation.visible is not None:
        if not expectation.visible.strip():
            return "CUDA_VISIBLE_DEVICES is empty"
        if not names.visible(
            names.entries(expectation.visible), (*expectation.reserved, *expectation.known)
        ):
            return f"CUDA_VISIBLE_DEVICES={sanitize(expectation.visible)!r} matches no device here"
    if driver.error:
        return failure
    if _major(driver.version) < _major(answer.build):
        return (
            f"the driver is too old: it supports CUDA {driver.version}, "
            f"but this build needs {sanitize(answer.build or '', 20)}"
        )
    return _sanitized(answer.error or answer.stderr or "no reason given")


def _why_other(answer: FrameworkAnswer, reserved: Sequence[str], expectation: Expectation) -> str:
    if answer.visible != expectation.visible:
        return _at_import(answer)
    if expectation.expected is not None and expectation.visible != expectation.expected:
        change = (
            "unset" if expectation.visible is None else f"set to {sanitize(expectation.visible)!r}"
        )
        return f"CUDA_VISIBLE_DEVICES was {change} after the reservation; reserve again"
    devices = answer.devices or ()
    if len(devices) == len(reserved) and {*devices} == {*reserved}:
        return "the reserved devices in another order"
    if {*devices} & {*reserved} and len(devices) < len(reserved):
        return "not all reserved devices"
    return ""


def _at_import(answer: FrameworkAnswer) -> str:
    if answer.visible is None:
        return "importing it unsets CUDA_VISIBLE_DEVICES"
    return f"importing it sets CUDA_VISIBLE_DEVICES to {sanitize(answer.visible)!r}"


def _sanitized(text: str) -> str:
    return sanitize(text.strip(), TEXT_LIMIT)


def _major(version: str | None) -> int:
    first = (version or "").partition(".")[0]
    return int(first) if first.isdecimal() and len(first) < 5 else 0
