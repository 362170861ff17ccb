"""A lock that keeps other threads from forking.

The fork hooks are registered as soon as this package is imported, before any of its other modules
are loaded. So this module only imports modules that Python itself has already loaded.
"""

import os
from _thread import RLock

# A child that is forked after a file lock is acquired, but before the lock is registered, would
# hold the file lock forever. A child that is forked during an import would wait forever for the
# import lock. A plain `with no_fork:` is safe even if a signal handler raises an exception, because
# Python runs no handler between acquiring the lock and entering the block.
no_fork = RLock()

# The hooks are registered at import time, because a fork that is in progress ignores new hooks.
# Registering the hooks again on reload is harmless.
if hasattr(os, "register_at_fork"):  # Windows does not support fork
    os.register_at_fork(
        before=no_fork.acquire, after_in_parent=no_fork.release, after_in_child=no_fork.release
    )
