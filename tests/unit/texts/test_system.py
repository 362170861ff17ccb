"""The texts about the lock directory's file system, containers, and missing threads."""

from __future__ import annotations

import errno
from threading import Event
from typing import TYPE_CHECKING

import pytest

from reserve_gpu.locks import files
from reserve_gpu.model.errors import NoThreadError
from reserve_gpu.system.containers import bind_instruction
from reserve_gpu.system.executor import Executor
from reserve_gpu.system.shutdown import ProcessEnd
from tests.support.executor import no_threads
from tests.support.platforms import on_a_host

if TYPE_CHECKING:
    from pathlib import Path

    from syrupy.assertion import SnapshotAssertion

LOCKS = "/run/lock/reserve_gpu"


@pytest.mark.parametrize(
    "name",
    ["EROFS", "EACCES", "ENOSPC", "EIO", "ESTALE", "ENFILE", "ENOENT"],
)
@on_a_host
def test_a_lock_directory_that_fails(
    snapshot: SnapshotAssertion, tmp_path: Path, name: str
) -> None:
    assert files.remedy(getattr(errno, name), str(tmp_path)).replace(str(tmp_path), LOCKS) == (
        snapshot
    )


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("APPTAINER_NAME", "torch.sif"),
        ("container", "systemd-nspawn"),
    ],
)
@on_a_host
def test_sharing_the_hosts_locks_with_a_container(
    snapshot: SnapshotAssertion, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    """The instruction also covers a container that uses another directory, or a configured one."""
    monkeypatch.setenv(variable, value)
    monkeypatch.delenv("RESERVE_GPU_LOCK_DIR", raising=False)
    texts = [bind_instruction(LOCKS), bind_instruction("/dev/shm/reserve_gpu")]
    texts.append(files.remedy(errno.EROFS, LOCKS))
    monkeypatch.setenv("RESERVE_GPU_LOCK_DIR", "/srv/locks")
    assert [*texts, bind_instruction("/srv/locks")] == snapshot


def test_no_thread(snapshot: SnapshotAssertion) -> None:
    with no_threads(), pytest.raises(NoThreadError) as caught:
        Executor(lambda: None).run(int)
    assert str(caught.value) == snapshot


def test_callback_that_does_not_finish(snapshot: SnapshotAssertion) -> None:
    """A callback that takes too long, and one that can't be called."""
    end, continues, texts = ProcessEnd(), Event(), list[str]()
    end.call_before(continues.wait, 0.01)
    end.call(texts.append)
    continues.set()
    with no_threads():
        end.call(texts.append)
    assert texts == snapshot
