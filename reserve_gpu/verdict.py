"""What a framework's answer comes to: does it see exactly the devices that were reserved?

Pure functions of plain values.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

from reserve_gpu.device import Device, Value
from reserve_gpu.text import shown

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

EXPECTED = 328350.0  # 0^2 + 1^2 + ... + 99^2, what probes.py lets a device compute
FITS, UNRESERVED, OTHER = "fits", "unreserved", "other devices"
NONE, FAILS, ABSENT = "no device", "fails", "not installed"
NO_DEVICE = "cuInit answers 100 "  # CUDA_ERROR_NO_DEVICE (cuda.h)
TEXT_LIMIT = 200  # characters of what a framework says


class Seen(Value):
    """One device that a framework sees.

    uuid, bus_id: what the driver in the framework's process says of it, the UUID without `GPU-`.
    own: its UUID or PCI bus id, as the framework has it.
    """

    uuid: str | None = None
    bus_id: str | None = None
    own: str | None = None

    @property
    def label(self) -> str:
        """What there is to call it."""
        return shown(next((n for n in (self.own, self.uuid, self.bus_id) if n), "?"), 40)


class Answer(Value):
    """What a framework's process said.

    build: the CUDA version that it is built for, "" for one unnamed, None for none.
    is_imported: it could be imported. devices: None if it did not come so far. results: for each.
    error: what went wrong. doing: what it did at last. stderr: its last line.
    visible: CUDA_VISIBLE_DEVICES after its import.
    is_tried: it was started on the devices; not where others than the reserved are visible.
    code: its exit code, minus a signal; None: it was stopped after limit_s.
    """

    version: str | None = None
    build: str | None = None
    is_imported: bool = False
    visible: str | None = None
    devices: tuple[Seen, ...] | None = None
    results: tuple[float, ...] = ()
    error: str | None = None
    doing: str = "being started"
    is_tried: bool = False
    is_done: bool = False
    stderr: str = ""
    code: int | None = 0
    limit_s: float = 0.0


class Place(Value):
    """What the answers are compared with.

    reserved: the devices of the reservation, in CUDA's order; empty if there is none.
    known: all that there are names for. visible: CUDA_VISIBLE_DEVICES as it is now.
    expected: CUDA_VISIBLE_DEVICES as the reservation set it, None if that is not known.
    driver: the answer of the bare driver.
    """

    reserved: tuple[Device, ...] = ()
    known: tuple[Device, ...] = ()
    visible: str | None = None
    expected: str | None = None
    driver: Answer = Answer()


class Finding(Value):
    """One row: a framework, what it sees, and what that comes to.

    state: fits; unreserved (all is well, but nothing is reserved); other devices; no device; fails;
        not installed. build: as of Answer. sees: labels. reason: why, where it does not fit.
    """

    name: str
    state: str
    version: str | None = None
    build: str | None = None
    sees: tuple[str, ...] = ()
    uuids: tuple[str | None, ...] = ()
    reason: str = ""

    @property
    def is_well(self) -> bool:
        """Nothing has to be done about it."""
        return self.state in (FITS, UNRESERVED, ABSENT)


def absent(name: str) -> Finding:
    """The row of a framework that is not installed."""
    return Finding(name, ABSENT)


def judge(name: str, answer: Answer, place: Place) -> Finding:
    """The row of a framework, from its answer."""
    state, reason = _verdict(answer, place)
    seen = answer.devices or ()
    return Finding(
        name,
        state,
        version=answer.version and shown(answer.version, 40),
        build=None if answer.build is None else shown(answer.build, 20),
        sees=tuple(_label(one, place) for one in seen),
        uuids=tuple(_full_uuid(one, place) for one in seen),
        reason=reason,
    )


def is_same(seen: Seen, device: Device) -> bool:
    """Whether what a framework sees is that device, in every way that it can be told.

    Frameworks may call a MIG instance by its GPU, as drivers did before 470 (`MIG-GPU-...`).
    """
    own = _bare(seen.own)
    if own and own not in (uuids(device) if _is_uuid(own) else {_bus(device.bus_id)}):
        return False
    if seen.uuid:
        is_old_instance = device.uuid.startswith("MIG-GPU-")
        return _bare(seen.uuid) == _bare(device.gpu_uuid if is_old_instance else device.uuid)
    return bool(own) or (bool(seen.bus_id) and _bus(seen.bus_id) == _bus(device.bus_id))


def uuids(device: Device) -> list[str]:
    """The names by which the driver may know the device, without `GPU-`."""
    return [_bare(name) for name in (device.uuid, device.gpu_uuid) if name]


def answer(said: Mapping[str, Any], code: int | None, stderr: str, limit_s: float) -> Answer:
    """The answer in what a child process said: of the right types, whatever it was."""
    devices, results = said.get("devices"), said.get("results")
    return Answer(
        version=_text(said.get("version")),
        build=_text(said.get("build")),
        is_imported=said.get("is_imported") is True,
        visible=_text(said.get("visible")),
        devices=tuple(map(_seen, devices)) if isinstance(devices, list) else None,
        results=tuple(n for n in results if isinstance(n, float | int))
        if isinstance(results, list)
        else (),
        error=_text(said.get("error")),
        doing=_text(said.get("doing")) or "being started",
        is_tried=said.get("is_tried") is True,
        is_done=said.get("is_done") is True,
        stderr=next((line for line in reversed(stderr.splitlines()) if line.strip()), ""),
        code=code,
        limit_s=limit_s,
    )


def _verdict(answer: Answer, place: Place) -> tuple[str, str]:
    """The state, and the reason for it."""
    if not answer.is_done:
        return FAILS, _how_it_ended(answer)
    if answer.error and not answer.is_imported and answer is not place.driver:
        return FAILS, _said(answer.error)
    if not answer.devices:
        return NONE, _why_none(answer, place)
    if not _is_expected(answer.devices, place):
        return OTHER, _why_other(answer, answer.devices, place)
    if answer.error:
        return FAILS, f"{_said(answer.error)} (while {answer.doing})"
    if not answer.is_tried:
        return UNRESERVED, ""
    if answer.results != (EXPECTED,) * len(answer.devices):
        wrong = next((number for number in answer.results if number != EXPECTED), None)
        return FAILS, f"computes wrongly: {wrong} instead of {EXPECTED}"
    return FITS, ""


def _is_expected(devices: Sequence[Seen], place: Place) -> bool:
    """Whether these are the reserved devices in their order; without any, what the driver shows."""
    if place.reserved:
        return len(devices) == len(place.reserved) and all(
            is_same(seen, device) for seen, device in zip(devices, place.reserved, strict=True)
        )
    shown_by_driver = place.driver.devices or ()
    return len(devices) == len(shown_by_driver) and all(
        is_same(seen, Device(0, other.uuid or "", bus_id=other.bus_id))
        for seen, other in zip(devices, shown_by_driver, strict=True)
    )


def is_known(seen: Seen, place: Place) -> bool:
    """Whether there is a name for it."""
    return any(is_same(seen, device) for device in (*place.reserved, *place.known))


def _how_it_ended(answer: Answer) -> str:
    if answer.code is None:
        how = f"no answer within {answer.limit_s:g} s while {answer.doing}"
    elif answer.code < 0:
        how = f"crashed ({_signal_name(-answer.code)}) while {answer.doing}"
    else:
        how = f"ended with exit code {answer.code} while {answer.doing}"
    return f"{how}: {_said(answer.stderr)}" if answer.stderr else how


def _why_none(answer: Answer, place: Place) -> str:
    """The likeliest cause of seeing no device, what has to be mended first."""
    is_driver = answer is place.driver
    if answer.build is None and answer.is_imported:
        return "a CPU build; install the one for CUDA"
    if not place.driver.is_imported:
        return _said(answer.error or "") if is_driver else "no NVIDIA driver can be used here"
    if answer.is_imported and answer.visible != place.visible:
        return _at_import(answer)
    trouble = place.driver.error
    if trouble and place.visible is not None and NO_DEVICE in trouble:
        if not place.visible.strip():
            return "CUDA_VISIBLE_DEVICES is empty"
        return f"CUDA_VISIBLE_DEVICES={shown(place.visible)!r} names no device here"
    if trouble:
        return _said(trouble)
    if _major(place.driver.version) < _major(answer.build):
        return (
            f"the driver is too old: it knows CUDA {place.driver.version}, "
            f"this build is for {shown(answer.build or '', 20)}"
        )
    return _said(answer.error or answer.stderr or "it gives no reason")


def _why_other(answer: Answer, devices: Sequence[Seen], place: Place) -> str:
    if answer.visible != place.visible:
        return _at_import(answer)
    if place.expected is not None and place.visible != place.expected:
        now = "unset" if place.visible is None else f"set to {shown(place.visible)!r}"
        return f"CUDA_VISIBLE_DEVICES was {now} since; reserve again"
    reserved = [any(is_same(seen, device) for seen in devices) for device in place.reserved]
    if reserved and all(reserved) and len(devices) == len(reserved):
        return "the reserved ones in another order"
    if any(reserved) and len(devices) < len(reserved):
        return "not all that are reserved"
    return ""


def _at_import(answer: Answer) -> str:
    now = (
        "unsets CUDA_VISIBLE_DEVICES"
        if answer.visible is None
        else f"sets CUDA_VISIBLE_DEVICES to {shown(answer.visible)!r}"
    )
    return f"importing it {now}"


def _label(seen: Seen, place: Place) -> str:
    return next((d.label for d in (*place.reserved, *place.known) if is_same(seen, d)), seen.label)


def _full_uuid(seen: Seen, place: Place) -> str | None:
    known = next((d.uuid for d in (*place.reserved, *place.known) if is_same(seen, d)), None)
    return known or (shown(seen.uuid) if seen.uuid else None)


def _seen(said: Any) -> Seen:
    if not isinstance(said, dict):
        return Seen()
    return Seen(_text(said.get("uuid")), _text(said.get("bus_id")), _text(said.get("own")))


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _said(text: str) -> str:
    return shown(text.strip(), TEXT_LIMIT)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _major(version: str | None) -> int:
    first = (version or "").partition(".")[0]
    return int(first) if first.isdecimal() and len(first) < 5 else 0


def _bare(name: str | None) -> str:
    """A UUID without what stands before it, a PCI bus id with four digits of domain."""
    text = (name or "").strip().lower()
    if _is_uuid(text):
        return text.removeprefix("mig-").removeprefix("gpu-")
    return _bus(text)


def _is_uuid(text: str) -> bool:
    return "-" in text


def _bus(bus_id: str | None) -> str:
    """`0000:03:00.0`, of a bus id that may have eight digits of domain, or none."""
    parts = (bus_id or "").strip().lower().split(":")
    return ":".join([parts[0][-4:].zfill(4), *parts[1:]]) if len(parts) == 3 else ":".join(parts)
