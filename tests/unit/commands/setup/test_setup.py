"""`reserve-gpu setup`: its output, the place of the file, and what it refuses."""

from __future__ import annotations

import os
import pwd
import warnings
from typing import TYPE_CHECKING

import pytest

from reserve_gpu.commands.setup import setup
from reserve_gpu.model.errors import RequestError

if TYPE_CHECKING:
    from pathlib import Path

USER = pwd.getpwuid(os.geteuid()).pw_name


# -- the place of the file -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    ["home", "no HOME", "IPYTHONDIR", "relative", "tilde", "user", "dots", "XDG", "XDG and home",
     "XDG link"],
)  # fmt: skip
def test_same_directory_as_ipython(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is in the directory that IPython.paths.get_ipython_dir returns."""
    from IPython.paths import get_ipython_dir

    home = tmp_path / "home"
    (home / "here").mkdir(parents=True)
    monkeypatch.chdir(home / "here")
    monkeypatch.setenv("HOME", str(home))
    for name in ("IPYTHONDIR", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    starts = {
        "IPYTHONDIR": str(home),
        "relative": "..",
        "no HOME": str(home),
        "tilde": "~",
        "user": f"~{USER}/{os.path.relpath(home, pwd.getpwnam(USER).pw_dir)}",
        "dots": f"{home}/./x/..//",
    }
    if case in starts:
        monkeypatch.setenv("IPYTHONDIR", f"{starts[case]}/ipython dir" + "/" * (case == "dots"))
    if case == "no HOME":
        monkeypatch.delenv("HOME")
    if case.startswith("XDG"):
        monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "xdg"))
        (home / "elsewhere").mkdir()
        (home / "xdg").mkdir()
        if case == "XDG link":
            (home / "xdg" / "ipython").symlink_to("../elsewhere")
        else:
            (home / "xdg" / "ipython").mkdir()
    if case == "XDG and home":
        (home / ".ipython").mkdir()
    ours = setup.ipython_directory()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = get_ipython_dir()  # IPython 7 moves the XDG directory
    moved = str(home / ".ipython") if case == "XDG" and not os.path.exists(ours) else ours
    assert os.path.realpath(moved) == os.path.realpath(theirs)


def test_no_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a home directory, one line names the variables to set."""
    monkeypatch.setenv("IPYTHONDIR", "~no-such-user/ipython")
    with pytest.raises(RequestError, match="Set HOME or IPYTHONDIR"):
        setup.ipython_directory()
