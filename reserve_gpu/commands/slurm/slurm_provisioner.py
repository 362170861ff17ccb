"""The kernel provisioner that keeps a job over the restarts of its kernel.

Jupyter finds this class by an entry point.
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
    """Start the relay of a kernel, and the job, if there is none."""

    job: subprocess.Popen[bytes] | None = None
    folder: str | None = None  # for the sockets

    async def pre_launch(self, **kwargs: Any) -> dict[str, Any]:
        """Let the client reach the relay by sockets in a private folder, in place of TCP ports.

        Raises OSError if that folder has become another user's.
        """
        self._prepare_folder()
        return await super().pre_launch(**kwargs)

    def _prepare_folder(self) -> None:
        if self.folder:
            sockets.require_own(self.folder)
        manager = self.parent
        if not manager or manager.transport != "tcp" or os.path.exists(manager.connection_file):
            return
        with suppress(OSError):  # without such a folder it is TCP
            self.folder = sockets.make_folder()
            weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
            manager.transport, manager.ip = "ipc", f"{self.folder}/kernel"

    async def launch_kernel(self, cmd: list[str], **kwargs: Any) -> KernelConnectionInfo:
        """Start them; where no job can be started the relay says why."""
        if self.job is None or self.job.poll() is not None:
            await self._end()
            with suppress(OSError):
                line = cmd[cmd.index("--") + 1 :]
                self.job = srun.start(line, kwargs["env"], kwargs.get("cwd"))
        if self.job:
            kwargs["pass_fds"] = handed = srun.streams(self.job)
            words = " ".join(map(str, [*handed, self.job.pid]))
            kwargs["env"] = {**kwargs["env"], srun.HANDED: words}
        return await super().launch_kernel(cmd, **kwargs)

    async def cleanup(self, restart: bool = False) -> None:  # noqa: FBT001, FBT002 - as Jupyter has it
        """End the job with its kernel, but not over a restart."""
        await super().cleanup(restart)
        if not restart:
            await self._end()
            if self.folder:
                shutil.rmtree(self.folder, ignore_errors=True)

    async def _end(self) -> None:
        job, self.job = self.job, None
        if job:
            await asyncio.to_thread(srun.end, job)
