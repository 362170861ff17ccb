"""Messages about the GPUs that a Jupyter kernel has at startup or after a restart."""

from __future__ import annotations

from contextlib import suppress

from reserve_gpu import api
from reserve_gpu.model import errors
from reserve_gpu.model.untrusted import sanitize
from reserve_gpu.render import phrases, pictures
from reserve_gpu.render.frontends import MAGIC, for_this_process
from reserve_gpu.reservation import status
from reserve_gpu.reservation.session import session
from reserve_gpu.system import jupyter_kernel, procfs


def show_kept() -> None:
    """Show the devices that were kept for this Jupyter kernel during its restart."""
    if text := api.kept():
        pictures.tell(pictures.of_text(text))


def show_start() -> None:
    """Show the devices that this Jupyter kernel was started with, or explain why it has none."""
    if reason := session().reason:
        picture = pictures.of_text(reason)
        with suppress(errors.DriverError):  # the reason already mentions the driver's error
            picture = status.status()._replace(frontend=for_this_process(MAGIC)).picture()
            picture = picture.below(reason.splitlines())
        pictures.tell(picture)
    elif held := api.current():
        devices = [f"{device.label} ({sanitize(device.name or '?')})" for device in held.devices]
        place = f"runs on {sanitize(procfs.machine_name())} and " if jupyter_kernel.origin() else ""
        pictures.tell(f"This kernel {place}has {phrases.listed(devices)}.")
        api.show_reserved()
