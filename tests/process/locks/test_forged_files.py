"""Files, locks and links of another user in the lock directory change no decision."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.locked import FORGED_VALUES, RECORD_FIELDS
from tests.support.machine import UUIDS
from tests.support.users import DAEMON, NOBODY, Users, as_user, child_of, for_users

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.machine import Answer, Child

# Returns the facts and decisions that the files' owner derives from the lock directory.
DECISIONS = """
import json, os
import reserve_gpu
from reserve_gpu.allocation import snapshot; from reserve_gpu.system import procfs
from reserve_gpu.reservation import joining
from reserve_gpu.gpus.nvml import Nvml
from reserve_gpu.locks.directory import LockDirectory
from reserve_gpu.model.devices import Device; from reserve_gpu.model.holders import Reserved

def decisions(uid):
    with LockDirectory() as locks, Nvml() as gpus:
        devices = [device for device in gpus.walk() if isinstance(device, Device)]
        uuids = [device.uuid for device in devices]
        with locks.mutex():
            holders = {uuid: locks.holders_of(uuid) for uuid in uuids}
            numbers = sorted(locks.listed_numbers())
            counted = [holder.file for holder in locks.holders_by(uid, uuids)]
            tickets = [ticket.name for ticket in locks.tickets()]
        rows = snapshot.take_snapshot(gpus).rows
        joined = []
        for reserved in Reserved.among(rows):
            if reserved.holder.uid == os.geteuid():
                with locks.mutex():
                    held = joining.joined(reserved, locks)
                for lock in held.locks.values():
                    lock.release()
                joined.append((held.joined, held.lease.until, [d.uuid for d in held.devices]))
    facts = [
        (h.file, h.uid, h.listed_pid, h.memory_limit_mib, h.record, h.record_owner)
        for every in holders.values() for h in every
    ]
    seen = [(row.label, row.state.name, row.promisable_mib, len(row.holders)) for row in rows]
    return repr((facts, numbers, counted, tickets, seen, joined))
"""


pytestmark = [pytest.mark.xdist_group("users")]
whole_and_part = pytest.mark.parametrize(
    "request_text", ["'0'", "'0', memory='1GB'"], ids=["whole", "part"]
)


@pytest.fixture(scope="module")
def three() -> Iterator[Users]:
    """Start two processes of a user and one of another user, on a machine with two GPUs."""
    with (
        for_users() as machine,
        child_of(machine, NOBODY) as nobody,
        child_of(machine, NOBODY) as second,
        child_of(machine, DAEMON) as daemon,
    ):
        yield Users(machine, {NOBODY: nobody, "second": second, DAEMON: daemon})


@pytest.fixture
def users(three: Users) -> Iterator[Users]:
    """Return the three processes; none of them holds a GPU."""
    three.forget()
    yield three
    three.machine.rules.unlink(missing_ok=True)


# A child of the attacker acquires a lock and ends; a grandchild keeps the descriptor open.
LOCK_AND_DIE = """
def lock_and_die(file):
    child = os.fork()
    if not child:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.fork():
                time.sleep(60)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(file)
"""


def attack_with(child: Child, code: str) -> Answer:
    """Run the code of an attack; the kernel may refuse it."""
    return child.run(
        "import fcntl, json, os, stat, time\n"
        f"{LOCK_AND_DIE}"
        "from contextlib import suppress\n"
        f"with suppress(OSError):\n {code}"
    )


def write_rules(users: Users, text: str) -> None:
    """Write the administrator's rules, readable for every user."""
    users.machine.rules.write_text(text)
    users.machine.rules.chmod(0o644)


def decisions(users: Users) -> str:
    """Return the facts and decisions of the files' owner, as text."""
    users["second"].run(DECISIONS)
    answer = users["second"].run("decisions(os.geteuid())")
    assert answer.error is None, answer
    return str(answer.value)


@pytest.mark.parametrize("field", RECORD_FIELDS)
def test_a_forged_field_decides_nothing(users: Users, field: str) -> None:
    """A field that another user writes into a GPU's lock file changes no decision."""
    write_rules(users, '[limits]\ntime = "2h"\nafter_cuda = "end"\ngpus = 1\n')
    assert users[NOBODY].reserve("'0', note='mine'").value == "0"
    path = users.locks / f"{UUIDS[0]}.lock"
    record = json.loads(path.read_text())
    before = decisions(users)
    for value in FORGED_VALUES:
        forged = json.dumps({**record, field: value})
        forge = (
            f"with open({str(path)!r}, 'r+') as file:\n file.truncate()\n file.write({forged!r})"
        )
        assert users[DAEMON].run(forge).error is None
        assert json.loads(path.read_text())[field] == value
        assert decisions(users) == before, value


@whole_and_part
def test_the_kernel_protects_the_files_of_a_user(users: Users, request_text: str) -> None:
    """The kernel lets no other user write to or delete a file with a UID in its name."""
    assert users[NOBODY].reserve(request_text).value == "0"
    assert users["second"].reserve("'0', wait=0.1").error == "WaitTimeoutError"
    own = [path for path in users.locks.iterdir() if "-65534-" in path.name]
    assert {path.name.partition("-65534-")[0].rpartition(".")[2] for path in own} == {
        "queue",
        "share" if "memory" in request_text else "record",
    }
    for path in own:
        for flags in ("os.O_WRONLY", "os.O_RDWR", "os.O_RDWR | os.O_TRUNC"):
            assert users[DAEMON].run(f"os.open({str(path)!r}, {flags})").error == "PermissionError"
        assert users[DAEMON].run(f"os.unlink({str(path)!r})").error == "PermissionError"


TIMES = [(0, 0), (1, 1), (2**33, 2**33), (2**62, 2**62)]
LOCKS = {
    "shared flock": "fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)",
    "flock": "fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)",
    "read lock": "fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)",
    "flock of a dead process": "lock_and_die(file)",
}


@whole_and_part
def test_forged_times_and_modes_decide_nothing(users: Users, request_text: str) -> None:
    """Another user's attempts to touch, chmod or link any file change no decision."""
    assert users[NOBODY].reserve(request_text).value == "0"
    before = decisions(users)
    for path in list(users.locks.iterdir()):
        attacks = [f"os.utime({str(path)!r}, ns={ns!r})" for ns in TIMES]
        attacks += [f"os.utime({str(path)!r})", f"os.chmod({str(path)!r}, 0o600)"]
        names = (
            "queue-65534-9.lock",
            f"{UUIDS[1]}.share-65534-9.lock",
            f"{UUIDS[1]}.record-65534-9",
        )
        attacks += [f"os.link({str(path)!r}, {str(users.locks / name)!r})" for name in names]
        for attack in attacks:
            attack_with(users[DAEMON], attack)
            assert decisions(users) == before, attack


@contextmanager
def locked_by(users: Users, path: Path, kind: str) -> Iterator[None]:
    """Let another user lock a file as far as the kernel allows it."""
    attacker = users[DAEMON]
    assert attack_with(attacker, f"file = os.open({str(path)!r}, os.O_RDONLY)").error is None
    assert attack_with(attacker, LOCKS[kind]).error is None
    try:
        yield
    finally:
        attack_with(attacker, "os.close(file)")


@pytest.mark.parametrize("kind", LOCKS)
@whole_and_part
def test_another_users_lock_does_not_count_for_the_owner_of_the_file(
    users: Users, request_text: str, kind: str
) -> None:
    """Another user's locks on a user's old files do not count towards that user's quota."""
    write_rules(users, "[limits]\ngpus = 1\n")
    owner = users[NOBODY]
    assert owner.reserve(request_text).value == "0"
    owner.run("reserve_gpu.release()")
    own = [path for path in users.locks.iterdir() if "-65534-" in path.name]
    assert own
    with ExitStack() as stack:
        for path in own:
            stack.enter_context(locked_by(users, path, kind))
        assert owner.reserve("'1'").value == "1"
        owner.run("reserve_gpu.release()")
        assert owner.reserve(request_text).value == "0"
        assert users[DAEMON].reserve("'0'").error == "NoFreeDeviceError"
        owner.run("reserve_gpu.release()")


@pytest.mark.parametrize("kind", LOCKS)
def test_another_users_lock_on_a_left_ticket_changes_no_place(users: Users, kind: str) -> None:
    """Another user's lock on a left ticket neither delays nor excludes a waiter."""
    owner, second, attacker = users[NOBODY], users["second"], users[DAEMON]
    assert attacker.reserve("'0'").value == "0"
    assert attacker.reserve("'0,1'").value == "0,1"
    assert owner.reserve("'0', wait=0.3").error == "WaitTimeoutError"
    (path,) = users.locks.glob("queue-65534-*.lock")
    with locked_by(users, path, kind):
        attacker.run("reserve_gpu.release()")
        assert second.reserve("'0'").value == "0"
        second.run("reserve_gpu.release()")
        assert owner.reserve("'0', wait=30").value == "0"


# -- leases ----------------------------------------------------------------------------------------

# Files with the UID of the user `daemon`, which takes a lease on them.
LEASED = {
    "queue": "queue-1-0.lock",
    "share": f"{UUIDS[0]}.share-1-0.lock",
    "record": f"{UUIDS[0]}.record-1-0",
    "share of an unknown GPU": "GPU-none.share-1-0.lock",
    "ticket of another user": "queue-65534-0.lock",
}


@contextmanager
def leased(users: Users, path: Path, kind: str = "F_WRLCK") -> Iterator[None]:
    """Let the user `daemon` take a lease on a file, so that open(2) fails for other users."""
    attacker = users[DAEMON]
    flags = "os.O_RDONLY" if kind == "F_RDLCK" else "os.O_RDWR | os.O_CREAT"
    taken = attacker.run(
        "import fcntl, os, signal\n"
        "signal.signal(signal.SIGIO, signal.SIG_IGN)\n"
        f"file = os.open({str(path)!r}, {flags}, 0o644)\n"
        "fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        f"fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.{kind})"
    )
    assert taken.error is None, taken
    try:
        yield
    finally:
        attacker.run("os.close(file)")


@pytest.mark.parametrize("name", LEASED)
def test_a_lease_on_a_file_of_one_user_causes_no_error(users: Users, name: str) -> None:
    """A user's lease on a file of its own causes no error for another user."""
    write_rules(users, "[limits]\ngpus = 1\n")
    owner = users[NOBODY]
    assert owner.reserve("'1'").value == "1"
    owner.run("reserve_gpu.release()")
    with leased(users, users.locks / LEASED[name]):
        assert users["second"].run("reserve_gpu.status().problem").value is None
        for request_text in ("'0'", "'0', memory='1GB'", "'0', wait=30"):
            assert owner.reserve(request_text).value == "0"
            owner.run("reserve_gpu.release()")


@pytest.mark.parametrize("kind", ["F_WRLCK", "F_RDLCK"])
def test_a_lease_on_a_lock_file_makes_only_that_gpu_unknown(users: Users, kind: str) -> None:
    """A lease on a GPU's lock file makes that GPU unknown, with the user that holds the lease."""
    assert users[DAEMON].reserve("'0'").value == "0"
    users[DAEMON].run("reserve_gpu.release()")
    path = users.locks / f"{UUIDS[0]}.lock"
    with leased(users, path, kind):
        assert users[NOBODY].reserve("").value == "1"
        text = users["second"].reserve("'0'").text
        assert "GPU0 is unknown" in text
        assert f"{path} can't be opened" in text
        assert DAEMON in text


# -- locks on old files of a user ---------------------------------------------------------------

OLD_RECORD = json.dumps({"pid": 1, "since": 1.0})  # a record without the fields of this version


def old_part_file(users: Users) -> Path:
    """Return the file of a part that a user has reserved and released."""
    assert users[NOBODY].reserve("'0', memory='1GB'").value == "0"
    users[NOBODY].run("reserve_gpu.release()")
    (path,) = users.locks.glob("*.share-65534-*")
    return path


def test_a_read_lock_does_not_weaken_a_reservation(users: Users) -> None:
    """A user with a part locks its file fully, although another user has a read lock on it."""
    with child_of(users.machine, NOBODY) as owner:
        assert owner.reserve("'0', memory='1GB'").value == "0"
        owner.run("reserve_gpu.release()")
        (path,) = users.locks.glob("*.share-65534-*")
        with locked_by(users, path, "read lock"):
            assert owner.reserve("'0', memory='1GB'").value == "0"
            assert json.loads(path.read_text())["write_locked"] is True
            assert users[DAEMON].reserve("'0'").error == "NoFreeDeviceError"
            owner.kill()
            attack_with(users[DAEMON], LOCKS["flock of a dead process"])
            assert users["second"].reserve("'0'").value == "0"


@pytest.mark.parametrize("kind", LOCKS)
def test_another_users_lock_does_not_prevent_a_restart(users: Users, kind: str) -> None:
    """A restarted kernel locks its part again, although another user has locked the file."""
    owner = users[NOBODY]
    path = old_part_file(users)
    again = (
        "from reserve_gpu.system import procfs\n"
        "from reserve_gpu.locks.directory import LockDirectory\n"
        "with LockDirectory() as directory, directory.mutex():\n"
        f"    lock = directory.acquire_again({path.name!r}, procfs.now())\n"
        "lock and (lock.is_write_locked, lock.release())[0]"
    )
    with locked_by(users, path, kind):
        assert owner.run(again).value is True


def test_the_lock_of_a_dead_process_is_not_a_part(users: Users) -> None:
    """A dead process's lock on a file with an old record reserves nothing."""
    owner = users[NOBODY]
    path = old_part_file(users)
    assert owner.run(f"open({str(path)!r}, 'w').write({OLD_RECORD!r})").error is None
    with locked_by(users, path, "flock of a dead process"):
        for user in (NOBODY, DAEMON):
            assert users[user].reserve("'0'").value == "0"
            users[user].run("reserve_gpu.release()")


# Locks the inherited file description, and closes its descriptor.
TAKER = (
    "import fcntl, os, sys; file = int(sys.argv[1]); "
    "fcntl.flock(file, fcntl.LOCK_EX); os.close(file); print(flush=True); input()"
)


def test_a_process_that_has_closed_the_locked_file_has_no_part(users: Users) -> None:
    """A lock counts for the user of the process that acquired it while that process holds it."""
    write_rules(users, "[limits]\ngpus = 1\n")
    owner = users[NOBODY]
    path = old_part_file(users)
    with ExitStack() as stack:
        file = os.open(path, os.O_RDONLY)  # stays open in this process, which runs as root
        stack.callback(os.close, file)
        taker = stack.enter_context(
            subprocess.Popen(
                [*as_user(NOBODY), sys.executable, "-c", TAKER, str(file)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[file],
            )
        )  # fmt: skip
        stack.callback(taker.kill)
        assert taker.stdout
        assert taker.stdout.readline() == b"\n"
        assert f" {taker.pid} " in Path("/proc/locks").read_text()
        assert users[DAEMON].reserve("'0'").value == "0"
        users[DAEMON].run("reserve_gpu.release()")
        assert owner.reserve("'1'").value == "1"
        owner.run("reserve_gpu.release()")


# -- second names of a GPU's lock file -------------------------------------------------------------

ROWS = "[(row.state.value, len(row.holders)) for row in reserve_gpu.status().rows]"


def link(users: Users, index: int) -> Path:
    """Let another user link a GPU's lock file to the other GPU's name, and return that path."""
    paths = [users.locks / f"{UUIDS[number]}.lock" for number in (index, 1 - index)]
    assert users[DAEMON].run(f"os.link(*{[str(path) for path in paths]})").error is None
    return paths[1]


@pytest.mark.parametrize("index", [0, 1])
def test_a_linked_lock_file_reserves_one_gpu(users: Users, index: int) -> None:
    """A link to the lock file of a held GPU, under another GPU's name, reserves nothing."""
    write_rules(users, "[limits]\ngpus = 1\n")
    owner, other = users[NOBODY], 1 - index
    assert owner.reserve(f"'{index}', note='mine'").value == str(index)
    path = link(users, index)
    rows = users["second"].run(ROWS).value
    assert (rows[index], rows[other]) == (["reserved", 1], ["unknown", 0])
    refused = users[DAEMON].reserve(f"'{other}'")
    assert refused.error == "NoFreeDeviceError"
    assert f"rm {path}" in refused.text
    assert "nobody" in users[DAEMON].reserve(f"'{index}'").text
    assert owner.reserve(f"'{index}', note='again'").value == str(index)
    path.unlink()
    assert users[DAEMON].reserve(f"'{other}'").value == str(other)


@pytest.mark.parametrize("index", [0, 1])
def test_a_link_makes_no_held_gpu_free(users: Users, index: int) -> None:
    """If a locked file has the names of two GPUs and either might be held, both are unknown."""
    owner = users[NOBODY]
    assert owner.reserve("'0'").value == "0"
    owner.run("reserve_gpu.release()")
    for path in users.locks.glob("*.record-*"):
        path.unlink()
    lock = str(users.locks / f"{UUIDS[0]}.lock")
    owner.run(f"import fcntl; file = open({lock!r}, 'r+'); fcntl.flock(file, fcntl.LOCK_EX)")
    path = link(users, 0)
    try:
        # A record file of the user that created the link is not evidence about the holder.
        record = str(users.locks / f"{UUIDS[index]}.record-1-0")
        users[DAEMON].run(
            f"import fcntl; own = open({record!r}, 'w'); fcntl.lockf(own, fcntl.LOCK_EX)"
        )
        for user in (DAEMON, "second"):
            assert users[user].run(ROWS).value == [["unknown", 0]] * 2
            for number in ("0", "1"):
                refused = users[user].reserve(f"'{number}'")
                assert refused.error == "NoFreeDeviceError"
                assert f"process {owner.pid} of nobody" in refused.text
        path.unlink()
        assert users["second"].run(ROWS).value == [["reserved", 1], ["free", 0]]
    finally:
        users[DAEMON].run("own.close()")
        owner.run("file.close()")


def test_two_gpus_with_one_lock_file_are_not_reserved_together(users: Users) -> None:
    """If the lock files of two GPUs are one file, a request gets only one of the GPUs."""
    assert users[NOBODY].reserve("'0'").value == "0"
    users[NOBODY].run("reserve_gpu.release()")
    link(users, 0)
    for first, second in (("0", "1"), ("1", "0")):
        refused = users[NOBODY].reserve("'0,1'")
        assert refused.error == "NoFreeDeviceError"
        assert "is a hard link to" in refused.text
        assert users[NOBODY].reserve(f"'{first}'").value == first
        assert users[DAEMON].reserve(f"'{second}'").error == "NoFreeDeviceError"
        assert users[DAEMON].reserve().error == "NoFreeDeviceError"
        users[NOBODY].run("reserve_gpu.release()")


def test_a_link_with_the_name_of_no_gpu_changes_nothing(users: Users) -> None:
    """A second name of a lock file that is not the name of a GPU changes no decision."""
    owner = users[NOBODY]
    assert owner.reserve("'0'").value == "0"
    before = decisions(users)
    lock = str(users.locks / f"{UUIDS[0]}.lock")
    for name in ("GPU-none.lock", "x", "x.lock", "../x.lock"):
        assert users[DAEMON].run(f"os.link({lock!r}, {str(users.locks / name)!r})").error is None
        assert decisions(users) == before, name
    owner.run("reserve_gpu.release()")
    assert users[DAEMON].reserve("'0'").value == "0"
    assert owner.reserve("'1'").value == "1"
