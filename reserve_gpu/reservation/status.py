"""A look at the machine, as a status: for the magic, the command line, JupyterLab and Python."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from reserve_gpu.allocation import snapshot
from reserve_gpu.allocation.request import idle_mib, rules
from reserve_gpu.gpus import cuda_environment
from reserve_gpu.gpus.nvml import Nvml
from reserve_gpu.model.devices import State
from reserve_gpu.model.errors import DriverError, LockError
from reserve_gpu.render.frontends import PYTHON, read_here
from reserve_gpu.render.status_view import Status
from reserve_gpu.reservation import feature
from reserve_gpu.reservation.session import session
from reserve_gpu.system import executor, procfs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from reserve_gpu.model.holders import DeviceStatus
    from reserve_gpu.model.progress import Progress


def status() -> Status:
    """Look at every device of this machine that the driver shows.

    Raises DriverError where there is no driver. Where the lock directory can't be used the devices
    are there anyway, and `problem` says why nothing is known of reservations.
    """
    return look()


def look(show: Callable[[Progress], object] = lambda _: None) -> Status:
    """Look at the machine, for any front end. show: is told of a driver that takes long."""
    with looking(show) as look_now:
        return look_now()


def reserved_rows() -> tuple[DeviceStatus, ...]:
    """Return the devices, where the driver does not answer only those that somebody has reserved.

    Raises LockError.
    """
    try:
        seen = status()
    except DriverError:
        return snapshot.reserved_without_driver()
    if seen.problem:
        raise LockError(seen.problem)
    return seen.rows


@contextmanager
def looking(show: Callable[[Progress], object] = lambda _: None) -> Iterator[Callable[[], Status]]:
    """Yield a function that looks at the machine, in one conversation with the driver.

    show: is told of a driver that takes long. After a look that failed, or found a broken device,
    it begins another conversation: the trouble may be over.
    """
    with ExitStack() as conversation:
        gpus: Nvml | None = None

        def look_now() -> Status:
            nonlocal gpus
            visible = session().variables.inherited()[cuda_environment.VISIBLE]
            if gpus is None:
                conversation.close()
                gpus = conversation.enter_context(Nvml())
            using, gpus = gpus, None
            ruled = rules()
            seen = snapshot.take_snapshot(using, idle_mib=idle_mib(), ruled=ruled)
            if all(row.state is not State.BROKEN for row in seen.rows):
                gpus = using
            return Status(
                seen.rows,
                seen.waiting,
                seen.problem,
                time=time.time(),
                host=procfs.machine_name(),
                limit=visible,
                rules=ruled,
                is_above=visible is not None and _is_above(seen.rows),
                is_late=cuda_environment.cuda_started(),
                user=procfs.user_of(os.getpid()),
                frontend=read_here(PYTHON),
            )

        def look_on_another_thread() -> Status:
            feature.load_for_reading()
            return executor.apart(look_now, show=show)

        yield look_on_another_thread


def _is_above(rows: Sequence[DeviceStatus]) -> bool:
    """Tell whether an ancestor of this process has reserved one of the devices."""
    pids = {h.listed_pid for row in rows if not row.is_mine for h in row.holders if h.listed_pid}
    return bool(pids) and not pids.isdisjoint(procfs.ancestors())
