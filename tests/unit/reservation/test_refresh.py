"""The new state of a reservation after the driver's device numbers changed, as a table."""

from __future__ import annotations

import pytest

from reserve_gpu.gpus.bindings import DeviceError
from reserve_gpu.model.devices import Device
from reserve_gpu.render import notices as notice
from reserve_gpu.reservation.refresh import compare

GPU0, GPU1 = Device(0, "GPU-aaaa"), Device(1, "GPU-bbbb")
GPU2 = GPU1._replace(index=2)
LOSS = DeviceError("GPU is lost", 15)
FAILURE = DeviceError("Unknown Error", 999)


@pytest.mark.parametrize(
    ("found", "seen", "is_late", "devices", "notices"),
    [
        (GPU1, [], False, (GPU1,), []),
        (GPU2, [], False, (GPU2,), [notice.renumbered(GPU1, GPU2, is_late=False)]),
        (GPU2, ["bbbb"], True, (GPU2,), [notice.renumbered(GPU1, GPU2, is_late=False)]),
        (GPU2, ["aaaa"], True, (GPU2,), [notice.renumbered(GPU1, GPU2, is_late=True)]),
        (LOSS, [], False, (), [notice.lost_device(GPU1, "GPU is lost", is_late=False)]),
        (LOSS, ["bbbb"], True, (GPU1,), [notice.lost_device(GPU1, "GPU is lost", is_late=True)]),
        (FAILURE, [], False, (GPU1,), [notice.unusable(GPU1, "Unknown Error", is_late=False)]),
    ],
)
def test_a_device_is_renumbered_lost_or_kept(
    found: Device | DeviceError,
    seen: list[str],
    is_late: bool,  # noqa: FBT001 - a column of the table
    devices: tuple[Device, ...],
    notices: list[str],
) -> None:
    """A lost device is released unless CUDA runs on it, and one that can't be read is kept."""
    change = compare([GPU1], {GPU1: found}, seen, is_late=is_late)
    assert (change.devices, change.notices) == (devices, notices)
