"""The administrator's rules for real users in real groups, counted by what the kernel knows."""

from __future__ import annotations

import json
import os
import re
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from tests.support import users
from tests.support.machine import ROOT as FOLDER
from tests.support.machine import Child
from tests.support.platforms import CONTAINER, behind
from tests.support.processes import wait_for
from tests.support.reserving import of_gpu
from tests.support.users import DAEMON, NOBODY, ROOT, as_user, child_of
from tests.support.waiters import Waiter, queued

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.machine import Machine

pytestmark = [pytest.mark.xdist_group("users")]

machine = users.machine  # for more than one Unix user
FOUR = "".join(f"gpu\n uuid GPU-0000000{n}-0000-4000-8000-000000000000\n" for n in range(4))
ONE_EACH = "[limits]\ngpus = 1\n"


@contextmanager
def member(machine: Machine, user: str, *groups: str) -> Iterator[Child]:
    """Make a process of that user in these groups; killed at the end."""
    become = ["setpriv", f"--reuid={user}", "--regid=65534", f"--groups={','.join(groups)}"]
    environ = machine.environ(HOME="/nonexistent")
    one = Child(environ, machine.folder, *(become if groups else as_user(user)))
    try:
        yield one
    finally:
        one.kill()


THREE = """
[limits]
gpus = 1
[groups.games]
gpus = 2
[groups.news]
gpus = 3
[users.root]
gpus = 4
"""


@pytest.mark.promise
def test_three_users_and_two_groups(machine: Machine) -> None:
    """Each user has what their own table says, or the most generous of their groups'."""
    machine.write(FOUR)
    machine.rules.write_text(THREE)
    with (
        member(machine, ROOT, "games") as root,
        member(machine, DAEMON, "games", "news") as both,
        member(machine, DAEMON, "games") as games,
        member(machine, NOBODY) as nobody,
    ):
        limits = "reserve_gpu.status().to_dict()['rules']['gpus']"
        assert [c.run(limits).value for c in (root, both, games, nobody)] == [4, 3, 2, 1]
        assert nobody.reserve().value == "0"
        for one, name in ((both, "groups.news"), (games, "groups.games"), (nobody, "limits")):
            most = one.run(limits).value
            refused = one.reserve(f"count={most + 1}")
            assert refused.error == "ImpossibleError"
            assert f"gpus = {most} ([{name}] in {machine.rules})" in refused.text
        assert root.reserve("count=3").value == "1,2,3"
        nobody.run("reserve_gpu.release()")
        assert root.reserve("count=4").value == "0,1,2,3"


def test_only_ones_own_processes_count(machine: Machine) -> None:
    """What other users hold is no part of a user's quota, whatever they write; kill -9 frees it."""
    machine.write(FOUR)
    machine.rules.write_text(ONE_EACH)
    with (
        child_of(machine, NOBODY) as holder,
        child_of(machine, NOBODY) as second,
        child_of(machine, DAEMON) as other,
    ):
        assert other.reserve().value == "0"
        assert holder.reserve("note='mine'").value == "1"
        path = machine.locks / "GPU-00000000-0000-4000-8000-000000000000.lock"
        record = f'{{"user": "{NOBODY}", "pid": {holder.pid}}}'
        other.run(f"open({str(path)!r}, 'w').write({record!r})")
        refused = second.reserve()
        assert refused.error == "NoFreeDeviceError"
        line = refused.text.splitlines()[0]
        assert f"gpus = 1 ([limits] in {machine.rules}). You have GPU1 in " in line
        assert f"(pid {holder.pid})" in line
        assert of_gpu(refused.text, "2").startswith("limited")
        assert second.visible() == ""
        holder.kill()
        assert second.reserve().value == "1"


def test_parts_count_by_the_owner_of_their_files(machine: Machine) -> None:
    """A part counts for its user; a file under that user's number by another user does not."""
    machine.write(FOUR)
    machine.rules.write_text("[limits]\ngpus = 1\n")
    with child_of(machine, NOBODY) as holder, child_of(machine, DAEMON) as other:
        assert holder.reserve("0, memory='4GiB'").value == "0"
        holder.run("reserve_gpu.release()")
        forged = machine.locks / "GPU-00000001-0000-4000-8000-000000000000.share-65534-0.lock"
        other.run(
            f"import fcntl; file = open({str(forged)!r}, 'w'); fcntl.flock(file, fcntl.LOCK_EX); "
            "file.write('{\"part_mib\": 6000}'); file.flush()"
        )
        assert holder.reserve("0, memory='4GiB'").value == "0"
        refused = other.reserve("0, memory='1GiB'")  # whose own file that is, by whatever name
        assert refused.error == "NoFreeDeviceError"
        assert "gpus = 1 ([limits]" in refused.text
        other.run("file.close()")
        assert other.reserve("0, memory='1GiB'").value == "0"


def test_two_at_the_same_moment_never_exceed_it(machine: Machine) -> None:
    """Of a user's processes that ask at once as many get a GPU as the rule says, and no more."""
    machine.write(FOUR)
    machine.rules.write_text("[limits]\ngpus = 2\n")
    children = [child_of(machine, NOBODY) for _ in range(4)]
    with children[0] as a, children[1] as b, children[2] as c, children[3] as d:
        for _ in range(25):
            for one in (a, b, c, d):
                one.send("reserve_gpu.reserve().environ['CUDA_VISIBLE_DEVICES']")
            answers = [one.answer() for one in (a, b, c, d)]
            assert sum(answer.error is None for answer in answers) == 2, answers
            for one in (a, b, c, d):
                one.run("reserve_gpu.release()")


def test_who_waits_for_their_own_quota_keeps_nobody_off(machine: Machine) -> None:
    """Such a waiter has a place and wants nothing; it takes over once the own GPU is released.

    Another user who came later passes it meanwhile.
    """
    machine.rules.write_text(ONE_EACH)
    with (
        child_of(machine, NOBODY) as holder,
        child_of(machine, NOBODY) as second,
        child_of(machine, DAEMON) as other,
        child_of(machine, ROOT) as root,
    ):
        assert holder.reserve().value == "0"
        waiter = Waiter(machine, second)
        waiter.sees(1, "reserved", "limited")
        assert other.reserve().value == "1"  # at once, though the first one waits
        later = Waiter(machine, root)
        later.sees(2, "reserved", "reserved")
        assert queued(machine) == [waiter.pid, later.pid]
        other.run("reserve_gpu.release()")
        assert later.answer().value == "1"
        holder.run("reserve_gpu.release()")
        assert waiter.answer().value == "0"
        assert queued(machine) == []


def wants(machine: Machine, waiter: Waiter) -> list[str]:
    """Return what others read that somebody in the queue wants."""
    records = [json.loads(path.read_text() or "{}") for path in machine.locks.glob("queue-*.lock")]
    (record,) = (record for record in records if record.get("pid") == waiter.pid)
    listed: list[str] = record["wants"]
    return listed


def test_a_waiter_whose_quota_is_full_meanwhile_wants_nothing(machine: Machine) -> None:
    """Once another process of the same user got a GPU, who waits leaves the next one to others."""
    machine.rules.write_text(ONE_EACH)
    with (
        child_of(machine, ROOT) as root,
        child_of(machine, DAEMON) as daemon,
        child_of(machine, NOBODY) as one,
        child_of(machine, NOBODY) as second,
    ):
        assert root.reserve().value == "0"
        assert daemon.reserve().value == "1"
        first, waiter = Waiter(machine, one), Waiter(machine, second)
        assert wants(machine, waiter) == users.UUIDS
        root.run("reserve_gpu.release()")
        assert first.answer().value == "0"
        wait_for(lambda: wants(machine, waiter) == users.UUIDS[:1])
        one.run("reserve_gpu.release()")
        assert waiter.answer().value == "0"


@pytest.mark.full
def test_a_waiters_rules_may_change(machine: Machine) -> None:
    """Who waits is bound by the file as it is now: one that is more generous ends the wait."""
    machine.rules.write_text(ONE_EACH)
    with child_of(machine, NOBODY) as holder, child_of(machine, NOBODY) as second:
        assert holder.reserve().value == "0"
        waiter = Waiter(machine, second)
        waiter.sees(1, "reserved", "limited")
        machine.rules.write_text("[limits]\ngpus = 2\n[devices]\ndrain = [1]\n")
        waiter.sees(1, "reserved", "drained")
        machine.rules.write_text("")
        assert waiter.answer().value == "1"


def test_a_wait_says_that_it_is_for_ones_own_quota(machine: Machine) -> None:
    """What is shown in a wait names the rule, and where the user has what counts."""
    machine.rules.write_text(ONE_EACH)
    with child_of(machine, NOBODY) as holder, child_of(machine, NOBODY) as second:
        assert holder.reserve().value == "0"
        second.run(
            "from reserve_gpu.render.pictures import wait\n"
            "def see(waiting):\n    raise InterruptedError(wait(waiting).brief)"
        )
        brief = second.run("reserve_gpu.reserve(wait='1m', progress=see)").text
        assert "Waiting for a GPU: next in the queue" in brief
        assert "gpus = 1 ([limits]" in brief
        assert re.search(rf"You have GPU0 in python\d* child.py \(pid {holder.pid}\)\.", brief)


def test_a_file_must_be_roots_or_ones_own(machine: Machine) -> None:
    """A file that another user than root has made counts for that user alone."""
    machine.rules.write_text(ONE_EACH)
    os.chown(machine.rules, 65534, -1)
    limits = "[(r := reserve_gpu.status().to_dict()['rules'])['gpus'], *r['problems']]"
    with child_of(machine, NOBODY) as nobody, child_of(machine, DAEMON) as daemon:
        assert nobody.run(limits).value == [1]
        (gpus, problem) = daemon.run(limits).value
        assert gpus is None
        assert problem.endswith("it belongs to nobody, but must belong to root or daemon.")


# A fresh /etc, and users who are there for the test alone.
FRESH = """
set -e
cp -a /etc etc && mount --bind etc /etc && rm -f /etc/reserve_gpu.toml
groupadd students && useradd -G students alice && useradd -G students bob && useradd carol
mkdir bin
printf '#!/bin/sh\nexec "$@"\n' >bin/sudo
printf '#!/bin/sh\nexec "%s" -m reserve_gpu "$@"\n' "$PYTHON" >bin/reserve-gpu
chmod 755 bin bin/*; export PATH="$PWD/bin:$PATH"
{typed}
for user in alice bob carol; do
    setpriv --reuid=$user --regid=65534 --init-groups "$PYTHON" -m reserve_gpu status
done
"""


def test_the_administrators_page_can_be_typed(machine: Machine) -> None:
    """What docs/rules.md says works word for word, with the file where it is."""
    machine.write("gpu\n uuid GPU-8f2a0000-0000-4000-8000-000000000000\ngpu\n")
    page = (FOLDER / "docs" / "rules.md").read_text()
    (typed,) = (block for block in re.findall("```sh\n(.*?)```", page, re.DOTALL) if "tee" in block)
    script = FRESH.replace("{typed}", typed)
    done = machine.command(
        "unshare", "--mount", "sh", "-c", script, RESERVE_GPU_CONFIG="", PYTHON=sys.executable
    )  # fmt: skip
    if done.returncode and "unshare" in done.stderr:
        pytest.skip(f"no mount namespace here: {done.stderr}")
    assert done.returncode == 0, done.stderr
    for user, gpus in (("root", "2 GPUs"), ("alice", "4 GPUs"), ("bob", "1 GPU"), ("carol", "2 G")):
        assert f"Rules for {user} (/etc/reserve_gpu.toml): {gpus}" in done.stdout
    assert done.stdout.count("Maintenance on Friday at 17:00\n1 of 2 GPUs is free: GPU1.") == 4
    assert "Warning" not in done.stdout


def test_a_user_without_a_name_is_bound(machine: Machine) -> None:
    """Where the system has no name for a user, as in containers, numbers and [limits] hold."""
    rules = "[limits]\ngpus = 2\n[users.54321]\ngpus = 1\n[groups.54322]\nidle = '1h'"
    machine.rules.write_text(rules)
    become = ["setpriv", "--reuid=54321", "--regid=54322", "--clear-groups"]
    one = Child(machine.environ(HOME="/nonexistent"), machine.folder, *become)
    try:
        assert one.reserve("count=2").error == "ImpossibleError"
        assert one.reserve().value == "0"
        assert one.run("reserve_gpu.current().lease.idle_s").value == 3600
        assert "Rules for uid 54321" in one.run("str(reserve_gpu.status())").value
    finally:
        one.kill()


def test_in_a_container_parts_count_and_whole_gpus_do_not(machine: Machine) -> None:
    """From another PID namespace whose process has a whole GPU is not seen; whose file, it is."""
    machine.write(FOUR)
    machine.rules.write_text("[limits]\ngpus = 1\n")
    with machine.child() as outside, behind(machine, *CONTAINER) as inside:
        assert outside.reserve("0").value == "0"
        assert inside.reserve().value == "1"
        inside.run("reserve_gpu.release()")
        assert outside.reserve("0, memory='1GiB'").value == "0"
        assert inside.reserve("1").error == "NoFreeDeviceError"
        assert inside.reserve("0, memory='1GiB'").value == "0"
