"""The messages of `reserve-gpu setup`."""

from __future__ import annotations

import fcntl
import os
import sys
from typing import TYPE_CHECKING

import pytest

from reserve_gpu.commands.setup import find_extension, setup
from reserve_gpu.commands.setup.config_file import Config, SetupError, added
from reserve_gpu.model.errors import RequestError
from tests.support.locked import watched
from tests.support.profiles import BLOCK_OF_ANOTHER, OLD_BLOCK, OWN_LINE

if TYPE_CHECKING:
    from collections.abc import Callable

    from syrupy.assertion import SnapshotAssertion

    from tests.support.profiles import Home

PYTHON = b"/one/bin/python3.11"
BLOCK = added(b"", PYTHON)


def text_of(config: Config) -> str:
    """Return the output or the error of `--undo`, with FILE for the path of the file."""
    try:
        text = "\n".join(config.remove())
    except SetupError as error:
        text = str(error)
    return text.replace(config.path, "FILE")


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"x = 1\n" + BLOCK, id="lines removed"),
        pytest.param(OLD_BLOCK, id="file removed"),
        pytest.param(BLOCK.replace(b"import", b"x = 1\nimport", 1), id="1 user line between"),
        pytest.param(BLOCK_OF_ANOTHER, id="lines for another Python"),
        pytest.param(OWN_LINE, id="own line"),
        pytest.param(BLOCK + b"    x = 1\n", id="refused because of an indented line"),
        pytest.param(
            BLOCK + b"x = importlib.util\nimport importlib\n", id="refused because of an import"
        ),
        pytest.param(
            BLOCK + "# coding: latin-1\nx = '\xe9'\n".encode(), id="refused because edited"
        ),
        pytest.param(b" " * (1 << 20) + b" ", id="too large"),
    ],
)
def test_undo(data: bytes, home: Home, snapshot: SnapshotAssertion) -> None:
    home.write(data)
    assert text_of(Config(str(home.config), PYTHON)) == snapshot


def test_file_that_cannot_be_created(home: Home, snapshot: SnapshotAssertion) -> None:
    home.config.mkdir(parents=True)
    with pytest.raises(SetupError) as error:
        Config(str(home.config), PYTHON).check_add()
    assert str(error.value).replace(str(home.config), "FILE") == snapshot


def error_of(change: Callable[[], object], home: Home) -> str:
    """Return the text of the error, with HOME for the home directory."""
    with pytest.raises((SetupError, RequestError)) as error:
        change()
    return str(error.value).replace(str(home.path), "HOME")


def test_change_that_fails(home: Home, snapshot: SnapshotAssertion) -> None:
    def fill_disk(event: str, _: object) -> None:
        if event == "os.rename":
            raise OSError(28, "No space left on device")

    config = Config(str(home.config), PYTHON)
    folder = os.open(home.write(BLOCK).parent, os.O_RDONLY)
    with watched(fill_disk):
        texts = [error_of(config.remove, home)]
        home.write(b"x = 1")
        texts.append(error_of(config.add, home))
    with watched(lambda event, _: event == "os.rename" and home.write(b"y = 2")):
        texts.append(error_of(config.add, home))
    fcntl.flock(folder, fcntl.LOCK_EX)  # as another run does
    texts.append(error_of(config.add, home))
    os.close(folder)
    assert "\n".join(texts) == snapshot


def test_conflicting_setting(
    home: Home, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(home.path / ".ipython"))
    kernel = find_extension.kernel_class()
    home.write(b"get_config().IPKernelApp.extensions.append('x')")
    text = find_extension.appending_setting(kernel())
    home.write(b"get_config().IPKernelApp.extensions = ['x']")
    text += f"\n{find_extension.replacing_setting(kernel())}"
    assert text.replace(str(home.path), "HOME") == snapshot


def test_setup_in_an_environment(
    home: Home, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    (home.path / "uv-receipt.toml").touch()
    home.path.joinpath(".ipython").touch()
    for name, value in (("PATH", "/nowhere"), ("IPYTHONDIR", "~no-such-user")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "prefix", str(home.path))
    monkeypatch.setattr(sys, "executable", "/opt/bin/python")
    monkeypatch.setitem(sys.modules, "ipykernel", None)
    add = Config(str(home.config), PYTHON).add
    checks = (setup._require_ipython_user, setup.ipython_directory, add)
    done = setup._done(f"Nothing was changed. {setup.ALREADY}", "IPython or a Jupyter kernel")
    assert "\n".join([*(error_of(check, home) for check in checks), done.text]) == snapshot
