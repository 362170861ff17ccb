"""Release this process's devices when its user requests this from another process."""
