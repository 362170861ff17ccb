"""A Jupyter kernel provisioner that starts a kernel on a remote machine with a free GPU.

This module chooses the machine. sshpyk starts the kernel there and tunnels its channels. Jupyter
finds the provisioner through an entry point:
https://jupyter-client.readthedocs.io/en/stable/provisioning.html
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from typing import TYPE_CHECKING, Any

from traitlets import List, Unicode

from reserve_gpu.commands.hosts import remote_kernel
from reserve_gpu.commands.hosts.remote_status import SSHPYK, resolve
from reserve_gpu.model import errors
from reserve_gpu.model.untrusted import sanitize
from reserve_gpu.system import jupyter_kernel, procfs, settings, spawn

LIMIT_S = 30.0  # seconds during which a failed start is retried on other hosts
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

# ssh options that sshpyk's tunnels depend on, as `ssh -G` prints them
CONTROL = ("controlmaster", "controlpersist", "controlpath")
NO_CONTROL = (
    "sshpyk needs an ssh connection that stays open. Add to ~/.ssh/config: "
    "ControlMaster auto, ControlPath ~/.ssh/%C, ControlPersist 10m"
)
# Exceptions that sshpyk raises. In Python 3.10, asyncio.TimeoutError is not an OSError.
FAILURES = (OSError, RuntimeError, ValueError, asyncio.TimeoutError)


class HostsProvisioner(SSHKernelProvisioner):
    """Starts a kernel on a host that meets the request, trying hosts with more free GPUs first.

    Attributes:
        hosts: Host names in the form that ssh accepts, or groups from the `[hosts]` table.
        wishes: The request's command-line options.
    """

    hosts = List(Unicode(), config=True)
    wishes = List(Unicode(), config=True)
    session_send_orig = None  # read by sshpyk when a kernel shuts down
    ssh: str | None  # path of the local ssh program
    rem_pid_k: int | None  # the kernel's process ID on the remote host
    rem_proc_cmds: dict[int | None, str]  # each remote process's initial command line

    async def pre_launch(self, **kwargs: Any) -> dict[str, Any]:
        """Find a host and start the kernel there. A restarted kernel stays on the same host.

        Raises:
            ReserveGPUError: No host can fulfill the request, or the kernel could not be started.
        """
        from jupyter_core.paths import jupyter_runtime_dir

        if self.restart_requested:
            return await self._launched(**kwargs)
        self.raise_on_ssh_config_error = False  # _lack() checks the configuration instead
        os.makedirs(jupyter_runtime_dir(), mode=0o700, exist_ok=True)  # sshpyk needs this folder
        until, failed = time.monotonic() + LIMIT_S, dict[str, str]()
        while True:
            name = await self._find(kwargs.get("env") or os.environ, failed)
            try:
                made = await self._launched(**kwargs)
                if await asyncio.to_thread(remote_kernel.has_gpu, name, self.rem_pid_k or 0):
                    return made
                failed[name] = (
                    f"the kernel started without a GPU. Try: ssh {name} reserve-gpu status"
                )
            except FAILURES as error:
                failed[name] = sanitize(str(error), errors.REASON_LIMIT)
            await self._give_up()
            if time.monotonic() > until:  # Jupyter clients give up on a kernel after 60 s
                raise remote_kernel.NoHostError(f"No kernel was started. {name}: {failed[name]}.")

    async def _launched(self, **kwargs: Any) -> dict[str, Any]:
        """Start the kernel on the chosen host."""
        made = await super().pre_launch(**kwargs)
        # Once the process has a GPU, it replaces itself with the kernel, so its command line
        # changes. sshpyk would mistake this change for the kernel's exit.
        self.rem_proc_cmds.pop(self.rem_pid_k, None)
        return dict(made)

    def patch_session_send(self) -> None:
        """Do nothing, because only sshpyk's persistent kernels need this patch.

        If the patch were applied twice, for example after a crash, it would recurse forever.
        """

    async def poll(self) -> int | None:
        """Return the kernel's exit code, or None if the kernel is still running.

        A single ssh failure makes sshpyk report that the kernel has exited, so poll once more to
        confirm an exit.
        """
        pid, ended = self.rem_pid_k, await super().poll()
        if pid is not None and ended is not None:
            self.rem_pid_k = pid
            ended = await super().poll()
        return None if ended is None else int(ended)

    async def _find(self, environ: Mapping[str, str], failed: Mapping[str, str]) -> str:
        """Reserve GPUs on a host, and configure sshpyk to start the kernel there.

        Args:
            environ: The kernel's environment.
            failed: The hosts to skip, with the reason for each.

        Returns:
            The host's name.

        Raises:
            ReserveGPUError: No host can fulfill the request.
        """
        if os.name == "nt":
            text = (
                "A kernel on another machine needs ssh's ControlMaster, which Windows does not have"
            )
            raise remote_kernel.NoHostError(f"{text}. Use WSL2.")
        start = {
            "id": f"ssh-{uuid.uuid4()}",
            "notebook": environ.get("JPY_SESSION_NAME", ""),
            "machine": procfs.machine_name(),
            "wishes": "\0".join(self.wishes),
        }
        kernel = ["--id", start["id"], "--kernel", self.remote_kernel_name]
        self.ssh_host_alias, python = await asyncio.to_thread(
            remote_kernel.find, resolve(self.hosts), self.wishes, kernel, failed, _lack
        )
        self.ssh = self.ssh or spawn.program("ssh")
        value = jupyter_kernel.encode_description(start)
        # sshpyk does not forward environment variables. But its shell command contains
        # FP_PY="{remote_python}", so the variable can be exported there.
        self.remote_python = f'{python}"; export {settings.STARTED}="{value}'
        return self.ssh_host_alias

    async def _give_up(self) -> None:
        """Kill the kernel if it was started, and clean up."""
        if self.rem_pid_k:
            await self.kill()
        await self.cleanup()
        self.rem_conn_fp = self.rem_conn_info = None


def _lack(name: str) -> str:
    """Return why sshpyk can't start a kernel on a host, or "" if it can."""
    configs = get_local_ssh_configs([spawn.program("ssh")], alias=name)
    checks = [validate_ssh_config(config) for config in configs]
    has_error = any(each[key][0] == "error" for each in checks for key in CONTROL if key in each)
    return NO_CONTROL if has_error else ""
