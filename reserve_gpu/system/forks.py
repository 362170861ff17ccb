"""A lock that keeps other threads from forking.

The fork hooks are registered when this package is imported, before its other modules are loaded. So
this module only imports modules that Python has already loaded.
"""

import os
from _thread import RLock

# A child that is forked after a file lock is acquired, but before the lock is registered, would
# hold it forever. A child that is forked during an import would wait forever for the import lock.
# A plain `with no_fork:` is also safe if a signal handler raises, because Python runs no handler
# between acquiring the lock and entering the block.
no_fork = RLock()

# The hooks are registered at import, because a fork in progress ignores hooks that are registered
# later. Registering them again on reload is harmless.
if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(
        before=no_fork.acquire, after_in_parent=no_fork.release, after_in_child=no_fork.release
    )
