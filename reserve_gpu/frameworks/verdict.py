"""What a framework's answer comes to: does it see exactly the devices that were reserved?

Pure functions of plain values.
"""

from __future__ import annotations

import signal
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from reserve_gpu.errors import shown
from reserve_gpu.frameworks.probes import EXPECTED
from reserve_gpu.model import Device

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE (cuda.h)
TEXT_LIMIT = 200  # characters of what a framework says
STARTING = "being started"


class Verdict(Enum):
    """What an answer comes to, in a word."""

    FITS = "fits"
    UNRESERVED = "unreserved"  # all is well, but nothing is reserved
    OTHER = "other devices"
    NONE = "no device"
    FAILS = "fails"
    ABSENT = "not installed"


class Seen(NamedTuple):
    """One device that a framework sees.

    uuid, bus_id: what the driver in the framework's process says of it, the UUID without `GPU-`.
    own_uuid, own_bus_id: what the framework itself says of it.
    """

    uuid: str | None = None
    bus_id: str | None = None
    own_uuid: str | None = None
    own_bus_id: str | None = None

    @property
    def label(self) -> str:
        """What there is to call it."""
        return shown(self.own_uuid or self.own_bus_id or self.uuid or self.bus_id or "?", 40)


class Answer(NamedTuple):
    """What a framework's process said.

    build: the CUDA version that it is built for, "" for one unnamed, None for none.
    is_imported: it could be imported. visible: CUDA_VISIBLE_DEVICES after its import.
    devices: None if it did not come so far. results: what each device computed.
    error: what went wrong. driver_code: the CUresult of the call that failed, if it was one.
    doing: what it did last. stderr: the last line of its output.
    is_tried: it was started on the devices; not where others than the reserved are visible.
    code: its exit code, or minus the signal that ended it; None: it was stopped after limit_s.
    """

    version: str | None = None
    build: str | None = None
    is_imported: bool = False
    visible: str | None = None
    devices: tuple[Seen, ...] | None = None
    results: tuple[float, ...] = ()
    error: str | None = None
    driver_code: int | None = None
    doing: str = STARTING
    is_tried: bool = False
    is_done: bool = False
    stderr: str = ""
    code: int | None = 0
    limit_s: float = 0.0


class Place(NamedTuple):
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
    driver: Answer = Answer()

    def device(self, seen: Seen) -> Device | None:
        """The device that was seen, if it is one of those that we have labels for."""
        return next((d for d in (*self.reserved, *self.known) if is_same(seen, d)), None)


class Finding(NamedTuple):
    """One row: a framework, what it sees, and what that comes to.

    build: as of Answer. sees: labels. uuids: for each of them, None where it is not known.
    reason: why, where it does not fit.
    """

    name: str
    verdict: Verdict
    version: str | None = None
    build: str | None = None
    sees: tuple[str, ...] = ()
    uuids: tuple[str | None, ...] = ()
    reason: str = ""

    @property
    def is_well(self) -> bool:
        """Nothing has to be done about it."""
        return self.verdict in (Verdict.FITS, Verdict.UNRESERVED, Verdict.ABSENT)


def absent(name: str) -> Finding:
    """The row of a framework that is not installed."""
    return Finding(name, Verdict.ABSENT)


def judge(name: str, answer: Answer, place: Place) -> Finding:
    """The row of a framework, from its answer."""
    verdict, reason = _verdict(answer, place)
    seen = [(device, place.device(device)) for device in answer.devices or ()]
    return Finding(
        name,
        verdict,
        version=answer.version and shown(answer.version, 40),
        build=None if answer.build is None else shown(answer.build, 20),
        sees=tuple(known.label if known else device.label for device, known in seen),
        uuids=tuple(known.uuid if known else _shown_uuid(device) for device, known in seen),
        reason=reason,
    )


def is_same(seen: Seen, device: Device) -> bool:
    """Whether what a framework sees is that device, in every way that can be compared.

    A framework may give a MIG instance the UUID of its GPU, and so do drivers before 470, where
    the instance itself is called `MIG-GPU-...`.
    """
    if seen.own_uuid and _bare(seen.own_uuid) not in uuids(device):
        return False
    if seen.own_bus_id and _bus(seen.own_bus_id) != _bus(device.bus_id):
        return False
    if seen.uuid:
        is_old_instance = device.uuid.startswith("MIG-GPU-")
        return _bare(seen.uuid) == _bare(device.gpu_uuid if is_old_instance else device.uuid)
    if seen.own_uuid or seen.own_bus_id:
        return True
    return bool(seen.bus_id) and _bus(seen.bus_id) == _bus(device.bus_id)


def uuids(device: Device) -> list[str]:
    """The UUIDs by which the driver may know the device, without `GPU-`."""
    return [_bare(uuid) for uuid in (device.uuid, device.gpu_uuid) if uuid]


def answer(news: Mapping[str, Any], code: int | None, stderr: str, limit_s: float) -> Answer:
    """The answer of a child process, with what is not of the right type left out.

    news: what it wrote. code: as of Answer. stderr: the end of its output.
    """
    devices, results, driver_code = (news.get(k) for k in ("devices", "results", "driver_code"))
    return Answer(
        version=_text(news.get("version")),
        build=_text(news.get("build")),
        is_imported=news.get("is_imported") is True,
        visible=_text(news.get("visible")),
        devices=tuple(map(_seen, devices)) if isinstance(devices, list) else None,
        results=tuple(n for n in results if isinstance(n, float | int))
        if isinstance(results, list)
        else (),
        error=_text(news.get("error")),
        driver_code=driver_code if isinstance(driver_code, int) else None,
        doing=_text(news.get("doing")) or STARTING,
        is_tried=news.get("is_tried") is True,
        is_done=news.get("is_done") is True,
        stderr=next((line for line in reversed(stderr.splitlines()) if line.strip()), ""),
        code=code,
        limit_s=limit_s,
    )


def _verdict(answer: Answer, place: Place) -> tuple[Verdict, str]:
    """The verdict, and the reason for it."""
    if not answer.is_done:
        return Verdict.FAILS, _how_it_ended(answer)
    if answer.error and not answer.is_imported and answer is not place.driver:
        return Verdict.FAILS, _foreign(answer.error)
    if not answer.devices:
        return Verdict.NONE, _why_none(answer, place)
    if not _is_expected(answer.devices, place):
        return Verdict.OTHER, _why_other(answer, answer.devices, place)
    if answer.error:
        return Verdict.FAILS, f"{_foreign(answer.error)} (while {answer.doing})"
    if not answer.is_tried:
        return Verdict.UNRESERVED, ""
    if answer.results != (EXPECTED,) * len(answer.devices):
        wrong = next((number for number in answer.results if number != EXPECTED), None)
        return Verdict.FAILS, f"computes wrongly: {wrong} instead of {EXPECTED}"
    return Verdict.FITS, ""


def _is_expected(devices: Sequence[Seen], place: Place) -> bool:
    """Whether these are the reserved devices in their order; without any, what the driver shows."""
    expected = place.reserved or [
        Device(0, seen.uuid or "", bus_id=seen.bus_id) for seen in place.driver.devices or ()
    ]
    return len(devices) == len(expected) and all(map(is_same, devices, expected))


def _how_it_ended(answer: Answer) -> str:
    if answer.code is None:
        how = f"no answer within {answer.limit_s:g} s while {answer.doing}"
    elif answer.code < 0:
        how = f"crashed ({_signal_name(-answer.code)}) while {answer.doing}"
    else:
        how = f"ended with exit code {answer.code} while {answer.doing}"
    return f"{how}: {_foreign(answer.stderr)}" if answer.stderr else how


def _why_none(answer: Answer, place: Place) -> str:
    """The likeliest cause of seeing no device; of several, the one to mend first."""
    driver = place.driver
    if answer.build is None and answer.is_imported:
        return "a CPU build; install the one for CUDA"
    if not driver.is_imported:
        is_driver = answer is driver
        return _foreign(answer.error or "") if is_driver else "no NVIDIA driver can be used here"
    if answer.is_imported and answer.visible != place.visible:
        return _at_import(answer)
    if driver.error and place.visible is not None and driver.driver_code == NO_DEVICE:
        if not place.visible.strip():
            return "CUDA_VISIBLE_DEVICES is empty"
        return f"CUDA_VISIBLE_DEVICES={shown(place.visible)!r} names no device here"
    if driver.error:
        return _foreign(driver.error)
    if _major(driver.version) < _major(answer.build):
        return (
            f"the driver is too old: it knows CUDA {driver.version}, "
            f"this build is for {shown(answer.build or '', 20)}"
        )
    return _foreign(answer.error or answer.stderr or "it gives no reason")


def _why_other(answer: Answer, devices: Sequence[Seen], place: Place) -> str:
    if answer.visible != place.visible:
        return _at_import(answer)
    if place.expected is not None and place.visible != place.expected:
        now = "unset" if place.visible is None else f"set to {shown(place.visible)!r}"
        return f"CUDA_VISIBLE_DEVICES was {now} since; reserve again"
    are_seen = [any(is_same(seen, device) for seen in devices) for device in place.reserved]
    if are_seen and all(are_seen) and len(devices) == len(are_seen):
        return "the reserved ones in another order"
    if any(are_seen) and len(devices) < len(are_seen):
        return "not all that are reserved"
    return ""


def _at_import(answer: Answer) -> str:
    if answer.visible is None:
        return "importing it unsets CUDA_VISIBLE_DEVICES"
    return f"importing it sets CUDA_VISIBLE_DEVICES to {shown(answer.visible)!r}"


def _seen(news: Any) -> Seen:
    if not isinstance(news, dict):
        return Seen()
    return Seen(*(_text(news.get(field)) for field in Seen._fields))


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _foreign(text: str) -> str:
    return shown(text.strip(), TEXT_LIMIT)


def _shown_uuid(seen: Seen) -> str | None:
    return shown(seen.uuid) if seen.uuid else None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _major(version: str | None) -> int:
    first = (version or "").partition(".")[0]
    return int(first) if first.isdecimal() and len(first) < 5 else 0


def _bare(uuid: str | None) -> str:
    """A UUID without what stands before it."""
    return (uuid or "").strip().lower().removeprefix("mig-").removeprefix("gpu-")


def _bus(bus_id: str | None) -> str:
    """`0000:03:00.0`, of a bus id that may have eight digits of domain, or none."""
    parts = (bus_id or "").strip().lower().split(":")
    return ":".join([parts[0][-4:].zfill(4), *parts[1:]]) if len(parts) == 3 else ":".join(parts)
