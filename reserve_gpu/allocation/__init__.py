"""Choose devices for a request, applying the allocation policy and the administrator's rules.

The modules below are imported when they are first used, because a granted reservation needs them
only if there are rules, waiters, or processes to display.
"""

from reserve_gpu.system.loader import lazy_modules

TYPE_CHECKING = False
if TYPE_CHECKING:
    from reserve_gpu.allocation import quota as quota
    from reserve_gpu.allocation import snapshot as snapshot
    from reserve_gpu.allocation import wait as wait
else:
    __getattr__ = lazy_modules("allocation", "quota", "snapshot", "wait")
