"""`reserve-gpu setup` finds the directory of IPython's profiles."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING

import pytest

from reserve_gpu.commands.setup import setup
from reserve_gpu.model.errors import RequestError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("variables", "folders"),
    [
        pytest.param({}, [], id="home"),
        pytest.param({"IPYTHONDIR": "~/ipython"}, [], id="tilde"),
        pytest.param({"XDG_CONFIG_HOME": "{home}/xdg"}, ["xdg/ipython"], id="XDG"),
        pytest.param(
            {"XDG_CONFIG_HOME": "{home}/xdg"}, ["xdg/ipython", ".ipython"], id="XDG and home"
        ),
        pytest.param({"XDG_CONFIG_HOME": "{home}/xdg"}, ["xdg", "elsewhere"], id="XDG link"),
    ],
)
def test_directory_is_the_same_as_ipython_s(
    variables: dict[str, str], folders: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result equals that of IPython.paths.get_ipython_dir."""
    from IPython.paths import get_ipython_dir

    home = tmp_path / "home"
    for folder in ("here", *folders):
        (home / folder).mkdir(parents=True)
    if "elsewhere" in folders:
        (home / "xdg" / "ipython").symlink_to("../elsewhere")
    monkeypatch.chdir(home / "here")
    for name in ("IPYTHONDIR", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "{home}", **variables}.items():
        monkeypatch.setenv(name, value.format(home=home))
    ours = setup.ipython_directory()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = get_ipython_dir()  # IPython 7 moves the XDG directory
    if folders == ["xdg/ipython"] and not os.path.exists(ours):
        ours = str(home / ".ipython")
    assert os.path.realpath(ours) == os.path.realpath(theirs)


def test_user_without_a_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IPYTHONDIR", "~no-such-user/ipython")
    with pytest.raises(RequestError, match="Set HOME or IPYTHONDIR"):
        setup.ipython_directory()
