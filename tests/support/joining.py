"""Processes that join the reservation of another process of the same user."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from tests.support.processes import US

if TYPE_CHECKING:
    from collections.abc import Iterator
    from subprocess import CompletedProcess

    from tests.support.machine import Child, Machine

# Code for a child, which joins the reservation with this name.
JOIN = (
    "from reserve_gpu.commands.reservations import join\n"
    "from reserve_gpu import api\n"
    "api.join(join.find_reservation([{}]))"
)
SESSION = "from reserve_gpu.reservation.session import session\n"


def join(machine: Machine, *words: str, **extra: str) -> CompletedProcess[str]:
    """Run `reserve-gpu join` with these words."""
    return machine.command(*US, "join", *words, **extra)


@contextmanager
def guest(machine: Machine, which: str = "") -> Iterator[Child]:
    """Run a process that has joined the user's only reservation, or the one with this name."""
    with machine.child() as child:
        answer = child.run(JOIN.format(which))
        assert answer.error is None, answer.text
        yield child


@contextmanager
def guest_of(machine: Machine, holder: Child, wish: str = "") -> Iterator[Child]:
    """Let the holder reserve, and run a process that has joined this reservation."""
    assert holder.reserve(wish).error is None
    with guest(machine) as child:
        yield child
