"""End reservations made in a Slurm job at the end of the job, which Slurm reports."""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from datetime import datetime
from math import inf
from typing import TYPE_CHECKING

from reserve_gpu.features.job import no_gpu
from reserve_gpu.model.errors import shell_line
from reserve_gpu.model.parsing import LONGEST_S
from reserve_gpu.model.requests import End
from reserve_gpu.model.untrusted import sanitize
from reserve_gpu.render import durations
from reserve_gpu.reservation.feature import Feature, Owner
from reserve_gpu.system import process_identity, procfs, settings, shutdown, subprocesses
from reserve_gpu.system.warning_log import warn

if TYPE_CHECKING:
    from reserve_gpu.model.errors import ReserveGPUError
    from reserve_gpu.model.requests import Lease
    from reserve_gpu.reservation.holding import Change

JOB, JOB_END = "SLURM_JOB_ID", "SLURM_JOB_END_TIME"  # Slurm sets JOB_END since 23.02
# The end of a job can be moved. So squeue is called FIRST_LOOK_S seconds before the end, shortly
# before the first warning, and then at shrinking intervals of at least LEAST_PAUSE_S seconds.
FIRST_LOOK_S, LEAST_PAUSE_S = 660.0, 15.0
UNKNOWN_S = 600.0  # seconds between two calls of squeue if the end of the job is unknown
LONGEST_PAUSE_S = 60.0  # longest time in seconds until a change of the wall clock is noticed
SPARE_S = 5.0  # seconds to spare between the functions that save work and the end of the job


class Job(Feature):
    """Limits reservations to the end of the job that this process belongs to."""

    def __init__(self, owner: Owner) -> None:
        super().__init__(owner)
        self._job, job_end = os.environ.get(JOB, ""), os.environ.get(JOB_END, "")
        # The end from the environment, and later from squeue. It may have passed, for example in a
        # shell that outlives its job.
        self._reported_end = float(job_end) if re.fullmatch("[0-9]{1,11}", job_end) else None
        self._began = procfs.now()
        self._looked_at = -inf  # time of the last call of squeue, by time.monotonic()
        self._saved = 0.0  # the end of the job for which the functions that save work were called

    def begins(self) -> list[str]:
        """Ask Slurm for the end of the job if it is unknown, and warn if the end has passed."""
        if self._job and self._end is None:
            self._look()
        now = time.time()
        if self._end is not None or not self._reported_end or self._reported_end > now:
            return []
        job = sanitize(process_identity.job() or "?")
        at = durations.moment(self._reported_end, now)
        text = f"Job {job} should have ended at {at}, so its end does not limit this reservation. "
        return [f"{text}If this process is not in that job, first run: unset {JOB} {JOB_END}"]

    @property
    def _end(self) -> float | None:
        """Return the end of the job; None if it is unknown or has passed."""
        now = time.time()
        end = self._reported_end
        return end if end is not None and now < end <= now + LONGEST_S else None

    def limited(self, lease: Lease) -> Lease:
        """Return the lease, limited to the end of the job."""
        return lease.within(self._end, procfs.now())

    def changed(self, change: Change) -> None:
        """End this kernel with its reservation if a Slurm job was started only for this kernel.

        The job then ends with the kernel, instead of keeping its GPU.
        """
        is_over = change.before and change.how is End.OVER
        if is_over and os.environ.get(settings.JOB_KERNEL) == procfs.stamp(os.getpid()):
            shutdown.process_end().begin(lambda: True, warn, lambda: None)

    def step(self) -> float | None:
        """Check at intervals whether the end was moved, and save work before the end."""
        held = self.owner.held
        if not (self._job and held):
            return None
        self._look()
        if self.limited(held.lease) != held.lease:  # the end was moved, or the wall clock was set
            self.owner.set_holding(held)
        return max(0.0, min(self._look_in_s(), self._save_in_s(), LONGEST_PAUSE_S))

    def released(self) -> str:
        """Return a message that the job still occupies its GPUs in Slurm."""
        if not self._job:
            return ""
        job = process_identity.job()
        text = f"In Slurm, job {job} still occupies its GPUs. To free them, end the job:"
        return f"{text}\n{shell_line(f'scancel {job}')}"

    def explained(self, error: ReserveGPUError) -> ReserveGPUError:
        """Return an error with a command that gets a GPU, if the job has none."""
        return no_gpu.explained(error)

    def _save_in_s(self) -> float:
        """Call the functions that save work if the job ends soon.

        Returns:
            The seconds until the functions are due, infinite if there is nothing to call.
        """
        ends, end, now = shutdown.process_end(), self._end, procfs.now()
        if end is None or not ends.longest_s or end <= self._saved:
            return inf
        left_s = end - now.wall
        whole_s = left_s + now.boot - self._began.boot
        due_s = left_s - min(ends.longest_s + SPARE_S, whole_s / 2)
        if due_s <= 0:
            self._saved = end
            ends.save(warn)
        return due_s

    def _look_in_s(self) -> float:
        """Return the seconds until the next call of squeue; 0 or less if it is due.

        Slurm's controller reports the end by the wall clock, so this uses the wall clock and not
        the time since the last call.
        """
        passed_s = time.monotonic() - self._looked_at
        if self._end is None or passed_s == inf:
            return UNKNOWN_S - passed_s
        left_s = self._end - time.time()
        if left_s > FIRST_LOOK_S:
            return left_s - FIRST_LOOK_S
        is_first = left_s + passed_s > FIRST_LOOK_S
        return 0.0 if is_first else max(LEAST_PAUSE_S, left_s / 3) - passed_s

    def _look(self) -> None:
        """Ask Slurm for the end of the job if that is due, and keep the old end if this fails."""
        if self._look_in_s() > 0:
            return
        self._looked_at = time.monotonic()
        squeue = ("squeue", "--noheader", "--jobs", self._job, "--format=%e")
        output = subprocesses.read_output(squeue, no_gpu.LIMIT_S, SLURM_TIME_FORMAT="standard")
        with suppress(ValueError, OverflowError):
            self._reported_end = datetime.fromisoformat(output.strip()).timestamp()
