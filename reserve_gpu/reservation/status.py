"""Read the status of all devices, for the magic, the command line, JupyterLab and Python."""

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
from reserve_gpu.render.frontends import PYTHON, for_this_process
from reserve_gpu.render.status_view import Status
from reserve_gpu.reservation import feature
from reserve_gpu.reservation.session import session
from reserve_gpu.system import executor, procfs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from reserve_gpu.model.holders import DeviceStatus
    from reserve_gpu.model.progress import Progress


def status() -> Status:
    """Read the status of every device that this machine's driver lists.

    Returns:
        The status. If the lock directory can't be used, reservations are unknown, and the
        `problem` field gives the reason.

    Raises:
        DriverError: The driver can't be used.
    """
    return read_status()


def read_status(show: Callable[[Progress], object] = lambda _: None) -> Status:
    """Read the machine's status for any front end.

    Args:
        show: A function to call with progress updates when the driver is slow.

    Raises:
        DriverError: The driver can't be used.
    """
    with status_reader(show) as read:
        return read()


def reserved_rows() -> tuple[DeviceStatus, ...]:
    """Return the status of all devices, or only of reserved ones if the driver can't be used.

    Raises:
        LockError: The lock directory can't be used.
    """
    try:
        machine = status()
    except DriverError:
        return snapshot.reserved_without_driver()
    if machine.problem:
        raise LockError(machine.problem)
    return machine.rows


@contextmanager
def status_reader(
    show: Callable[[Progress], object] = lambda _: None,
) -> Iterator[Callable[[], Status]]:
    """Yield a function that reads the machine's status and reuses its NVML session.

    If a call fails or finds a broken device, the next call starts a new NVML session, because the
    problem might have been fixed in the meantime.

    Args:
        show: A function to call with progress updates when the driver is slow.
    """
    with ExitStack() as nvml_session:
        gpus: Nvml | None = None

        def read_once() -> Status:
            nonlocal gpus
            visible = session().variables.inherited()[cuda_environment.VISIBLE]
            if gpus is None:
                nvml_session.close()
                gpus = nvml_session.enter_context(Nvml())
            current, gpus = gpus, None
            active_rules = rules()
            machine = snapshot.take_snapshot(
                current, idle_mib=idle_mib(), active_rules=active_rules
            )
            if all(row.state is not State.BROKEN for row in machine.rows):
                gpus = current
            return Status(
                machine.rows,
                machine.waiting,
                machine.problem,
                time=time.time(),
                host=procfs.machine_name(),
                limit=visible,
                rules=active_rules,
                is_above=visible is not None and _is_above(machine.rows),
                is_late=cuda_environment.cuda_started(),
                user=procfs.user_of(os.getpid()),
                frontend=for_this_process(PYTHON),
            )

        def read_on_another_thread() -> Status:
            feature.load_for_reading()
            return executor.run_on_new_thread(read_once, show=show)

        yield read_on_another_thread


def _is_above(rows: Sequence[DeviceStatus]) -> bool:
    """Return whether an ancestor of this process holds one of the devices."""
    pids = {h.listed_pid for row in rows if not row.is_mine for h in row.holders if h.listed_pid}
    return bool(pids) and not pids.isdisjoint(procfs.ancestors())
