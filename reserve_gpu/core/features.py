"""Which features there are, without their modules: a bare reservation imports none of them."""

from collections.abc import Callable
from typing import NamedTuple

from reserve_gpu import settings
from reserve_gpu.calls import Late
from reserve_gpu.cells import cells, kernels_file
from reserve_gpu.core.feature import Feature
from reserve_gpu.core.held import Held


class FeatureRow(NamedTuple):
    """A feature: the class of that name in that module.

    is_wanted: tells whether this process needs it, by what it will hold; asked at each change.
    """

    module: str
    name: str
    is_wanted: Callable[[Held | None], bool]

    def load(self) -> type[Feature]:
        """Import its module; returns the class."""
        loaded: type[Feature] = getattr(Late(self.module), self.name)
        return loaded


def _may_log(_held: Held | None) -> bool:
    return settings.may_keep_history()


def _has_end(held: Held | None) -> bool:
    return held is not None and held.lease.has_end


def _is_kernel(_held: Held | None) -> bool:
    return kernels_file() is not None


def _is_in_cells(held: Held | None) -> bool:
    return held is not None and cells().shell is not None


def _is_part(held: Held | None) -> bool:
    return held is not None and held.part_mib is not None


# In the order in which they are called: a look that the history makes serves the lease.
FEATURES = (
    FeatureRow("features.history.journal", "History", _may_log),
    FeatureRow("features.lease.timer", "LeaseTimer", _has_end),
    FeatureRow("core.caps", "PartWatch", _is_part),
    FeatureRow("features.restart.keeper", "Restart", _is_kernel),
    FeatureRow("features.asked.answerer", "Asked", _is_in_cells),
    FeatureRow("features.waiters.teller", "Waiters", _is_in_cells),
)
