"""The guard for forks: the one thing that is done when this package is imported.

It imports nothing that has to be loaded, as it is there before all else.
"""

import os
from _thread import RLock

# Keeps other threads from forking. A child that is forked while a lock is taken but not yet known
# would keep it for ever; one that is forked while a module is imported would wait for it for ever.
# A plain `with no_fork:` holds also where a signal handler raises: Python runs none between taking
# a lock and entering the block.
no_fork = RLock()

# At import: a fork that has begun asks for no more hooks. Those of a reload do no harm.
if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(
        before=no_fork.acquire, after_in_parent=no_fork.release, after_in_child=no_fork.release
    )
