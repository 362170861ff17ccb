"""Tests of the number of lookups of users and groups in a process."""

from __future__ import annotations

import os
import pwd
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.here import Here

# Logs each lookup to a file, as a directory server would see it.
LOG_LOOKUPS = """
import grp, os, pwd, sys
file = open("lookups", "w", buffering=1)
def log(module, name):
    look_up = getattr(module, name)
    def look_up_and_log(*arguments):
        print(name, arguments[0], file=file)
        return look_up(*arguments)
    setattr(module, name, look_up_and_log)
log(pwd, "getpwuid")
log(grp, "getgrnam")
log(os, "getgrouplist")
"""
WITHOUT_HOME = "os.environ.pop('HOME', None)\n"
COMMAND = "from reserve_gpu.cli import main; sys.exit(main.main({words}))"
NOTEBOOK = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
for line in ("%load_ext reserve_gpu", "%reserve_gpu", "%reserve_gpu --status"):
    assert shell.run_cell(line).success
"""


@pytest.mark.parametrize(
    "code",
    [
        COMMAND.format(words=["status"]),
        WITHOUT_HOME + COMMAND.format(words=["run", "true"]),
        NOTEBOOK,
    ],
    ids=["status", "run without $HOME", "notebook"],
)
def test_each_user_is_looked_up_once(here: Here, code: str) -> None:
    """A process looks up each user and group once, even if the user holds several GPUs."""
    here.write("gpu\n" * 4)
    here.rules.write_text("[limits]\ngpus = 9\n[groups.adm]\ngpus = 8\n[groups.nosuch]\ngpus = 7")
    with here.rival("0"), here.rival("1"), here.rival("2"):
        done = here.python(LOG_LOOKUPS + code)
    assert done.returncode == 0, done.stderr
    user = pwd.getpwuid(os.geteuid()).pw_name
    assert sorted((here.folder / "lookups").read_text().splitlines()) == [
        *("getgrnam adm", "getgrnam nosuch"),
        f"getgrouplist {user}",
        f"getpwuid {os.geteuid()}",
    ]
