"""The record that a process writes into its lock file, for others to read."""

import errno
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from reserve_gpu.model import untrusted
from reserve_gpu.model.holders import ProcessInfo, Record
from reserve_gpu.system import jupyter_kernel, process_identity, procfs, settings

BYTES_LIMIT = 1 << 16  # what is longer was not written by us


def myself() -> ProcessInfo:
    """Return what this process says of itself to those who find a device reserved.

    Whoever can see this process goes by the system's word for its user, so here the variable that
    the login has set is enough.
    """
    title = process_identity.title()
    return ProcessInfo(
        user=os.environ.get("LOGNAME") or procfs.user_of(os.getpid()),
        # An engine inherits the variable of the notebook that has started it.
        notebook=None if title else process_identity.notebook(),
        command=title or process_identity.own_command(),
        cwd=process_identity.working_directory(),
        pid=os.getpid(),
        namespace=procfs.pid_namespace(),
        origin=jupyter_kernel.origin(),
        agent=os.environ.get(settings.AGENT) or None,
        job=process_identity.job(),
        job_name=os.environ.get("SLURM_JOB_NAME"),
        mounts=procfs.mount_namespace(),
    )


def read(descriptor: int) -> Record:
    """Return the record in an open lock file, an empty one where it is none of ours."""
    return Record.from_dict(fields(descriptor))


def write(descriptor: int, record: Record) -> str | None:
    """Write the record into an open lock file that does not say the same already.

    Returns:
        The system's reason if the record is lost, as on a full disk.
    """
    new, old = record.to_dict(), fields(descriptor)
    if old and _without_times(new) == _without_times(old):
        return None
    data = untrusted.encoded(new, BYTES_LIMIT)
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
        parsed = untrusted.parsed(os.pread(descriptor, BYTES_LIMIT + 1, 0), BYTES_LIMIT)
        if isinstance(parsed, dict):
            return parsed
    return {}


def _without_times(said: Mapping[str, Any]) -> dict[str, Any]:
    times = ("since", "written", "since_boot", "written_boot")
    return {name: value for name, value in said.items() if name not in times}
