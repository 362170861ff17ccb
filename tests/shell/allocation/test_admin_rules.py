"""The administrator's rules in reservations and in the status of one process."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest

import reserve_gpu
from reserve_gpu import ImpossibleError, NoFreeDeviceError, ReserveGPUWarning
from reserve_gpu.allocation import admin_rules
from reserve_gpu.model.devices import State
from tests.support.lease import ENDS
from tests.support.reserving import got, of_gpu, refused

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.here import Here

FOUR = "gpu\n memory 16000\n" * 4


def states(**request: Any) -> list[State]:
    """Fail to reserve; return the state of each device in the refusal."""
    with pytest.raises(NoFreeDeviceError) as caught:
        reserve_gpu.reserve(**request)
    return [row.state for row in caught.value.rows]


@pytest.mark.parametrize(
    ("limits", "agents", "agent", "expected"),
    [
        ("gpus = 3", "gpus = 1", "claude", 1),
        ("gpus = 3", "gpus = 1", "", 3),  # not an agent
        ("gpus = 3", "gpus = 9", "claude", 3),
    ],
)
def test_the_stricter_limit_applies_to_an_agent(
    here: Here, limits: str, agents: str, agent: str, expected: int
) -> None:
    """A limit for agents never extends the user's limit."""
    os.environ["RESERVE_GPU_AGENT"] = agent
    here.rules.write_text(f"[limits]\n{limits}\n[agents]\n{agents}\n")
    found = admin_rules.read(str(here.rules))
    assert found.gpus
    assert found.gpus.value == expected


def test_users_and_groups_can_be_numbers(here: Here) -> None:
    """`[users.1000]` and `[groups.1000]` apply to the UID and the GID."""
    here.rules.write_text(f'[users.{os.geteuid()}]\ngpus = 0\n[groups.{os.getegid()}]\ntime="1h"')
    found = admin_rules.read(str(here.rules))
    assert [rule and rule.value for rule in (found.gpus, found.time)] == [0, 3600]


def replace_by_link(file: Path) -> None:
    """Replace a file by a symbolic link to it."""
    file.rename(file.with_suffix(".old"))
    file.symlink_to(file.with_suffix(".old"))


def replace_by_pipe(file: Path) -> None:
    """Replace a file by a named pipe."""
    file.unlink()
    os.mkfifo(file)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda file: file.chmod(0o646), "other users can write to it"),
        (lambda file: file.chmod(0o664), "other users can write to it"),
        (replace_by_link, "it is a symbolic link"),
        (replace_by_pipe, "it is not a regular file"),
    ],
    ids=["others can write", "group can write", "link", "pipe"],
)
def test_a_file_that_is_not_trusted_is_ignored_with_a_warning(
    here: Here, change: Callable[[Path], None], reason: str
) -> None:
    """Each reservation and the status warn about the file, and no rule applies."""
    here.rules.write_text("[limits]\ngpus = 0\n")
    change(here.rules)
    with pytest.warns(ReserveGPUWarning) as caught:
        assert got() == "0"
    (warning,) = (str(each.message) for each in caught)
    assert f"{here.rules} is ignored: {reason}" in warning
    assert warning in str(reserve_gpu.status())


# -- quotas ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("terminal")
def test_a_user_with_as_many_gpus_as_the_rule_allows_gets_no_more(here: Here) -> None:
    """The refusal names the rule, the file and the user's other reservation."""
    here.write(FOUR)
    here.rules.write_text("[limits]\ngpus = 2\n")
    with here.rival("1", label="GPU1"):
        assert got() == "0"  # the devices of this process are not counted twice
        assert got("2") == "2"
        text = refused(count=2)
    assert f"gpus = 2 ([limits] in {here.rules})" in text
    assert f"GPU1 in rival.ipynb (pid {os.getpid()})" in text
    assert of_gpu(text, "3").startswith("limited")
    assert of_gpu(text, "1").startswith("reserved")
    assert "Ask " not in text
    assert got(count=2) == "0,1"


def test_more_than_the_quota_is_impossible(here: Here) -> None:
    """Such a request fails at once, even if it would wait."""
    here.write(FOUR)
    here.rules.write_text("[limits]\ngpus = 2")
    with pytest.raises(ImpossibleError) as caught:
        reserve_gpu.reserve(count=3, wait=30)
    assert f"gpus = 2 ([limits] in {here.rules})" in str(caught.value)
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


def test_several_parts_of_a_gpu_count_as_one_gpu(here: Here) -> None:
    here.write(FOUR)
    here.rules.write_text("[limits]\ngpus = 1\n")
    with here.rival("2", part_mib=1000):
        assert got(memory="2GiB") == "2"
        assert got("2", memory="3GiB") == "2"
        assert states(devices="1", memory="2GiB") == [State.LIMITED]
        assert State.LIMITED in states()


def test_the_owner_of_a_lock_counts_and_not_its_record(here: Here) -> None:
    """The user and the PID in a record don't change whose quota a device counts towards."""
    here.rules.write_text("[limits]\ngpus = 1\n")
    with here.rival("0", user="bob", pid=1):
        assert State.LIMITED in states()
    record = f'{{"user": "root", "pid": {os.getpid()}}}'
    (here.locks / f"{here.uuid('1')}.lock").write_text(record)
    assert got("0") == "0"


def test_a_new_rule_applies_to_new_requests(here: Here) -> None:
    """Devices that are held can be kept, but not extended."""
    here.write(FOUR)
    assert got(count=2) == "0,1"
    here.rules.write_text('[limits]\ngpus = 1\ntime = "1h"')
    assert got(count=2) == "0,1"
    assert reserve_gpu.current().lease.until is None  # type: ignore[union-attr]
    with pytest.raises(ImpossibleError, match="gpus = 1"):
        reserve_gpu.reserve(count=3)
    assert got("0") == "0"


def test_a_forged_joined_process_counts_as_a_holder(here: Here) -> None:
    """A process that claims to have joined a reservation of another GPU counts with its own GPU."""
    here.rules.write_text("[limits]\ngpus = 2\n")
    here.use("eight")
    with here.child() as one, here.child() as two, here.child() as three:
        one.reserve("'0'")
        two.reserve("'1', memory='1GB'")
        since = json.loads((here.locks / f"{here.uuid('0')}.lock").read_bytes())["since"]
        (path,) = here.locks.glob(f"{here.uuid('1')}.share-*")
        path.write_text(json.dumps(json.loads(path.read_bytes()) | {"guest_of": since}))
        assert three.reserve("'2'").error == "NoFreeDeviceError"


# -- drained GPUs ----------------------------------------------------------------------------------


def test_a_drained_gpu_is_not_reserved(here: Here) -> None:
    """It is skipped, and refused by name at once, because waiting does not help."""
    here.rules.write_text('[devices]\ndrain = ["0"]\n')
    assert got() == "1"
    reserve_gpu.release()
    text = refused("0", wait=30)
    assert of_gpu(text).startswith("drained")
    assert str(here.rules) in of_gpu(text)
    assert "Timed out" not in text
    with here.rival("1"):
        assert "wait='1h'" in refused()


def test_the_holder_of_a_drained_gpu_keeps_it(here: Here) -> None:
    """The holder can also reserve another GPU, but other processes don't get the drained one."""
    assert got() == "0"
    here.rules.write_text("[devices]\ndrain = [0]\n")
    assert got(count=2) == "0,1"


MIG = """
gpu
  uuid GPU-aaaa0000-0000-4000-8000-000000000000
gpu
  uuid GPU-bbbb0000-0000-4000-8000-000000000000
  mig on
  instance 0
    uuid MIG-cccc0000-0000-5000-8000-000000000000
  instance 1
    uuid MIG-dddd0000-0000-5000-8000-000000000000
"""


@pytest.mark.parametrize(
    ("name", "drained"),
    [
        ('"gpu-AAAA"', "GPU0"),
        ("0", "GPU0"),
        ('"1:0"', "GPU1:0"),
        ('"1"', "GPU1:0 GPU1:1"),
        ('"GPU-ffff"', ""),
    ],
)
def test_a_drained_device_is_identified_by_its_names(here: Here, name: str, drained: str) -> None:
    """A name of a GPU means all of its MIG instances."""
    here.write(MIG)
    here.rules.write_text(f"[devices]\ndrain = [{name}]\n")
    found = reserve_gpu.status()
    assert " ".join(r.label for r in found.rows if r.state is State.DRAINED) == drained
    assert found.to_dict()["rules"]["drain_unmatched"] == ([] if drained else [name.strip('"')])
    assert ("matches no GPU" in str(found)) is (not drained)


# -- messages --------------------------------------------------------------------------------------


def test_the_status_contains_the_message_and_the_rules(here: Here) -> None:
    """The administrator's message comes first, without control characters."""
    here.rules.write_text(
        'message = "Maintenance\\u001b[31m on\\nFriday"\n'
        f'{ENDS}gpus = 1\nafter_cuda = "end"\n[groups.no-such-group]\n'
    )
    status = reserve_gpu.status()
    assert str(status).splitlines()[0] == "Maintenance\ufffd[31m on\ufffdFriday"
    assert f"Rules for {status.rules.user} ({here.rules}): 1 GPU, 1 d" in str(status)  # type: ignore[union-attr]
    found = status.to_dict()
    assert found["message"] == "Maintenance\x1b[31m on\nFriday"
    assert found["rules"] == {
        "file": str(here.rules),
        "user": status.rules.user,  # type: ignore[union-attr]
        "gpus": 1,
        "time_s": 86400,
        "idle_s": 7200,
        "after_cuda": "end",
        "drain": [],
        "drain_unmatched": [],
        "problems": [],
    }
