"""Helpers of tests: slurm_strangers."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

from tests.support.machine import LIMIT_S, Kernel
from tests.support.processes import US

if TYPE_CHECKING:
    from tests.support.machine import Machine
IN_JOB = 'exec ${TEST_JOB:+env SLURM_JOB_ID=$TEST_JOB} "$@"\n'


def srun_of(machine: Machine, printed: list[str] | None = None) -> str:
    """Make a stand-in of srun; printed: lines of the job in front of the node's own.

    If $TEST_JOB is set, the node is in that job.
    """
    path = machine.folder / "srun"
    (machine.folder / "printed").write_text("".join(f"{line}\n" for line in printed or ()))
    path.write_text(f"#!/bin/sh\ncat {machine.folder}/printed\n{IN_JOB}")
    path.chmod(0o755)
    return str(path)


class PlainKernel(Kernel):
    """A kernel whose client has chosen TCP ports, as VS Code does, and knows no provisioner."""

    def __init__(
        self, machine: Machine, printed: list[str] | None = None, *options: str, **extra: str
    ) -> None:
        from jupyter_client.blocking.client import BlockingKernelClient
        from jupyter_client.connect import write_connection_file

        path, self.info = write_connection_file(str(machine.folder / "plain.json"), key=b"a key")
        argv = [*US, "kernel", "slurm", "-f", path, *options, "--", srun_of(machine, printed)]
        self.process = subprocess.Popen(argv, env=machine.environ(**extra), cwd=machine.folder)
        self.client = BlockingKernelClient(connection_file=path)
        self.client.load_connection_file()
        self.client.start_channels(hb=False)
        try:
            self.client.wait_for_ready(timeout=LIMIT_S)
        except BaseException:
            self.close()
            raise

    def port(self, channel: str) -> int:
        return int(self.info[f"{channel}_port"])  # type: ignore[literal-required]

    def close(self) -> None:
        self.client.stop_channels()
        self.process.terminate()
        self.process.wait(LIMIT_S)
