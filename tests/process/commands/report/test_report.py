"""`reserve-gpu report`: what is read of histories, what it sums up to, and how it is shown."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from typing import TYPE_CHECKING

import pytest
import wcwidth

from tests.support.histories import (
    DAY_S,
    FIRST_UID,
    HOUR_S,
    Histories,
    Stay,
    month_file,
)
from tests.support.hosts import Hosts, needs_ssh
from tests.support.locked import needs_root
from tests.support.users import DAEMON, NOBODY, as_user, for_users

if TYPE_CHECKING:
    from collections.abc import Iterator
    from subprocess import CompletedProcess

    from tests.support.here import Here
    from tests.support.machine import Machine

from tests.support.report import line, sums

AT = 1761300000 - 1761300000 % HOUR_S  # 2025-10-24, at the beginning of an hour
NOW = AT + 30 * DAY_S


@pytest.mark.parametrize(
    ("first", "day", "hours"),
    [(1761429600, "2025-10-26", 25.0), (1743289200, "2025-03-30", 23.0)],
    ids=["autumn", "spring"],
)
def test_the_change_of_the_clocks(
    kept: Histories, here: Here, first: int, day: str, hours: float
) -> None:
    """A reservation of a whole day in Berlin has 25 hours when clocks go back, 23 when forth."""
    kept.write(Stay(0, 0, first, int(hours) * HOUR_S).lines())
    words = ("report", "--json", "--by", "day", "--since", f"@{first - 3 * DAY_S}")
    done = here.command(
        sys.executable, "-m", "reserve_gpu", *words, TZ="Europe/Berlin",
        RESERVE_GPU_HISTORY=str(kept.folder),
    )  # fmt: skip
    found = {row["name"]: row["reserved_hours"] for row in json.loads(done.stdout)["rows"]}
    assert found == {day: hours}


@needs_root
def test_a_file_of_another_owner_is_not_read(kept: Histories) -> None:
    """A file that another user has put into a folder says nothing of who owns the folder."""
    kept.write([line()], FIRST_UID)
    os.chown(month_file(kept.of(FIRST_UID), AT), FIRST_UID + 1, FIRST_UID)
    kept.write([line(id="b2")], FIRST_UID + 2)
    assert set(sums().rows) == {f"uid {FIRST_UID + 2}"}


@needs_root
def test_a_folder_under_another_name_is_not_read(kept: Histories) -> None:
    """Nobody can write the history of another user: a folder is its owner's alone."""
    kept.write([line()], FIRST_UID)
    (kept.folder / str(FIRST_UID)).rename(kept.folder / str(FIRST_UID + 5))
    assert sums().rows == {}


WRITE = """
import os, time
from reserve_gpu.log import log_writer, places
from reserve_gpu.log.log_lines import TEXT_LIMIT, Kind, LogLine
at = time.time() - 7200
folder = places.to_write(None)
page = log_writer.Page.new(os.dup(folder))
lines = [LogLine(Kind.RESERVED, "a1", at, at, at + 3600, 3600.0, 3600.0, 0.0, gpu="GPU-1")]
page.write(lines)
page.turn(lines)
page.write([lines[0]._replace(start=at + 3600, seconds=1800.0, used_s=0.0, idle_s=1800.0)])
"""


@pytest.mark.xdist_group("users")
def test_users_read_their_own_alone() -> None:
    """Root reads the history of all users, and they can't read each other's."""
    with for_users() as machine:
        made = Histories(machine.folder / "history")
        extra = {"RESERVE_GPU_HISTORY": str(made.folder), "HOME": "/nonexistent"}

        def run(user: str, *words: str) -> str:
            done = machine.command(*as_user(user), sys.executable, *words, **extra)
            assert done.returncode == 0, done.stderr
            return done.stdout

        for user in (NOBODY, DAEMON):
            run(user, "-c", WRITE)
        found = {
            user: json.loads(run(user, "-m", "reserve_gpu", "report", "--json"))
            for user in ("root", NOBODY, DAEMON)
        }
        rows = {
            user: {row["name"]: row["reserved_hours"] for row in each["rows"]}
            for user, each in found.items()
        }
        both = {NOBODY: 1.5, DAEMON: 1.5}
        assert rows == {"root": both, NOBODY: {NOBODY: 1.5}, DAEMON: {DAEMON: 1.5}}
        assert [each["user"] for each in found.values()] == [None, NOBODY, DAEMON]
        folder = next(path for path in made.folder.iterdir() if path.owner() == DAEMON)
        code = f"import os; print(os.access({str(folder)!r}, os.R_OK | os.X_OK))"
        assert run(NOBODY, "-c", code) == "False\n"
        assert "This covers only nobody." in run(NOBODY, "-m", "reserve_gpu", "report")


STYLED = re.compile("\x1b\\[[0-9;]*m")


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_on_a_terminal(kept: Histories, here: Here, columns: int) -> None:
    """On a terminal of that width it has colours, and no line is broken."""
    pexpect = pytest.importorskip("pexpect")
    now = time.time()
    for number in range(3):
        name = f"{'long/' * number}train.ipynb"
        kept.write([line(start=now - 60, id=name, name=name)])
    text, code = pexpect.run(
        f"{sys.executable} -m reserve_gpu report --by notebook", withexitstatus=True,
        env=here.environ(TERM="xterm", NO_COLOR="", RESERVE_GPU_HISTORY=str(kept.folder)),
        dimensions=(24, columns), encoding="utf-8",
    )  # fmt: skip
    assert code == 0, text
    assert "\x1b[1m3.0 GPU-hours reserved" in text
    assert "\x1b[32m\N{FULL BLOCK}" in text
    assert all(wcwidth.wcswidth(STYLED.sub("", each)) <= columns for each in text.split("\r\n"))


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Make two hosts with histories, an older one, and one that hangs."""
    folder = tmp_path_factory.mktemp("hosts")
    old = folder / "old"
    old.mkdir()
    (old / "reserve-gpu").write_text("#!/bin/sh\necho 'There is no command report.' >&2; exit 2\n")
    (old / "reserve-gpu").chmod(0o755)
    with Hosts(folder, "lab1", "lab2", "lab3", "lab4", paths={"lab3": f"{old}:/usr/bin"}) as lab:
        for number, name in enumerate(("lab1", "lab2"), 1):
            note_there(lab.machines[name], number)
        lab.freeze("lab4")
        yield lab


NOTE = """
import os, time
from reserve_gpu.log import log_writer, places
from reserve_gpu.log.log_lines import TEXT_LIMIT, Kind, LogLine
at = time.time() - 7200
log_writer.append(places.to_write(None), [
    LogLine(Kind.RESERVED, f"a{n}", at, at, at + 3600, 3600.0, 0.0, 3600.0, gpu="GPU-1",
            label="GPU0", name=f"lab{HOURS}.ipynb") for n in range(HOURS)])
"""


def note_there(machine: Machine, hours: int) -> None:
    """Let so many GPU-hours be logged on a host, in the home of who asks."""
    own = machine.home / ".config"
    own.mkdir(exist_ok=True)
    (own / "reserve_gpu.toml").write_text("history = true\n")
    name = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', machine.folder.name]
    prefix = name if not os.geteuid() else []
    code = NOTE.replace("HOURS", str(hours))
    done = machine.command(*prefix, sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr


@pytest.mark.full
@needs_ssh
@pytest.mark.xdist_group("hosts")
class TestOverSsh:
    """Real servers, each with a history of its own."""

    def ask(self, lab: Hosts, *words: str) -> CompletedProcess[str]:
        return lab.asking.command(sys.executable, "-m", "reserve_gpu", "report", *words)

    def test_hosts_are_one_report(self, lab: Hosts) -> None:
        """Hosts are summed up; each that does not answer is a line with a way out."""
        done = self.ask(lab, "--hosts", "lab[1-4]", "--by", "notebook")
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("3.0 GPU-hours reserved in the last 7 days, 3.0 of them idle")
        assert "lab3: There is no command report" in done.stdout
        assert "lab4: no answer within 5 s. Try: ssh lab4" in done.stdout
        assert "lab1.ipynb" in done.stdout

    def test_gpus_have_the_name_of_their_host(self, lab: Hosts) -> None:
        """Each GPU is a row with the host's name, in JSON too, where problems are a list."""
        said = json.loads(
            self.ask(lab, "--json", "--by", "gpu", "--hosts", "lab1,lab2,lab3").stdout
        )
        rows = {row["name"]: row["reserved_hours"] for row in said["rows"]}
        assert rows == {"lab1:GPU0": 1, "lab2:GPU0": 2}
        assert [each["host"] for each in said["problems"]] == ["lab3"]
        assert said["longest_idle"][0]["gpus"] in (["lab1:GPU0"], ["lab2:GPU0"])

    def test_nobody_answers(self, lab: Hosts) -> None:
        """If no host answers, the exit code says so."""
        assert self.ask(lab, "--hosts", "lab3").returncode == 69
