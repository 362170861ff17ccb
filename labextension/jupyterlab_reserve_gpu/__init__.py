"""Entry points of the JupyterLab extension that shows this machine's GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jupyter_server.serverapp import ServerApp


def _jupyter_labextension_paths() -> list[dict[str, str]]:
    return [{"src": "labextension", "dest": "jupyterlab-reserve-gpu"}]


def _jupyter_server_extension_points() -> list[dict[str, Any]]:
    return [{"module": "jupyterlab_reserve_gpu"}]


def _load_jupyter_server_extension(server: ServerApp) -> None:
    """Add the extension's request handlers to a Jupyter server."""
    from jupyterlab_reserve_gpu.handlers import add

    add(server.web_app)
