"""End the reservations made in a Slurm job when the job ends.

Slurm provides the job's end time in an environment variable, or through squeue.
"""

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

JOB, JOB_END = "SLURM_JOB_ID", "SLURM_JOB_END_TIME"  # Slurm 23.02 and later set JOB_END
# A job's end time can change, so squeue is called FIRST_LOOK_S seconds before the job ends, shortly
# before the first warning. It is then called at shrinking intervals of at least LEAST_PAUSE_S
# seconds.
FIRST_LOOK_S, LEAST_PAUSE_S = 660.0, 15.0
UNKNOWN_S = 600.0  # seconds between squeue calls while the job's end time is unknown
LONGEST_PAUSE_S = 60.0  # maximum seconds before a wall clock change is noticed
SPARE_S = 5.0  # safety margin in seconds between saving work and the job's end


class Job(Feature):
    """Ensures that reservations end no later than this process's batch job."""

    def __init__(self, owner: Owner) -> None:
        super().__init__(owner)
        self._job, job_end = os.environ.get(JOB, ""), os.environ.get(JOB_END, "")
        # The job's end time from the environment, or later from squeue. It might have passed, for
        # example in a shell that outlives its job.
        self._reported_end = float(job_end) if re.fullmatch("[0-9]{1,11}", job_end) else None
        self._began = procfs.now()
        self._looked_at = -inf  # `time.monotonic()` at the last squeue call
        self._saved = 0.0  # the job's end time for which work has been saved

    def begins(self) -> list[str]:
        """Ask Slurm for the job's end time if it is unknown, and warn if the time has passed."""
        if self._job and self._end is None:
            self._look()
        now = time.time()
        if self._end is not None or not self._reported_end or self._reported_end > now:
            return []
        job = sanitize(process_identity.job() or "?")
        at = durations.moment(self._reported_end, now)
        text = (
            f"Job {job} should have ended at {at}, so its end time does not limit this "
            "reservation. "
        )
        return [f"{text}If this process is not in that job, first run: unset {JOB} {JOB_END}"]

    @property
    def _end(self) -> float | None:
        """Return the job's end time, or None if it is unknown, in the past or too far ahead."""
        now = time.time()
        end = self._reported_end
        return end if end is not None and now < end <= now + LONGEST_S else None

    def limited(self, lease: Lease) -> Lease:
        """Return the lease, shortened if necessary so that it ends with the job."""
        return lease.within(self._end, procfs.now())

    def changed(self, change: Change) -> None:
        """End this kernel when its lease has ended, if the Slurm job was started only for it.

        The job then ends too, instead of keeping its GPU.
        """
        is_over = change.before and change.how is End.OVER
        if is_over and os.environ.get(settings.JOB_KERNEL) == procfs.stamp(os.getpid()):
            shutdown.process_end().begin(lambda: True, warn, lambda: None)

    def step(self) -> float | None:
        """Check whether the job's end time has changed, and save work before the job ends."""
        held = self.owner.held
        if not (self._job and held):
            return None
        self._look()
        if self.limited(held.lease) != held.lease:  # the end time or the wall clock has changed
            self.owner.set_holding(held)
        return max(0.0, min(self._look_in_s(), self._save_in_s(), LONGEST_PAUSE_S))

    def released(self) -> str:
        """Return a message saying the Slurm job still occupies its GPUs, or "" outside a job."""
        if not self._job:
            return ""
        job = process_identity.job()
        text = f"In Slurm, job {job} still occupies its GPUs. To free them, end the job:"
        return f"{text}\n{shell_line(f'scancel {job}')}"

    def explained(self, error: ReserveGPUError) -> ReserveGPUError:
        """If the job has no GPU, return an error that says how to request one."""
        return no_gpu.explained(error)

    def _save_in_s(self) -> float:
        """Save work if the job is about to end.

        Returns:
            The seconds until work must be saved, or infinity if there is nothing left to save.
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
        """Return the seconds until the next squeue call. It is due if the result is 0 or less.

        Slurm reports the job's end as a wall clock time, so the time left is computed from the wall
        clock and not from the time since the last call.
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
        """If a squeue call is due, ask for the job's end time. Keep the old time if this fails."""
        if self._look_in_s() > 0:
            return
        self._looked_at = time.monotonic()
        squeue = ("squeue", "--noheader", "--jobs", self._job, "--format=%e")
        output = subprocesses.read_output(squeue, no_gpu.LIMIT_S, SLURM_TIME_FORMAT="standard")
        with suppress(ValueError, OverflowError):
            self._reported_end = datetime.fromisoformat(output.strip()).timestamp()
