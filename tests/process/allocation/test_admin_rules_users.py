"""The administrator's rules for several Unix users, counted by the kernel's lock list."""

from __future__ import annotations

import os
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import pytest

from tests.support import users
from tests.support.machine import Child
from tests.support.platforms import CONTAINER, behind
from tests.support.reserving import of_gpu
from tests.support.users import DAEMON, NOBODY, ROOT, as_user, child_of
from tests.support.waiters import Waiter, queued

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.machine import Machine

pytestmark = [pytest.mark.xdist_group("users")]

machine = users.machine  # for more than one Unix user
FOUR = "".join(f"gpu\n uuid GPU-0000000{n}-0000-4000-8000-000000000000\n" for n in range(4))
ONE_GPU = "[limits]\ngpus = 1\n"


@contextmanager
def member(machine: Machine, user: str, *groups: str) -> Iterator[Child]:
    """Run a process of a user in these groups, until the end of the block."""
    become = ["setpriv", f"--reuid={user}", "--regid=65534", f"--groups={','.join(groups)}"]
    environ = machine.environ(HOME="/nonexistent")
    one = Child(environ, machine.folder, *(become if groups else as_user(user)))
    try:
        yield one
    finally:
        one.kill()


TABLES = """
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
def test_each_user_has_the_limits_of_the_most_specific_table(machine: Machine) -> None:
    """Users have their own limit, or the most generous limit of their groups."""
    machine.write(FOUR)
    machine.rules.write_text(TABLES)
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


def test_only_the_users_own_processes_count(machine: Machine) -> None:
    """A record by another user does not count, and a killed process no longer counts."""
    machine.write(FOUR)
    machine.rules.write_text(ONE_GPU)
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
        assert f"gpus = 1 ([limits] in {machine.rules}). You have GPU1 in " in refused.text
        assert f"(pid {holder.pid})" in refused.text.splitlines()[0]
        assert of_gpu(refused.text, "2").startswith("limited")
        assert second.visible() == ""
        holder.kill()
        assert second.reserve().value == "1"


def test_a_part_counts_for_the_owner_of_its_lock_file(machine: Machine) -> None:
    """A file named with another user's UID counts for the user who owns the file."""
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
        refused = other.reserve("0, memory='1GiB'")
        assert refused.error == "NoFreeDeviceError"
        assert "gpus = 1 ([limits]" in refused.text
        other.run("file.close()")
        assert other.reserve("0, memory='1GiB'").value == "0"


def test_simultaneous_requests_never_exceed_the_quota(machine: Machine) -> None:
    """As many of four simultaneous requests succeed as the rule allows."""
    machine.write(FOUR)
    machine.rules.write_text("[limits]\ngpus = 2\n")
    with ExitStack() as stack:
        children = [stack.enter_context(child_of(machine, NOBODY)) for _ in range(4)]
        for _ in range(25):
            for child in children:
                child.send("reserve_gpu.reserve().environ['CUDA_VISIBLE_DEVICES']")
            answers = [child.answer() for child in children]
            assert sum(answer.error is None for answer in answers) == 2, answers
            for child in children:
                child.run("reserve_gpu.release()")


def test_a_waiter_at_its_quota_keeps_no_gpu_from_others(machine: Machine) -> None:
    """Another user's later request passes the waiter, which gets the user's released GPU."""
    machine.rules.write_text(ONE_GPU)
    with (
        child_of(machine, NOBODY) as holder,
        child_of(machine, NOBODY) as second,
        child_of(machine, DAEMON) as other,
        child_of(machine, ROOT) as root,
    ):
        assert holder.reserve().value == "0"
        waiter = Waiter(machine, second)
        waiter.sees(1, "reserved", "limited")
        assert other.reserve().value == "1"
        later = Waiter(machine, root)
        later.sees(2, "reserved", "reserved")
        assert queued(machine) == [waiter.pid, later.pid]
        other.run("reserve_gpu.release()")
        assert later.answer().value == "1"
        holder.run("reserve_gpu.release()")
        assert waiter.answer().value == "0"
        assert queued(machine) == []


def test_a_file_must_belong_to_root_or_to_the_user(machine: Machine) -> None:
    """A file of another user applies to that user alone."""
    machine.rules.write_text(ONE_GPU)
    os.chown(machine.rules, 65534, -1)
    limits = "[(r := reserve_gpu.status().to_dict()['rules'])['gpus'], *r['problems']]"
    with child_of(machine, NOBODY) as nobody, child_of(machine, DAEMON) as daemon:
        assert nobody.run(limits).value == [1]
        (gpus, problem) = daemon.run(limits).value
        assert gpus is None
        assert "it belongs to nobody" in problem


def test_only_parts_count_across_pid_namespaces(machine: Machine) -> None:
    """A container hides the locks of processes outside, but not the owners of files."""
    machine.write(FOUR)
    machine.rules.write_text("[limits]\ngpus = 1\n")
    with machine.child() as outside, behind(machine, *CONTAINER) as inside:
        assert outside.reserve("0").value == "0"
        assert inside.reserve().value == "1"
        inside.run("reserve_gpu.release()")
        assert outside.reserve("0, memory='1GiB'").value == "0"
        assert inside.reserve("1").error == "NoFreeDeviceError"
        assert inside.reserve("0, memory='1GiB'").value == "0"
