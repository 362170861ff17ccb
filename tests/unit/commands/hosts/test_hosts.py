"""Host names, and the replies of other machines."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from reserve_gpu.cli import main
from reserve_gpu.commands.export import html_page, prometheus
from reserve_gpu.commands.hosts import remote_status, status_from_json
from reserve_gpu.commands.hosts.hosts_view import Hosts
from reserve_gpu.model.errors import RequestError

# -- host names ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("gpu[08-10]", ["gpu08", "gpu09", "gpu10"]),
        ("gpu[1,3-4].lab", ["gpu1.lab", "gpu3.lab", "gpu4.lab"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("g[1-256]", [f"g{number}" for number in range(1, 257)]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_pattern_with_ranges_names_several_hosts(pattern: str, names: list[str]) -> None:
    assert remote_status.expand(pattern) == names


@pytest.mark.parametrize(
    "pattern",
    [
        "-oProxyCommand=id", "lab1;id", "$(id)", "lab 1", "", "gpu[a-b]", "gpu[]", "gpu[2-1]",
        "gpu[1-]", "gpu[,1]", "a[0-999999999][5-4]", "a" + "[1]" * 1500,
        "a[1" + "0" * 5000 + "]", "g[1-257]", "gpu[0-999999999]", "r[0-255]n[0-255]",
        "g\x1b[1-2]",
    ],
    ids=lambda pattern: pattern[:20],
)  # fmt: skip
def test_an_invalid_host_is_refused(pattern: str) -> None:
    """Ssh would take some for an option, and a shell would take some for a command."""
    with pytest.raises(RequestError, match="host"):
        remote_status.expand(pattern)


@pytest.mark.parametrize(
    "word",
    ["a\\'b';touch FILE;#.ipynb", "!x", "$HOME `id`", "a\nb", "~", "=ls", "%1", "50%", "", "ä"],
)
def test_no_shell_interprets_a_sent_word(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["reserve-gpu", "kernel", "hold", "--note", word]
    *_, name, line = remote_status.argv("lab1", words)
    assert name == "lab1"
    assert re.fullmatch(r"reserve-gpu sent:[0-9a-f]+", line)
    assert main._words(line.split()[1:]) == words[1:]
    _, sent = remote_status.argv("lab1", ["reserve-gpu", "nonsense", word])[-1].split()
    assert main.main([sent]) == RequestError.exit_code
    assert "nonsense" in capsys.readouterr().err


def test_plain_arguments_are_sent_unchanged_because_older_versions_read_them() -> None:
    words = [*remote_status.STATUS_COMMAND, "--since", "@17", "--memory=10GB"]
    assert remote_status.argv("lab1", words)[-1] == " ".join(words)


# -- replies ---------------------------------------------------------------------------------------

ROW = {"state": "free", "index": 0, "uuid": "GPU-1"}


@pytest.mark.parametrize(
    "row",
    [
        {"state": 7, "index": "x", "uuid": 1, "holders": 3, "processes": {"pid": 1}},
        {**ROW, "state": "mine\x1b[2J"},
        {**ROW, "index": -1, "memory_total_mib": True, "memory_used_mib": float("nan")},
        {**ROW, "holders": [{"pid": "1", "user": "\x1b[31m<b>" * 9999, "since": "x"}, 3, None]},
        {**ROW, "processes": [{"pid": None, "kind": 3}] * 5000, "next_in_line": 10**9},
    ],
    ids=["types", "state", "memory", "holders", "processes"],
)
def test_an_untrusted_reply_is_shown_in_bounded_printable_text(row: dict[str, Any]) -> None:
    status = status_from_json.status(
        {"version": 1, "devices": [row], "waiting": [{}, 1], "host": "h\x07"}
    )
    hosts = Hosts({"lab1": status}, 0.0, ("lab1",))
    text = str(hosts.picture())
    assert len(text) < 60_000
    assert not {letter for letter in text if not letter.isprintable()} - {"\n"}
    assert "<b>" not in hosts.picture()._repr_html_().replace("<b>waiting", "")
    json.dumps(hosts.to_dict())
    assert html_page.page(hosts, "GPUs")
    assert prometheus.text(hosts)


@pytest.mark.parametrize(
    ("output", "fields"),
    [
        (b'Welcome {you}!\n{motd}\n{\n "a": 1\n}\nbye\n', {"a": 1}),
        (b'{"a":' * 100_000, {}),
        (b"[1]", {}),
    ],
    ids=["login shell", "nested", "list"],
)
def test_the_json_object_is_found(output: bytes, fields: dict[str, Any]) -> None:
    assert remote_status.fields_in(output) == fields
