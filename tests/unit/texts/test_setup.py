"""The messages of `reserve-gpu setup`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from reserve_gpu.commands.setup.config_file import Config, SetupError, added
from tests.support.profiles import BLOCK_OF_ANOTHER, OLD_BLOCK, OWN_LINE

if TYPE_CHECKING:
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
