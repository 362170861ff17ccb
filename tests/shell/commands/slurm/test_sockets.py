"""The folder of a Slurm kernel's sockets, and the owners of connections."""

from __future__ import annotations

import os
import socket
import stat
from typing import TYPE_CHECKING

import pytest

from reserve_gpu.commands.slurm import socket_owners, sockets
from tests.support.locked import AS_ROOT

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("find", ["ask", "look_up"])
@pytest.mark.parametrize("host", ["127.0.0.1", "::ffff:127.0.0.1"])
def test_owner_of_a_connection(find: str, host: str) -> None:
    """A connection belongs to the user of its other end until this end is closed."""
    finder = getattr(socket_owners, find)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        assert finder(listening.getsockname(), ("0.0.0.0", 0)).state  # noqa: S104
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as connection:
            connection.connect((host, listening.getsockname()[1]))
            accepted, client = listening.accept()
            server = accepted.getsockname()
            assert socket_owners.owner(finder, client, server) == os.geteuid()
            assert socket_owners.owner(finder, client, ("127.0.0.1", 1)) is None
        assert socket_owners.owner(finder, client, server) is None
        accepted.close()


@pytest.mark.parametrize(
    "kind", [pytest.param("other owner", marks=AS_ROOT), "link", "open folder", "file"]
)
def test_folder_of_another_user_is_refused(tmp_path: Path, kind: str) -> None:
    """A missing folder is created, and a folder that is not private is refused."""
    folder, other = tmp_path / "folder", tmp_path / "other"
    for _ in range(2):
        sockets.require_private(str(folder))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.rmdir()
    if kind == "link":
        other.mkdir(0o700)
        folder.symlink_to(other)
    elif kind == "file":
        folder.touch(0o700)
    else:
        folder.mkdir(0o700)
        if kind == "open folder":
            folder.chmod(0o755)
        else:
            os.chown(folder, 65534, 65534)
    with pytest.raises(PermissionError):
        sockets.require_private(str(folder))
