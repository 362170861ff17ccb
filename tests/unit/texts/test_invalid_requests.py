"""The texts that refuse a request, or a rules file, before any device is considered."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

import reserve_gpu
from reserve_gpu.allocation import admin_rules, request
from reserve_gpu.allocation.request import Deadline
from reserve_gpu.features.restart import keeper
from reserve_gpu.model import parsing
from reserve_gpu.model.errors import RequestError
from reserve_gpu.system import settings

if TYPE_CHECKING:
    from pathlib import Path

    from syrupy.assertion import SnapshotAssertion

NOW = 1_795_000_000.0  # 2026-11-18 12:06 in Berlin


@pytest.mark.parametrize(
    "text",
    [
        "[limits]\ngpus = true",
        "[limits]\ngpus = -1",
        "[limits]\ngpus = 9999999999",
        "[limits]\ntime = inf",
        '[limits]\ntime = "0h"',
        '[limits]\nafter_cuda = "kill"',
        '[limits]\n"g\\u001b[31m" = 1',
        "[limit]\ngpus = 1",
        "[users]\nalice = 3",
        "message = 3",
        "history = 3",
        "[devices]\ndrain = [true]",
        '[devices]\ndrain = ["x y"]',
    ],
)
def test_a_mistake_in_the_administrators_file(text: str, snapshot: SnapshotAssertion) -> None:
    """The error names the file, the table, the key and the value, and says what to write."""
    with pytest.raises(admin_rules.MistakeError) as caught:
        admin_rules.parse(text.encode(), "/etc/reserve_gpu.toml")
    assert str(caught.value).isprintable()
    assert str(caught.value) == snapshot


def test_a_file_that_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    """The administrator's file is ignored, and the user's file is an error."""
    monkeypatch.setenv(settings.CONFIG, str(tmp_path))  # its owner may be this user
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for name, text in {"large": " " * 65537, "shared": "", "reserve_gpu.toml": "limit = 1"}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o666 if name == "shared" else 0o600)
    (tmp_path / "link").symlink_to("large")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    paths = ["rules.toml", *map(str, sorted(tmp_path.iterdir()))]
    texts = [text for path in paths for text in admin_rules.read(path).problems]
    with pytest.raises(RequestError) as owner:
        admin_rules.tables("/etc/passwd", "/etc/passwd", {54321})
    with pytest.raises(RequestError) as key:
        admin_rules.read_user_file()
    texts += [str(owner.value), str(key.value)]
    assert "\n".join(texts).replace(str(tmp_path), "/etc") == snapshot


@pytest.mark.parametrize(
    "arguments",
    [
        {"devices": ""},
        {"devices": "all"},
        {"devices": "0,1", "count": 1},
        {"count": 0},
        {"min_memory": -1},
        {"min_memory": "999.9"},
        {"memory": 16},
        {"memory": "0GB"},
        {"memory": "0%"},
        {"memory": "101%"},
        {"name": 5},
        {"note": 5},
        {"for_": "0s"},
        {"for_": "tomorrow"},
        {"for_": "1h", "until": "18:00"},
        {"until": "10m"},
        {"until": "soon"},
        {"if_wanted": True},
        {"end_kernel": True},
    ],
    ids=str,
)
def test_an_invalid_request(arguments: dict[str, Any], snapshot: SnapshotAssertion) -> None:
    """The error repeats the argument, and says what to write."""
    with pytest.raises(RequestError) as caught:
        request.parse(**{"devices": None, **arguments})
    assert str(caught.value).isprintable()
    assert str(caught.value) == snapshot


@pytest.mark.parametrize("wait", ["3", "0,1", "forever"])
def test_an_invalid_wait(wait: str, snapshot: SnapshotAssertion) -> None:
    """The error for a number, devices or a word for "no limit" says how to write the wait."""
    with pytest.raises(RequestError) as caught:
        Deadline.after(wait)
    assert str(caught.value) == snapshot


@pytest.mark.usefixtures("berlin")
@pytest.mark.parametrize("text", ["soon", "2026-11-18 11:06", "2127-01-01 18:00"])
def test_an_invalid_end_time(text: str, snapshot: SnapshotAssertion) -> None:
    """The error says whether the time can't be read, is in the past or is too far away."""
    with pytest.raises(RequestError) as caught:
        parsing.parse_moment(text, NOW)
    assert str(caught.value) == snapshot


def test_an_invalid_function_or_setting(
    monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    monkeypatch.setenv(keeper.RESTART, "2min")
    with pytest.raises(RequestError) as setting:
        keeper.restart_s()
    with pytest.raises(RequestError) as function:
        reserve_gpu.before_end("save()")  # type: ignore[call-overload]
    assert [str(setting.value), str(function.value)] == snapshot
