"""Several machines in one picture: which are meant, what each answers, and how it is shown."""

from __future__ import annotations

import json
import re
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

import reserve_gpu
from reserve_gpu.cli import main
from reserve_gpu.commands.export import html_page, prometheus
from reserve_gpu.commands.hosts import hosts_view, status_from_json
from reserve_gpu.commands.hosts import remote_status as hosts
from reserve_gpu.commands.hosts.hosts_view import Hosts as Seen
from reserve_gpu.model.errors import RequestError
from reserve_gpu.model.untrusted import FormatError
from tests.hosts import Hosts, needs_ssh

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from subprocess import CompletedProcess

    from tests.here import Here

GROUPS = '[hosts]\nlab = ["lab1", "gpu[08-10]"]\nbig = ["dgx"]\n'


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


def test_groups_stand_in_two_files(here: Here) -> None:
    """A group is in the administrator's file or in the user's own, which counts more."""
    here.rules.write_text(GROUPS)
    assert hosts.resolve(["lab"]) == ["lab1", "gpu08", "gpu09", "gpu10"]
    own = here.home / ".config" / "reserve_gpu.toml"
    own.parent.mkdir(exist_ok=True)
    own.write_text('[hosts]\nlab = ["mine"]\n')
    assert hosts.resolve(["lab", "big,other"]) == ["mine", "dgx", "other"]
    assert hosts.resolve([]) == ["mine", "dgx"]


def test_a_group_binds_nobody(here: Here) -> None:
    """A table of hosts in the administrator's file is no mistake there, and limits nothing."""
    here.rules.write_text(GROUPS)
    assert not reserve_gpu.status().to_dict()["rules"]["problems"]


def test_the_own_file_may_be_a_link(here: Here) -> None:
    """The user's own file may be a link to where they keep such files."""
    own = here.home / ".config" / "reserve_gpu.toml"
    own.parent.mkdir(exist_ok=True)
    (here.home / "dotfile").write_text(GROUPS)
    own.symlink_to(here.home / "dotfile")
    assert hosts.resolve(["big"]) == ["dgx"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('[hosts]\nlab = "lab1"\n', r'lab must be a list, such as \["lab1", "lab2"\]'),
        ("[hosts]\nlab = [1]\n", "lab must be a list"),
        ("hosts = 3\n", r"\[hosts\] must be a table"),
        ('[hosts]\nlab = ["-x"]\n', "'-x' is not a valid host name"),
        ("[hosts\n", "line 1"),
        ("[hosts]\nlab = []\n", "lab must be a list"),
        ('[host]\nlab = ["lab1"]\n', "unknown key 'host'. This file may contain only"),
    ],
)
def test_a_mistake_in_a_group(here: Here, content: str, said: str) -> None:
    """A table that makes no sense is said in a line that names the mistake."""
    own = here.home / ".config" / "reserve_gpu.toml"
    own.parent.mkdir(exist_ok=True)
    own.write_text(content)
    with pytest.raises(RequestError, match=said):
        hosts.resolve(["lab"])


def test_no_host_is_known(here: Here) -> None:
    """Without a name and without a group the error shows what to write, and where."""
    with pytest.raises(RequestError, match=r"\[hosts\]\nlab = ") as caught:
        hosts.resolve([])
    assert str(here.home / ".config" / "reserve_gpu.toml") in str(caught.value)


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


# -- what they say -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scenario", ["busy", "mig", "trouble", "container", "desktop", "renderer", "eight"]
)
def test_a_status_survives_its_json(here: Here, scenario: str) -> None:
    """What is read from the JSON of a status has the same JSON, and the same picture's rows."""
    here.use(scenario)
    status = reserve_gpu.status()
    said = json.loads(json.dumps(status.to_dict()))
    read = status_from_json.status(said)
    assert read.to_dict() == said
    assert Seen({"lab1": read}).picture().layout.sections[0].entries == [
        entry._replace(is_mine=False) for entry in status.picture().layout.entries
    ]


def test_a_reservation_survives_its_json(here: Here) -> None:
    """A holder with its note, part and end is read as it was written; also one who waits."""
    here.use("mixed")
    with here.child() as child:
        assert not child.reserve("memory='1GB', note='mine', for_='2h', idle='1h'").error
        child.send("reserve_gpu.reserve(count=5, wait='1h')")
        said = json.loads(json.dumps(reserve_gpu.status().to_dict()))
        assert status_from_json.status(said).to_dict() == said


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


def rows(*states: str) -> dict[str, Any]:
    devices = [
        {"state": state, "index": index, "uuid": f"GPU-{index}"}
        for index, state in enumerate(states)
    ]
    return {"version": 1, "host": "box", "devices": devices}


def seen(**answers: tuple[str, ...]) -> Seen:
    found = {name: status_from_json.status(rows(*states)) for name, states in answers.items()}
    return Seen(found, time.time(), ("lab",))


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


@pytest.mark.parametrize(
    ("line", "show"),
    [
        ("reserve-gpu kernel install --hosts lab", lambda: str(seen(lab1=("free",)).picture())),
        ("ssh -t lab1 reserve-gpu run -- COMMAND ...", lambda: str(seen(lab1=("free",)).picture())),
        ("ssh lab2", lambda: hosts_view.silent("lab2", 5)),
    ],
)
def test_a_line_for_a_shell_is_typed_behind_a_sign_in_a_cell(
    here: Here, line: str, show: Callable[[], str]
) -> None:
    """What a notebook says to type in a shell stands behind `!` there, and bare in a shell."""
    assert line in show()
    assert f"!{line}" not in show()
    here.shell()
    assert f"!{line}" in show()


# -- over ssh ------------------------------------------------------------------------------------

over_ssh = [pytest.mark.full, needs_ssh, pytest.mark.xdist_group("hosts")]
OLDER = """#!/bin/sh
echo 'Welcome to {lab5}!'
echo '{"version": 0, "devices": []}'
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Make two good hosts, one without the package, one of an older format, and one that hangs."""
    folder = tmp_path_factory.mktemp("hosts")
    old = folder / "old"
    old.mkdir()
    (old / "reserve-gpu").write_text(OLDER)
    (old / "reserve-gpu").chmod(0o755)
    paths = {"lab4": "/usr/bin:/bin", "lab5": f"{old}:/usr/bin:/bin"}
    with Hosts(folder, "lab1", "lab2", "lab3", "lab4", "lab5", paths=paths) as lab:
        lab.machines["lab2"].use("two")
        lab.freeze("lab3")
        yield lab


def command(lab: Hosts, *words: str) -> CompletedProcess[str]:
    return lab.asking.command(sys.executable, "-m", "reserve_gpu", *words)


class TestOverSsh:
    """Real servers, each with a machine of the stand-in driver."""

    pytestmark = over_ssh

    def test_one_picture(self, lab: Hosts) -> None:
        """Five hosts are one picture; each that does not answer is a line with a way out."""
        done = command(lab, "status", "--hosts", "lab[1-5]", "nowhere")
        assert done.returncode == 0, done.stderr
        text = done.stdout
        assert text.startswith("4 of 4 GPUs are free: lab1 GPU0 and GPU1, lab2 GPU0 and GPU1.")
        assert "lab3: no answer within 5 s. Try: ssh lab3" in text
        assert "lab4: ssh can't find reserve-gpu there. Install it, or link it" in text
        assert "lab5: its reserve_gpu is older than this one (format 0). Update it on lab5." in text
        assert "nowhere: ssh can't connect: Could not resolve hostname nowhere" in text

    def test_json(self, lab: Hosts) -> None:
        """In JSON each host has its status, or the problem in place of it."""
        done = command(lab, "status", "--json", "--hosts", "lab1", "lab5")
        first, second = json.loads(done.stdout)["hosts"]
        assert [first["name"], second["name"]] == ["lab1", "lab5"]
        assert len(first["status"]["devices"]) == 2
        assert first["problem"] is None
        assert second["status"] is None
        assert "older" in second["problem"]

    def test_page(self, lab: Hosts) -> None:
        """The page for browsers has a section for each host."""
        page = command(lab, "status", "--format", "html", "--hosts", "lab1", "lab2").stdout
        assert page.count("<table") == 2
        assert "<title>GPUs of lab1, lab2</title>" in page

    def test_metrics(self, lab: Hosts) -> None:
        """Metrics are told apart by the names that ssh has for the hosts."""
        parser = pytest.importorskip("prometheus_client.parser")
        text = command(lab, "status", "--format", "prometheus", "--hosts", "lab1", "lab2").stdout
        families = {f.name: f for f in parser.text_string_to_metric_families(text)}
        free = families["reserve_gpu_free"].samples
        assert sorted(sample.labels["hostname"] for sample in free) == ["lab1"] * 2 + ["lab2"] * 2
        assert len(families["reserve_gpu_waiting"].samples) == 2

    def test_nobody_answers(self, lab: Hosts) -> None:
        """If no host answers, the exit code says so."""
        assert command(lab, "status", "--hosts", "lab4").returncode == 69

    def test_a_host_without_a_driver(self, lab: Hosts) -> None:
        """What reserve_gpu says on a host is its line in the picture."""
        lab.machines["lab2"].write("fail nvmlInit_v2 * 9")
        try:
            text = command(lab, "status", "--hosts", "lab1", "lab2").stdout
        finally:
            lab.machines["lab2"].use("two")
        assert "lab2: " in text
        assert "driver" in text.partition("lab2: ")[2]

    def test_the_magic(self, lab: Hosts, here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
        """In a notebook the magic shows the same, as a table for each host."""
        monkeypatch.setenv("PATH", lab.environ()["PATH"])
        shell = here.shell()
        cell = shell.run("%reserve_gpu --status --hosts lab1 lab2")
        assert "4 of 4 GPUs are free" in cell.shown
        assert cell.values[0]["text/html"].count("<table") == 2
        assert "Use --hosts together with --status" in shell.run("%reserve_gpu --hosts lab1").all

    def test_ones_own_is_released_from_here(self, lab: Hosts) -> None:
        """What one holds on a host has a line that releases it from here."""
        with lab.machines["lab1"].kernel(JPY_SESSION_NAME="/home/a/far.ipynb") as kernel:
            kernel.run("%reserve_gpu")
            words = (sys.executable, "-m", "reserve_gpu", "status", "--hosts", "lab1")
            typed = f"ssh lab1 reserve-gpu release {kernel.pid}"
            assert typed in lab.asking.typed(*words).stdout
            done = lab.asking.command("ssh", "lab1", "reserve-gpu", "release", "far.ipynb")
            assert done.stdout == f"Released GPU0 of far.ipynb (pid {kernel.pid}).\n"
            visible = kernel.run("import os; print([os.environ['CUDA_VISIBLE_DEVICES']])").stdout
            assert visible == "['']\n"
        done = command(lab, "release", "lab1:far.ipynb")
        assert done.returncode == 2
        assert done.stderr.endswith("Run: ssh -t lab1 reserve-gpu release far.ipynb\n")
