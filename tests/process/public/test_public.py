"""The functions for other programs, such as the JupyterLab extension."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import reserve_gpu
from reserve_gpu import public
from reserve_gpu.render.html import OWN_ROW

if TYPE_CHECKING:
    from tests.support.here import Here


def test_rows_of_the_user_are_marked(here: Here) -> None:
    """The table marks the GPUs of all processes of this user, and suggests commands for a cell."""
    with here.child() as child:
        assert not child.reserve("1").error
        status = reserve_gpu.status()
        html = public.html(status)
    assert (html.count(OWN_ROW), status._repr_html_().count(OWN_ROW)) == (1, 0)
    assert html.index(OWN_ROW) > html.index(">free<")  # of the first device
    assert ">%reserve_gpu<" in html


def test_release_ends_one_reservation(here: Here) -> None:
    """Only a reservation with the given start time is released.

    A script can't release its GPU on request, so it has to be ended.
    """
    with here.child() as child:
        assert not child.reserve().error
        ((holder,),) = (row.holders for row in reserve_gpu.status().rows if row.holders)
        assert holder.since
        assert public.release(child.pid, since=holder.since - 1) is None
        is_done, text = public.release(child.pid, since=holder.since) or (None, "")
        assert is_done is False
        assert "GPU0" in text
        assert child.process.poll() is None
        is_done, _ = public.release(child.pid, is_end=True) or (None, "")
        assert is_done
        child.process.wait()


def test_reservations_are_known_without_a_driver(here: Here) -> None:
    """If the driver fails, the reservations are read from the lock files."""
    with here.child() as child:
        assert not child.reserve("1").error
        here.write("fail nvmlInitWithFlags * 9\n")
        with pytest.raises(reserve_gpu.DriverError):
            reserve_gpu.status()
        (row,) = public.status_without_driver().rows
        assert (row.label, [holder.pid for holder in row.holders]) == ("GPU1", [child.pid])
