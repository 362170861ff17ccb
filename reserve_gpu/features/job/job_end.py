"""The end of a Slurm job is an end of what is reserved in it: it is asked for, told and used."""

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

JOB, JOB_END = "SLURM_JOB_ID", "SLURM_JOB_END_TIME"  # the second since Slurm 23.02
# An end can be moved: it is asked for before the first warning, and then more and more often.
FIRST_LOOK_S, LEAST_PAUSE_S = 660.0, 15.0
UNKNOWN_S = 600.0  # until the next look where Slurm tells no end
LONGEST_PAUSE_S = 60.0  # within it a wall clock that was set is noticed
SPARE_S = 5.0  # between what is called before the end, and the end


class Job(Feature):
    """Knows when the job of this process ends."""

    def __init__(self, owner: Owner) -> None:
        super().__init__(owner)
        self._job, told = os.environ.get(JOB, ""), os.environ.get(JOB_END, "")
        # By the environment, then by squeue. It may have passed: in a shell that outlives its job.
        self._told = float(told) if re.fullmatch("[0-9]{1,11}", told) else None
        self._began, self._looked_at = procfs.now(), -inf  # by time.monotonic()
        self._saved = 0.0  # the end before which functions have been called

    def begins(self) -> list[str]:
        """Ask Slurm if the environment has no future end of the job; warn of a past end."""
        if self._job and self._end is None:
            self._look()
        now = time.time()
        if self._end is not None or not self._told or self._told > now:
            return []
        job = sanitize(process_identity.job() or "?")
        at = durations.moment(self._told, now)
        text = f"Job {job} should have ended at {at}, so its end does not limit this reservation. "
        return [f"{text}If this process is not in that job, run before it: unset {JOB} {JOB_END}"]

    @property
    def _end(self) -> float | None:
        """Return the end of the job; None if it is unknown or has passed."""
        now = time.time()
        is_ahead = self._told is not None and now < self._told <= now + LONGEST_S
        return self._told if is_ahead else None

    def limited(self, lease: Lease) -> Lease:
        """Return the lease with the job's end, if that comes first."""
        return lease.within(self._end, procfs.now())

    def changed(self, change: Change) -> None:
        """End the process where its job was started for it alone, and would hold the GPU on."""
        is_over = change.before and change.how is End.OVER
        if is_over and os.environ.get(settings.JOB_KERNEL) == procfs.stamp(os.getpid()):
            shutdown.of_this_process().begin(lambda: True, warn, lambda: None)

    def step(self) -> float | None:
        """Ask again for the end now and then, and call what is to be called before it."""
        held = self.owner.held
        if not (self._job and held):
            return None
        self._look()
        if self.limited(held.lease) != held.lease:  # the end was moved, or the wall clock was set
            self.owner.set_holding(held)
        return max(0.0, min(self._look_in_s(), self._save_in_s(), LONGEST_PAUSE_S))

    def released(self) -> str:
        """Say that Slurm knows nothing of it."""
        give_back = shell_line(f"scancel {process_identity.job()}")
        kept = f"Job {process_identity.job()} still holds it for Slurm."
        return f"{kept} To give it back, end the job:\n{give_back}" if self._job else ""

    def explained(self, error: ReserveGPUError) -> ReserveGPUError:
        """Return what helps where the job has no GPU."""
        return no_gpu.explained(error)

    def _save_in_s(self) -> float:
        """Call the functions that save work before the end, if that is due.

        Returns the seconds until it is.
        """
        ends, end, now = shutdown.of_this_process(), self._end, procfs.now()
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
        """Return the seconds until the next question to Slurm; 0 or less if it is due.

        Slurm's controller gives the end by its wall clock, so that clock counts. The time since the
        last look does not: the wall clock may have been set meanwhile.
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
        """Ask Slurm for the end, if that is due; where it does not answer, the last one counts."""
        if self._look_in_s() > 0:
            return
        self._looked_at = time.monotonic()
        squeue = ("squeue", "--noheader", "--jobs", self._job, "--format=%e")
        said = subprocesses.output(squeue, no_gpu.LIMIT_S, SLURM_TIME_FORMAT="standard")
        with suppress(ValueError, OverflowError):
            self._told = datetime.fromisoformat(said.strip()).timestamp()
