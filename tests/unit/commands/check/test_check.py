"""%reserve_gpu --check: what each framework sees, asked of real child processes.

Each framework costs a child, so most facts are shown on one or two; the layer `full` has all.
"""

from __future__ import annotations

from tests.support.check import TROUBLES

# Each trouble once, in two checks.
MIXED = [
    {"torch": "cpu", "jax": "old", "cupy": "ignores", "numba": "raises"},
    {"tensorflow": "hides", "jax": "crashes", "numba": "simulates", "cupy": "exits"},
]


def test_each_trouble_is_mixed() -> None:
    """The mixtures have each trouble, and nobody is in one that can't get into it."""
    pairs = [pair for troubles in MIXED for pair in troubles.items()]
    assert {what for _, what in pairs} == set(TROUBLES)
    assert all(key in TROUBLES[what][2] for key, what in pairs)
