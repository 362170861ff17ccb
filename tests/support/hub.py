"""Start a command as JupyterHub starts a user's server, print its state, and stop it."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from jupyterhub import orm
from jupyterhub.objects import Hub, Server
from jupyterhub.spawner import SimpleLocalProcessSpawner
from jupyterhub.user import User


async def main() -> None:
    database = orm.new_session_factory(url="sqlite:///:memory:")()
    owner = orm.User(name="user")
    database.add(owner)
    database.commit()
    spawner = User(owner)._new_spawner("", spawner_class=SimpleLocalProcessSpawner, hub=Hub())
    spawner.server = Server()
    spawner.home_dir_template = os.getcwd()
    spawner.env_keep = [*spawner.env_keep, *os.environ]  # with the variables of the stand-in driver
    spawner.cmd = sys.argv[1:]
    await spawner.start()
    started = await asyncio.to_thread(Path("started").read_text)  # a pipe
    print(spawner.pid, await spawner.poll(), started)
    await spawner.stop()
    print(await spawner.poll() is None)


asyncio.run(main())
