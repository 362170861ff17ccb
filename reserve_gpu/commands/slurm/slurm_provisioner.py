"""A Jupyter kernel provisioner that keeps a kernel's Slurm job running when the kernel restarts.

Jupyter finds the provisioner through an entry point:
https://jupyter-client.readthedocs.io/en/stable/provisioning.html
"""

from __future__ import annotations

import asyncio
import os
import shutil
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from jupyter_client.provisioning.local_provisioner import LocalProvisioner

from reserve_gpu.commands.slurm import sockets, srun

if TYPE_CHECKING:
    import subprocess

    from jupyter_client.connect import KernelConnectionInfo


class SlurmProvisioner(LocalProvisioner):
    """Starts a kernel's relay, and a Slurm job unless the kernel's job is still running.

    Attributes:
        job: The job's srun process, or None.
        folder: The path of the private folder for the sockets, or None if TCP is used.
    """

    job: subprocess.Popen[bytes] | None = None
    folder: str | None = None

    async def pre_launch(self, **kwargs: Any) -> dict[str, Any]:
        """Replace the client's TCP ports with sockets in a private folder.

        Raises:
            OSError: The folder now belongs to another user, or other users can enter it.
        """
        self._prepare_folder()
        return await super().pre_launch(**kwargs)

    def _prepare_folder(self) -> None:
        if self.folder:
            sockets.require_private(self.folder)
        manager = self.parent
        if not manager or manager.transport != "tcp" or os.path.exists(manager.connection_file):
            return
        with suppress(OSError):  # without the folder, the kernel uses TCP
            self.folder = sockets.make_folder()
            weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
            manager.transport, manager.ip = "ipc", f"{self.folder}/kernel"

    async def launch_kernel(self, cmd: list[str], **kwargs: Any) -> KernelConnectionInfo:
        """Start a job if none is running, then start the relay, which reports a failed job."""
        if self.job is None or self.job.poll() is not None:
            await self._end()
            with suppress(OSError):
                srun_command = cmd[cmd.index("--") + 1 :]
                self.job = srun.start(srun_command, kwargs["env"], kwargs.get("cwd"))
        if self.job:
            kwargs["pass_fds"] = descriptors = srun.streams(self.job)
            value = " ".join(map(str, [*descriptors, self.job.pid]))
            kwargs["env"] = {**kwargs["env"], srun.STREAMS: value}
        return await super().launch_kernel(cmd, **kwargs)

    async def cleanup(self, restart: bool = False) -> None:  # noqa: FBT001, FBT002 - Jupyter's signature
        """End the job, unless the kernel is restarting."""
        await super().cleanup(restart)
        if not restart:
            await self._end()
            if self.folder:
                shutil.rmtree(self.folder, ignore_errors=True)

    async def _end(self) -> None:
        job, self.job = self.job, None
        if job:
            await asyncio.to_thread(srun.end, job)
