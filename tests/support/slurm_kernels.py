"""Kernels in Slurm jobs, for which a script replaces srun and runs the job on this machine."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

from tests.support.machine import LIMIT_S, Kernel
from tests.support.processes import US

if TYPE_CHECKING:
    from jupyter_client.kernelspec import KernelSpec

    from tests.support.machine import Machine


def make_srun(machine: Machine, printed: list[str] | None = None) -> str:
    """Make a stand-in for srun, and return its path.

    If $TEST_JOB is set, the command runs with this SLURM_JOB_ID.

    Args:
        machine: The machine on which the command runs.
        printed: Lines that the job prints before the output of the command.
    """
    path = machine.folder / "srun"
    (machine.folder / "printed").write_text("".join(f"{line}\n" for line in printed or ()))
    path.write_text(
        f"#!/bin/sh\ncat {machine.folder}/printed\n"
        'exec ${TEST_JOB:+env SLURM_JOB_ID=$TEST_JOB} "$@"\n'
    )
    path.chmod(0o755)
    return str(path)


class TcpKernel(Kernel):
    """A kernel with TCP ports that its client has chosen, as in VS Code."""

    def __init__(
        self, machine: Machine, printed: list[str] | None = None, *options: str, **extra: str
    ) -> None:
        from jupyter_client.blocking.client import BlockingKernelClient
        from jupyter_client.connect import write_connection_file

        path, self.info = write_connection_file(str(machine.folder / "plain.json"), key=b"a key")
        argv = [*US, "kernel", "slurm", "-f", path, *options, "--", make_srun(machine, printed)]
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
        """Return the port of a channel."""
        return int(self.info[f"{channel}_port"])  # type: ignore[literal-required]

    def close(self) -> None:
        """End the kernel."""
        self.client.stop_channels()
        self.process.terminate()
        self.process.wait(LIMIT_S)


class ProvisionedKernel(Kernel):
    """A kernel that Jupyter's manager starts with the provisioner, as in JupyterLab."""

    def __init__(self, machine: Machine) -> None:
        from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
        from jupyter_client.manager import KernelManager

        argv = [*US, "kernel", "slurm", "-f", "{connection_file}", "--", make_srun(machine)]
        spec = KernelSpec(argv=argv, language="python", interrupt_mode="message")
        spec.metadata = {"kernel_provisioner": {"provisioner_name": "reserve-gpu-slurm"}}

        class Specs(KernelSpecManager):
            def get_kernel_spec(self, kernel_name: str) -> KernelSpec:  # noqa: ARG002
                return spec

        path = str(machine.folder / "lab.json")
        self.manager = KernelManager(connection_file=path, kernel_spec_manager=Specs())
        self._begin(machine.environ(), machine.folder)
