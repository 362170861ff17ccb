"""The administrator's file: what it says to whom, what is wrong in it, and what becomes of it."""

from __future__ import annotations

import json
import os
import re
from typing import TYPE_CHECKING, Any

import pytest

import reserve_gpu
from reserve_gpu import ImpossibleError, NoFreeDeviceError, ReserveGPUWarning
from reserve_gpu.allocation import admin_rules
from reserve_gpu.model.devices import State
from reserve_gpu.system import procfs
from tests.support.reserving import got, of_gpu, refused

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.here import Here

from tests.support.admin_rules import ENDS

FOUR = "gpu\n memory 16000\n" * 4


@pytest.mark.parametrize(
    ("limits", "agents", "agent", "expected"),
    [
        ("gpus = 3", "gpus = 1", "claude", 1),
        ("gpus = 3", "gpus = 1", "", 3),  # a person
        ("gpus = 3", "gpus = 9", "claude", 3),  # it widens nothing
        ("", "gpus = 1", "claude", 1),
        ("gpus = 3", "", "claude", 3),
    ],
)
def test_agents_are_bound_by_the_narrower(
    here: Here, limits: str, agents: str, agent: str, expected: int
) -> None:
    """Who says to be an agent has the user's limits or those of agents, whichever are narrower."""
    os.environ["RESERVE_GPU_AGENT"] = agent
    here.rules.write_text(f"[limits]\n{limits}\n[agents]\n{agents}\n")
    found = admin_rules.read(str(here.rules))
    assert found.gpus
    assert found.gpus.value == expected


def test_a_user_and_a_group_may_be_numbers(here: Here) -> None:
    """`[users.1000]` and `[groups.1000]` mean the numbers, also of who has no name."""
    here.rules.write_text(f'[users.{os.geteuid()}]\ngpus = 0\n[groups.{os.getegid()}]\ntime="1h"')
    found = admin_rules.read(str(here.rules))
    assert found.gpus
    assert found.gpus.value == 0
    assert found.time
    assert found.time.value == 3600


def others_may_write(file: Path) -> None:
    file.chmod(0o646)


def its_group_may_write(file: Path) -> None:
    file.chmod(0o664)


def it_is_a_link(file: Path) -> None:
    file.rename(file.with_suffix(".old"))
    file.symlink_to(file.with_suffix(".old"))


def it_is_a_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def it_is_a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def it_is_gone(file: Path) -> None:
    file.unlink()


@pytest.mark.parametrize(
    ("become", "reason"),
    [
        (others_may_write, "other users can write to it"),
        (its_group_may_write, "other users can write to it"),
        (it_is_a_link, "it is a symbolic link"),
        (it_is_a_pipe, "it is not a regular file"),
        (it_is_a_folder, "Is a directory"),
        (it_is_gone, "No such file"),
    ],
)
def test_a_file_that_others_could_have_written_counts_for_nothing(
    here: Here, become: Callable[[Path], None], reason: str
) -> None:
    """Such a file is one warning at each reservation and in the status, and stops nobody."""
    here.rules.write_text("[limits]\ngpus = 0\n")
    become(here.rules)
    with pytest.warns(ReserveGPUWarning) as caught:
        assert got() == "0"
    (warning,) = (str(each.message) for each in caught)
    assert warning.startswith(f"{here.rules} is ignored: {reason}")
    assert warning in str(reserve_gpu.status())


def test_without_a_file_nothing_is_read(here: Here) -> None:
    """Where the variable is not set and there is no file, or an empty one, there are no rules."""
    assert reserve_gpu.status().rules is None
    here.rules.write_text("[limits]\ngpus = 0\n")
    with pytest.raises(ImpossibleError):
        reserve_gpu.reserve()
    here.rules.write_text("")
    assert got() == "0"


# -- how much --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("terminal")
def test_a_user_may_have_so_many(here: Here) -> None:
    """Who has as many GPUs as the rule says is refused more by rule, file, and what they have."""
    here.write(FOUR)
    here.rules.write_text("[limits]\ngpus = 2\n")
    with here.rival("1", label="GPU1"):
        assert got() == "0"  # what this process has is not counted twice
        assert got("2") == "2"
        text = refused(count=2)
    assert text.startswith(
        f"Limit reached: gpus = 2 ([limits] in {here.rules}). You have GPU1 in rival.ipynb (pid"
    )
    assert of_gpu(text, "3").startswith("limited")
    assert "\nRelease one of your reservations.\nOr wait in the queue" in text
    assert "Ask " not in text
    assert of_gpu(text, "1").startswith("reserved: ")
    assert got(count=2) == "0,1"


def test_a_file_may_begin_with_a_mark(here: Here) -> None:
    """Some editors write a byte order mark, which says nothing."""
    here.write(FOUR)
    here.rules.write_text("\ufeff[limits]\ngpus = 1\n")
    with pytest.raises(reserve_gpu.ImpossibleError, match="gpus = 1"):
        got(count=2)


def test_more_than_a_rule_ever_allows_is_impossible(here: Here) -> None:
    """What no state of the machine allows names the rule at once, also to who would wait."""
    here.write(FOUR)
    here.rules.write_text("[limits]\ngpus = 2")
    too_much: list[dict[str, Any]] = [{"count": 3}, {"devices": "0-2"}]
    for wishes in too_much:
        with pytest.raises(ImpossibleError) as caught:
            reserve_gpu.reserve(**wishes, wait=30)
        assert f"gpus = 2 ([limits] in {here.rules})" in str(caught.value)
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


def test_a_second_part_of_a_gpu_is_no_second_gpu(here: Here) -> None:
    """Several parts of one GPU count as one GPU, by name as well; another GPU is one more."""
    here.write(FOUR)
    here.rules.write_text("[limits]\ngpus = 1\n")
    with here.rival("2", part_mib=1000):
        assert got(memory="2GiB") == "2"
        assert got("2", memory="3GiB") == "2"
        assert "limited" in refused("1", memory="2GiB")
        assert "limited" in refused()


def test_what_a_file_says_of_its_owner_decides_nothing(here: Here) -> None:
    """Whose a lock is goes by the kernel, not by the user or the pid that stand in the record."""
    here.rules.write_text("[limits]\ngpus = 1\n")
    with here.rival("0", user="bob", pid=1):
        assert "limited" in refused()
    record = f'{{"user": "root", "pid": {os.getpid()}}}'
    (here.locks / f"{here.uuid('1')}.lock").write_text(record)
    assert got("0") == "0"


def test_a_rule_that_changes_binds_who_asks_next(here: Here) -> None:
    """What is held stays as it is; who asks for the same again keeps it, who asks anew is bound."""
    here.write(FOUR)
    assert got(count=2) == "0,1"
    here.rules.write_text('[limits]\ngpus = 1\ntime = "1h"')
    assert got(count=2) == "0,1"
    assert reserve_gpu.current().lease.until is None  # type: ignore[union-attr]
    with pytest.raises(ImpossibleError, match="gpus = 1"):
        reserve_gpu.reserve(count=3)
    assert got("0") == "0"


# -- drained ---------------------------------------------------------------------------------------


def test_a_drained_gpu_is_not_handed_out(here: Here) -> None:
    """It is passed by and refused by name, with the rule's place; waiting for it is no use."""
    here.rules.write_text('[devices]\ndrain = ["0"]\n')
    assert got() == "1"
    reserve_gpu.release()
    text = refused("0", wait=30)
    assert of_gpu(text) == f"drained: by drain ([devices] in {here.rules})"
    assert "Waiting alone won't help: ask the administrator." in text
    assert "Timed out" not in text
    with here.rival("1"):
        assert "wait='1h'" in refused()


@pytest.mark.usefixtures("terminal")
def test_the_status_has_drained_gpus_with_their_holders(here: Here) -> None:
    """A drained GPU is `drained` also while somebody has it, who is named, but not to be asked."""
    with here.child() as holder, here.child() as other:
        assert holder.reserve("0, memory='1GiB'").value == "0"
        assert other.reserve("1").value == "1"
        here.rules.write_text('[devices]\ndrain = ["0"]\n')
        text = str(reserve_gpu.status())
        assert of_gpu(text).startswith("drained: ")
        assert f"(pid {holder.pid})" in of_gpu(text)
        assert "still available" not in text
        assert "You hold GPU1 in" in text
        assert "You hold GPU0" not in text
        assert reserve_gpu.status().to_dict()["devices"][0]["holders"]
    with here.rival("0"):
        assert str(reserve_gpu.status()).startswith("1 of 2 GPUs is free: GPU1.")


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
        ('"GPU-a"', "GPU0"),
        ('"gpu-AAAA"', "GPU0"),
        ("0", "GPU0"),
        ('"GPU0"', "GPU0"),
        ('"1:0"', "GPU1:0"),
        ('"MIG-dd"', "GPU1:1"),
        ('"1"', "GPU1:0 GPU1:1"),
        ('"GPU-bbbb0000-0000-4000-8000-000000000000"', "GPU1:0 GPU1:1"),
        ('"0-1"', "GPU0 GPU1:0 GPU1:1"),
        ('"GPU-ffff"', ""),
        ('"7"', ""),
    ],
)
def test_drained_devices_go_by_their_names(here: Here, name: str, drained: str) -> None:
    """Index, UUID or its start, instance; a GPU's name means all of its instances."""
    here.write(MIG)
    here.rules.write_text(f"[devices]\ndrain = [{name}]\n")
    found = reserve_gpu.status()
    assert " ".join(r.label for r in found.rows if r.state is State.DRAINED) == drained
    assert ("matches no GPU here" in str(found)) is (not drained)
    assert found.to_dict()["rules"]["drain_unmatched"] == ([] if drained else [name.strip('"')])


def test_what_else_lies_there_counts_for_nobody(here: Here) -> None:
    """A link to the mutex, or to the lock of a GPU that one has, is no GPU of one's own."""
    here.rules.write_text("[limits]\ngpus = 2\n")
    with here.rival("0"):
        os.link(here.locks / "mutex.lock", here.locks / "x.lock")
        os.link(here.locks / f"{here.uuid('0')}.lock", here.locks / "GPU-1.lock")
        assert got() == "1"


# -- what is shown ---------------------------------------------------------------------------------


def test_the_status_shows_message_and_rules(here: Here) -> None:
    """The message stands above all, escaped; the rules for who looks below, in one line."""
    here.rules.write_text(
        'message = "Maintenance\\u001b[31m on\\nFriday"\n'
        f'{ENDS}gpus = 1\nafter_cuda = "end"\n[groups.no-such-group]\n'
    )
    lines = str(reserve_gpu.status()).splitlines()
    assert lines[0] == "Maintenance\N{REPLACEMENT CHARACTER}[31m on\N{REPLACEMENT CHARACTER}Friday"
    (line,) = (line for line in lines if line.startswith("Rules for "))
    assert line == (
        f"Rules for {reserve_gpu.status().rules.user} ({here.rules}): 1 GPU, 1 d, "  # type: ignore[union-attr]
        "idle 2 h, then the process is ended."
    )
    found = reserve_gpu.status().to_dict()
    assert found["message"] == "Maintenance\x1b[31m on\nFriday"
    assert found["rules"] == {
        "file": str(here.rules),
        "user": reserve_gpu.status().rules.user,  # type: ignore[union-attr]
        "gpus": 1,
        "time_s": 86400,
        "idle_s": 7200,
        "after_cuda": "end",
        "drain": [],
        "drain_unmatched": [],
        "problems": [],
    }


def test_a_refusal_says_what_is_wrong_in_the_file(here: Here) -> None:
    """Who is refused reads the file's mistakes below, as who gets a GPU does in a warning."""
    here.rules.write_text("[limits]\ngpu = 2\n")
    with here.rival("0"), here.rival("1"), pytest.raises(NoFreeDeviceError) as caught:
        reserve_gpu.reserve()
    assert re.search(r"Warning: .*unknown key 'gpu'", str(caught.value))


@pytest.mark.parametrize("of", ["mutex.lock", "GPU"])
@pytest.mark.parametrize("rules", ["", "[limits]\ngpus = 1\n"], ids=["no rules", "rules"])
def test_a_second_name_is_no_reservation(here: Here, of: str, rules: str) -> None:
    """A link under a device's own name, made before that device was ever reserved, counts once."""
    here.rules.write_text(rules)
    assert got("0") == "0"
    reserve_gpu.release()
    link = here.locks / f"{here.uuid('1')}.lock"
    os.link(here.locks / (of if of == "mutex.lock" else f"{here.uuid('0')}.lock"), link)
    assert got() == "0"
    if of == "mutex.lock":
        row = reserve_gpu.status().rows[1]
        owner = procfs.user_name(os.geteuid())
        second = f"its lock file, which belongs to {owner}, is a hard link to mutex.lock"
        assert row.holders == ()
        assert row.reason == f"{second}. Run: rm {link}"
        reserve_gpu.release()
        assert f"{second}. Run: rm " in refused("1")
    else:
        reserve_gpu.release()
        with here.child() as other:  # who has the one GPU has no second one
            assert other.reserve("'0'").value == "0"
            assert (
                other.run("reserve_gpu.release()\nreserve_gpu.reserve('0').environ").error is None
            )


def test_a_guest_of_another_device_counts(here: Here) -> None:
    """Who writes into an own lock file that it is a guest's of another GPU has both GPUs."""
    here.rules.write_text("[limits]\ngpus = 2\n")
    here.use("eight")
    with here.child() as one, here.child() as two, here.child() as three:
        one.reserve("'0'")
        two.reserve("'1', memory='1GB'")
        since = json.loads((here.locks / f"{here.uuid('0')}.lock").read_bytes())["since"]
        (path,) = here.locks.glob(f"{here.uuid('1')}.share-*")
        path.write_text(json.dumps(json.loads(path.read_bytes()) | {"guest_of": since}))
        assert three.reserve("'2'").error == "NoFreeDeviceError"
