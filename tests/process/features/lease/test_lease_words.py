"""Until when somebody holds a GPU: what others read of it, and what it makes likeliest."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

from reserve_gpu.render import durations

if TYPE_CHECKING:
    from tests.support.here import Here


HOUR_S, DAY_S = 3600.0, 86400.0
# A Friday, at noon where the tests run.
NOW = time.mktime((2026, 11, 20, 12, 0, 0, 0, 0, -1))


def test_a_real_wait_names_the_right_one(here: Here) -> None:
    """Of two real holders who have said until when, a real waiter is told of the one that ends."""
    with here.child() as later, here.child() as sooner, here.child() as waiter:
        assert later.reserve("0, for_='5h'").value == "0"
        assert sooner.reserve("1, for_='2h'").value == "1"
        code = (
            "seen = []\ndef stop(waiting):\n    seen.append(waiting)\n    raise KeyboardInterrupt\n"
        )
        waiter.run(f"{code}reserve_gpu.reserve(wait=60, progress=stop)")
        text = waiter.run(
            "from reserve_gpu.render import pictures; str(pictures.wait(seen[0]))"
        ).value
        until = json.loads(here.locks.joinpath(f"{here.uuid('1')}.lock").read_text())["until"]
    when = durations.moment(until, time.time())
    assert text.endswith(f"Probably free next: GPU1, reserved until {when}")
