"""Several machines in one picture: which are meant, what each answers, and how it is shown."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from reserve_gpu.cli import main
from reserve_gpu.commands.export import html_page, prometheus
from reserve_gpu.commands.hosts import remote_status as hosts
from reserve_gpu.commands.hosts import status_from_json
from reserve_gpu.commands.hosts.hosts_view import Hosts as Seen
from reserve_gpu.model.errors import RequestError
from reserve_gpu.model.untrusted import FormatError
from tests.support.hosts_cases import seen

# -- which machines ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("lab1", ["lab1"]),
        ("alice@lab-1.example.org", ["alice@lab-1.example.org"]),
        ("gpu[08-10]", ["gpu08", "gpu09", "gpu10"]),
        ("gpu[1,3-4].lab", ["gpu1.lab", "gpu3.lab", "gpu4.lab"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
    ],
)
def test_a_pattern_means_hosts(pattern: str, names: list[str]) -> None:
    """A host is named as ssh takes it, and several of them by ranges in brackets."""
    assert hosts.expand(pattern) == names


@pytest.mark.parametrize(
    "pattern",
    [
        "-oProxyCommand=id", "lab1;id", "$(id)", "lab 1", "", "gpu[a-b]", "gpu[]", "gpu[2-1]",
        "gpu[1-]", "gpu[,1]", "a[0-999999999][5-4]", "a" + "[1]" * 1500,
        "a[1" + "0" * 5000 + "]", "gpu[0-999999999]", "r[0-255]n[0-255]", "g\x1b[1-2]",
    ],
)  # fmt: skip
def test_what_is_no_host_is_refused(pattern: str) -> None:
    """What ssh would take for an option, or a shell for a command, names no host."""
    with pytest.raises(RequestError, match="host"):
        hosts.expand(pattern)


@pytest.mark.parametrize(
    "word",
    ["a\\'b';touch FILE;#.ipynb", "!x", "$HOME `id`", "a\nb", "~", "=ls", "%1", "50%", "", "ä"],
)
def test_a_login_shell_reads_plain_words(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever people have typed reaches another machine as it was, and no shell there reads it."""
    words = ["reserve-gpu", "kernel", "hold", "--note", word]
    *_, name, line = hosts.argv("lab1", words)
    assert name == "lab1"
    assert re.fullmatch(r"reserve-gpu sent:[0-9a-f]+", line)
    assert main._words(line.split()[1:]) == words[1:]
    _, sent = hosts.argv("lab1", ["reserve-gpu", "nonsense", word])[-1].split()
    assert main.main([sent]) == RequestError.exit_code
    assert "Unknown command nonsense" in capsys.readouterr().err


def test_plain_words_stay_as_they_are() -> None:
    """What every shell takes for a word is sent as it is, so that older versions read it too."""
    words = [*hosts.STATUS_COMMAND, "--since", "@17", "--memory=10GB"]
    assert hosts.argv("lab1", words)[-1] == " ".join(words)


ROW = {"state": "free", "index": 0, "uuid": "GPU-1"}
NESTED: Any = []
for _ in range(50):
    NESTED = [NESTED]


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"state": 7, "index": "x", "uuid": 1, "holders": 3, "processes": {"pid": 1}},
        {**ROW, "state": "mine\x1b[2J"},
        {**ROW, "index": -1, "memory_total_mib": True, "memory_used_mib": float("nan")},
        {**ROW, "power_w": 1e308, "temperature_c": 10**400, "utilisation_percent": -5},
        {**ROW, "holders": [{"pid": "1", "user": "\x1b[31m<b>" * 9999, "since": "x"}, 3, None]},
        {**ROW, "processes": [{"pid": None, "kind": 3}] * 5000, "next_in_line": 10**9},
        {**ROW, "name": NESTED, "reason": NESTED},
    ],
)
def test_a_foreign_answer_is_bounded(row: dict[str, Any]) -> None:
    """Whatever a host answers makes a picture of bounded length without control letters."""
    status = status_from_json.status(
        {"version": 1, "devices": [row], "waiting": [{}, 1], "host": "h\x07"}
    )
    seen = Seen({"lab1": status}, 0.0, ("lab1",))
    text = str(seen.picture())
    assert len(text) < 60_000
    assert not {letter for letter in text if not letter.isprintable()} - {"\n"}
    assert "<b>" not in seen.picture()._repr_html_().replace("<b>waiting", "")
    json.dumps(seen.to_dict())
    assert html_page.page(seen, "GPUs")
    assert prometheus.text(seen)


def test_of_which_version_it_is() -> None:
    """What has our version but no devices is no status, and no newer format."""
    with pytest.raises(FormatError) as caught:
        status_from_json.status({"version": 1})
    assert caught.value.version is None


@pytest.mark.parametrize(
    ("out", "fields"),
    [
        (b'{"a": 1}', {"a": 1}),
        (b'Welcome {you}!\n{motd}\n{\n "a": 1\n}\nbye\n', {"a": 1}),
        (b'{"a": ', {}),
        (b"{" * 100_000, {}),
        (b'{"a":' * 100_000, {}),
        (b"\xff\xfe{}", {}),
        (b"[1]", {}),
    ],
)
def test_json_in_what_a_host_says(out: bytes, fields: dict[str, Any]) -> None:
    """The JSON is found between lines that a login shell says; what is none is nothing."""
    assert hosts.fields_in(out) == fields


@pytest.mark.parametrize("answer", [None, [], {}, {"version": 1}, {"version": "1", "devices": []}])
def test_what_is_no_status_is_refused(answer: object) -> None:
    """JSON that is none of ours is no status of a machine without GPUs."""
    with pytest.raises(FormatError):
        status_from_json.status(answer)


@pytest.mark.parametrize(
    ("answers", "headline"),
    [
        ({"lab1": ("free", "busy"), "lab2": ("free", "free")},
         "3 of 4 GPUs are free: lab1 GPU0, lab2 GPU0 and GPU1."),
        ({"lab1": ("busy",), "lab2": ("free", "busy")}, "1 of 3 GPUs is free: lab2 GPU0."),
        ({"lab1": ("reserved", "busy")}, "None of 2 GPUs is free."),
        ({"lab1": ("free",)}, "1 of 1 GPU is free: lab1 GPU0."),
        ({"lab1": ()}, "No machine has a GPU."),
        ({}, "No machine answered."),
    ],
)  # fmt: skip
def test_the_headline(answers: dict[str, tuple[str, ...]], headline: str) -> None:
    """The first line counts what is free over all hosts, and says where."""
    assert str(seen(**answers).picture()).splitlines()[0].startswith(headline)


def test_what_to_type() -> None:
    """Below it stands how to get one there, and in a notebook here; or how to wait for one."""
    text = str(seen(lab1=("busy",), lab2=("free",)).picture())
    assert "Get one: ssh -t lab2 reserve-gpu run -- COMMAND ..." in text
    assert "reserve-gpu kernel install --hosts lab\n" in str(seen(lab2=("free",)).picture())
    assert "reserve-gpu kernel install --hosts lab --wait 45s" in str(
        seen(lab1=("busy",)).picture()
    )


OLDER = """#!/bin/sh
echo 'Welcome to {lab5}!'
echo '{"version": 0, "devices": []}'
"""
