"""The configuration of a JupyterHub below a base URL, whose users are users of this machine.

HUB_ADDRESS and HUB_PORTS are its address and ports. HUB_FOLDER has a folder for each user.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from jupyterhub.spawner import SimpleLocalProcessSpawner

c: Any = get_config()  # type: ignore[name-defined] # noqa: F821 - JupyterHub defines it
hub_port, proxy_port = os.environ["HUB_PORTS"].split()
folder = os.environ["HUB_FOLDER"]


def prepare(spawner: Any) -> None:
    """Start the server as the user, in the user's folder."""
    user = spawner.user.name
    home = os.path.join(folder, user)
    spawner.cmd = [
        "setpriv", f"--reuid={user}", "--regid=65534", "--clear-groups",
        sys.executable, "-m", "jupyterhub.singleuser",
    ]  # fmt: skip
    spawner.args = ["--LabApp.expose_app_in_browser=True", "--LabApp.news_url=None"]
    spawner.notebook_dir = home
    spawner.environment = {
        name: value for name, value in os.environ.items() if not name.startswith("HUB_")
    } | {"HOME": home, "IPYTHONDIR": os.path.join(home, ".ipython")}


c.JupyterHub.bind_url = os.environ["HUB_ADDRESS"]
c.JupyterHub.hub_port = int(hub_port)
c.JupyterHub.db_url = "sqlite:///:memory:"
c.JupyterHub.authenticator_class = "dummy"
c.Authenticator.allow_all = True
c.ConfigurableHTTPProxy.api_url = f"http://127.0.0.1:{proxy_port}"
c.JupyterHub.spawner_class = SimpleLocalProcessSpawner
c.SimpleLocalProcessSpawner.home_dir_template = os.path.join(folder, "{username}")
c.Spawner.pre_spawn_hook = prepare
c.Spawner.http_timeout = c.Spawner.start_timeout = 60
