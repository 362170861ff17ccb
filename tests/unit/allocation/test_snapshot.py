"""A reserved device is unused if no process and no memory shows its use."""

from __future__ import annotations

import pytest

from reserve_gpu.allocation import snapshot
from reserve_gpu.model.devices import Process, Usage

EMPTY = Usage(compute=0, mps=0, total_mib=40960, used_mib=0)
COMPUTED_ON = EMPTY._replace(compute=1, used_mib=3500)
IN_CONTAINER = EMPTY._replace(sees_all=False)
HOLDER = Process(4321000, 100, has_reserved=True)
STRANGER = Process(17, 100, has_reserved=False)
UNKNOWN = Process(17, 100)


@pytest.mark.parametrize(
    ("reading", "processes", "expected"),
    [
        (EMPTY, [], True),
        (COMPUTED_ON, [HOLDER], False),
        (COMPUTED_ON, [STRANGER], True),
        (COMPUTED_ON, [UNKNOWN], None),
        (COMPUTED_ON, [], None),  # the process can't be listed
        (EMPTY._replace(mps=1), [], None),
        (EMPTY._replace(compute=None), [], True),
        (IN_CONTAINER._replace(used_mib=63), [], True),
        (IN_CONTAINER._replace(used_mib=64), [], None),
        (IN_CONTAINER._replace(reserve_known=False), [], None),
        (IN_CONTAINER._replace(compute=1), [], None),
        (IN_CONTAINER._replace(used_mib=None), [], None),
    ],
)
def test_unused_device(reading: Usage, processes: list[Process], *, expected: bool | None) -> None:
    """In a container, where processes may be invisible, only the memory counts."""
    assert snapshot.is_unused(reading, processes) is expected
