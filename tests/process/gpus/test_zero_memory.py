"""Tests of processes that the driver lists with 0 MiB, in containers and after a restart.

https://github.com/llm-d-incubation/llm-d-rl-time-slicing/issues/148
https://github.com/pytorch/pytorch/issues/54564
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.support.platforms import CONTAINER, behind, on_a_host

if TYPE_CHECKING:
    from tests.support.here import Here

pytestmark = on_a_host

IS_USED_BY_CHILD = """
from reserve_gpu.reservation import activity
from reserve_gpu.reservation.session import session
activity.by_child(session().held)
"""


def test_a_context_without_memory_in_a_container(here: Here) -> None:
    """In a container, any process keeps a GPU in use, even one that is listed with 0 MiB."""
    with behind(here, *CONTAINER) as child:
        assert child.reserve("0").value == "0"
        assert child.run(IS_USED_BY_CHILD).value is False
        here.write("gpu\n compute 5000001 0\ngpu")
        assert child.run(IS_USED_BY_CHILD).value is True
