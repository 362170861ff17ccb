"""The order of tickets in the queue, and the wait for a change of the lock directory."""

from __future__ import annotations

import pytest

from reserve_gpu.locks.queue import wait_for_news
from reserve_gpu.model.holders import Holder
from reserve_gpu.model.queue import Ticket, in_order
from reserve_gpu.model.requests import TicketAhead


def ticket(number: int, *ahead: int) -> Ticket:
    """Return a ticket that lists the tickets with these numbers as ahead of it."""
    listed = (TicketAhead(f"{each}", each) for each in ahead)
    return Ticket(number, f"{number}", None, Holder(), tickets_ahead="\n".join(map(str, listed)))


@pytest.mark.parametrize(
    ("tickets", "order"),
    [
        pytest.param([ticket(3), ticket(1), ticket(2)], [1, 2, 3], id="no lists"),
        pytest.param([ticket(1, 2), ticket(2, 3), ticket(3)], [3, 2, 1], id="chain of lists"),
        pytest.param([ticket(1, 2), ticket(2, 1), ticket(3, 1, 2)], [1, 2, 3], id="cycle"),
        pytest.param([ticket(1, 1, 9), ticket(2)], [1, 2], id="lists itself and an old ticket"),
    ],
)
def test_a_ticket_follows_the_tickets_that_it_lists(
    tickets: list[Ticket], order: list[int]
) -> None:
    """A ticket follows the tickets that it lists; otherwise the numbers decide."""
    assert [each.number for each in in_order(tickets)] == order


def test_a_wait_whose_time_has_passed_can_be_interrupted() -> None:
    """A wait calls `between` at least once, because each attempt can take longer than the wait."""

    def interrupt() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        wait_for_news(0.0, lambda: False, interrupt)
