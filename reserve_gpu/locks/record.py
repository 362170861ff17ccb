"""The record that a process writes into its lock file, for others to read."""

import errno
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from reserve_gpu import foreign, proc, settings, this_kernel, this_process
from reserve_gpu.model import Record, Who

BYTES_LIMIT = 1 << 16  # what is longer was not written by us


def myself() -> Who:
    """Return what this process says of itself to those who find a device reserved.

    Whoever can see this process goes by the system's word for its user, so here the variable that
    the login has set is enough.
    """
    title = this_process.title()
    return Who(
        user=os.environ.get("LOGNAME") or proc.user_of(os.getpid()),
        # An engine inherits the variable of the notebook that has started it.
        notebook=None if title else this_process.notebook(),
        command=title or this_process.own_command(),
        cwd=this_process.working_directory(),
        pid=os.getpid(),
        namespace=proc.pid_namespace(),
        origin=this_kernel.origin(),
        agent=os.environ.get(settings.AGENT) or None,
        job=this_process.job(),
        job_name=os.environ.get("SLURM_JOB_NAME"),
        mounts=proc.mount_namespace(),
    )


def read(descriptor: int) -> Record:
    """Return the record in an open lock file, an empty one where it is none of ours."""
    return Record.from_dict(fields(descriptor))


def write(descriptor: int, record: Record) -> str | None:
    """Write the record into an open lock file that does not say the same already.

    Returns:
        The system's reason if the record is lost, as on a full disk.
    """
    new = record.to_dict()
    if _without_times(new) == _without_times(fields(descriptor)):
        return None
    data = foreign.encoded(new, BYTES_LIMIT)
    try:
        # Cover a longer record first: a reader must not find the rest of it behind this one.
        data = data.ljust(min(os.fstat(descriptor).st_size, BYTES_LIMIT))
        if os.pwrite(descriptor, data, 0) == len(data):
            os.ftruncate(descriptor, len(data))
            return None
        reason = os.strerror(errno.ENOSPC)
    except OSError as error:
        reason = error.strerror or str(error)
    with suppress(OSError):
        os.ftruncate(descriptor, 0)
    return reason


def fields(descriptor: int) -> dict[str, Any]:
    """Return the fields in an open lock file; an empty dict if it contains none."""
    with suppress(OSError, ValueError):
        parsed = foreign.parsed(os.pread(descriptor, BYTES_LIMIT + 1, 0), BYTES_LIMIT)
        if isinstance(parsed, dict):
            return parsed
    return {}


def _without_times(said: Mapping[str, Any]) -> dict[str, Any]:
    times = ("since", "written", "since_boot", "written_boot")
    return {name: value for name, value in said.items() if name not in times}
