"""What other programs may import: the extension for JupyterLab builds on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import reserve_gpu
from reserve_gpu import public
from reserve_gpu.render.html import OWN_ROW

if TYPE_CHECKING:
    from tests.support.here import Here


def test_what_a_user_has_is_marked(here: Here) -> None:
    """The picture marks what any process of this user has, and says what to type in a cell."""
    with here.child() as child:
        assert not child.reserve("1").error
        status = reserve_gpu.status()
        html = public.html(status)
    assert (html.count(OWN_ROW), status._repr_html_().count(OWN_ROW)) == (1, 0)
    assert html.index(OWN_ROW) > html.index(">free<")  # of the first device
    assert "This kernel has" not in html
    assert ">%reserve_gpu<" in html


def test_release_means_one_reservation(here: Here) -> None:
    """Only the reservation that began at that moment is released, and a process is ended on wish.

    A script can't be asked, so that only its end frees what it has.
    """
    with here.child() as child:
        assert not child.reserve().error
        ((holder,),) = (row.holders for row in reserve_gpu.status().rows if row.holders)
        assert holder.since
        assert public.release(child.pid, since=holder.since - 1) is None
        is_done, text = public.release(child.pid, since=holder.since) or (None, "")
        assert (is_done, "can't release GPU0 on request, only by ending" in text) == (False, True)
        is_done, text = public.release(child.pid, is_end=True) or (None, "")
        assert (is_done, text[:6]) == (True, "Ended ")


def test_reservations_are_known_without_a_driver(here: Here) -> None:
    """Where the driver does not answer, what is reserved can still be had, by the lock files."""
    with here.child() as child:
        assert not child.reserve("1").error
        here.write("fail nvmlInitWithFlags * 9\n")
        with pytest.raises(reserve_gpu.DriverError):
            reserve_gpu.status()
        (row,) = public.status_without_driver().rows
        assert (row.label, [holder.pid for holder in row.holders]) == ("GPU1", [child.pid])
