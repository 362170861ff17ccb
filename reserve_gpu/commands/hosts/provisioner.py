"""The kernel provisioner that starts a kernel on the machine where a GPU is free.

sshpyk starts the kernel there and tunnels its channels; here is chosen where. Jupyter finds this
class by an entry point. https://jupyter-client.readthedocs.io/en/stable/provisioning.html
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from typing import TYPE_CHECKING, Any

from traitlets import List, Unicode

from reserve_gpu.commands.hosts import remote_kernel
from reserve_gpu.commands.hosts.remote_status import SSHPYK, named
from reserve_gpu.model import errors
from reserve_gpu.model.untrusted import sanitize
from reserve_gpu.system import jupyter_kernel, procfs, settings, spawn

LIMIT_S = 30.0  # in which a kernel is tried on another host
try:
    from sshpyk.provisioning import SSHKernelProvisioner
    from sshpyk.utils import get_local_ssh_configs, validate_ssh_config
except ImportError as error:
    raise ImportError(
        "A kernel on another machine needs sshpyk 1.25 or later. "
        f"Run: {errors.install_command(SSHPYK)}"
    ) from error

if TYPE_CHECKING:
    from collections.abc import Mapping

# What sshpyk keeps its tunnels with, as `ssh -G` has it.
CONTROL = ("controlmaster", "controlpersist", "controlpath")
NO_CONTROL = (
    "ssh keeps no connection open, which sshpyk needs. Write into ~/.ssh/config: "
    "ControlMaster auto, ControlPath ~/.ssh/%C, ControlPersist 10m"
)
# What sshpyk raises; of Python 3.10 a TimeoutError of asyncio's is no OSError.
FAILURES = (OSError, RuntimeError, ValueError, asyncio.TimeoutError)


class HostsProvisioner(SSHKernelProvisioner):
    """Start a kernel on the one of several hosts that has the most free GPUs of those asked for.

    hosts: as ssh takes them, or groups of `[hosts]`. wishes: options of a request.
    """

    hosts = List(Unicode(), config=True)
    wishes = List(Unicode(), config=True)
    session_send_orig = None  # as of patch_session_send
    ssh: str | None  # the program here
    rem_pid_k: int | None  # the kernel's process there
    rem_proc_cmds: dict[int | None, str]  # what each process there was at first

    async def pre_launch(self, **kwargs: Any) -> dict[str, Any]:
        """Find a host, and start the kernel there; a restart stays where it is.

        Raises ReserveGPUError where no host has what is asked for.
        """
        from jupyter_core.paths import jupyter_runtime_dir

        if self.restart_requested:
            return await self._launched(**kwargs)
        self.raise_on_ssh_config_error = False  # what it needs is looked at here
        os.makedirs(jupyter_runtime_dir(), mode=0o700, exist_ok=True)  # where sshpyk writes a file
        until, failed = time.monotonic() + LIMIT_S, dict[str, str]()
        while True:
            name = await self._find(kwargs.get("env") or os.environ, failed)
            try:
                made = await self._launched(**kwargs)
                if await asyncio.to_thread(remote_kernel.has_gpu, name, self.rem_pid_k or 0):
                    return made
                failed[name] = f"the kernel has no GPU. Try: ssh {name} reserve-gpu status"
            except FAILURES as error:
                failed[name] = sanitize(str(error), errors.REASON_LIMIT)
            await self._give_up()
            if time.monotonic() > until:  # clients give up on a kernel after 60 s
                raise remote_kernel.NoHostError(f"No kernel was started. {name}: {failed[name]}.")

    async def _launched(self, **kwargs: Any) -> dict[str, Any]:
        """Start the kernel on the host that was found."""
        made = await super().pre_launch(**kwargs)
        # It becomes another program once it has its GPU, which sshpyk takes for its end.
        self.rem_proc_cmds.pop(self.rem_pid_k, None)
        return dict(made)

    def patch_session_send(self) -> None:
        """Leave the session as it is: done twice, as after a crash, it calls itself for ever.

        It is for sshpyk's persistent kernels, which are not used here.
        """

    async def poll(self) -> int | None:
        """Tell whether the kernel has ended; sshpyk takes an answer that was lost for an end."""
        pid, ended = self.rem_pid_k, await super().poll()
        if pid is not None and ended is not None:
            self.rem_pid_k = pid
            ended = await super().poll()
        return None if ended is None else int(ended)

    async def _find(self, environ: Mapping[str, str], failed: Mapping[str, str]) -> str:
        """Have a host reserve, let sshpyk start the kernel there, and return the host.

        failed: hosts that are asked no more, and why. Raises ReserveGPUError.
        """
        if os.name == "nt":
            text = "A kernel on another machine needs ssh's ControlMaster, which Windows lacks"
            raise remote_kernel.NoHostError(f"{text}. Use WSL2.")
        told = {
            "id": f"ssh-{uuid.uuid4()}",
            "notebook": environ.get("JPY_SESSION_NAME", ""),
            "machine": procfs.machine_name(),
            "wishes": "\0".join(self.wishes),
        }
        kernel = ["--id", told["id"], "--kernel", self.remote_kernel_name]
        self.ssh_host_alias, python = await asyncio.to_thread(
            remote_kernel.find, named(self.hosts), self.wishes, kernel, failed, _lack
        )
        self.ssh = self.ssh or spawn.program("ssh")
        said = jupyter_kernel.as_started(told)
        # sshpyk forwards no environment. It writes FP_PY="{remote_python}" into its command.
        self.remote_python = f'{python}"; export {settings.STARTED}="{said}'
        return self.ssh_host_alias

    async def _give_up(self) -> None:
        """End what may have started on a host."""
        if self.rem_pid_k:
            await self.kill()
        await self.cleanup()
        self.rem_conn_fp = self.rem_conn_info = None


def _lack(name: str) -> str:
    """Return what sshpyk lacks to start a kernel on a host; empty if nothing."""
    configs = get_local_ssh_configs([spawn.program("ssh")], alias=name)
    checked = [validate_ssh_config(config) for config in configs]
    is_kept = not any(each[key][0] == "error" for each in checked for key in CONTROL if key in each)
    return "" if is_kept else NO_CONTROL
