"""A real Prometheus evaluates the queries of docs/formats.md and of the board for Grafana.

What it is given are the metrics that our exporter makes of five hours on two machines. They are
made up here, minute by minute. What it answers is compared with sums that loops make of the same
minutes, without any metrics.
"""

from __future__ import annotations

import json
import re
import struct
import subprocess
import time
from collections import defaultdict
from functools import cache, partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import ProxyHandler, Request, build_opener

import pytest

from reserve_gpu.commands.export import prometheus
from reserve_gpu.model.devices import Device, State, Usage
from reserve_gpu.model.holders import DeviceStatus, Holder
from reserve_gpu.model.queue import Ticket
from reserve_gpu.model.requests import ReservationTerms, Size
from reserve_gpu.render.status_view import Status
from tests.support.holders import a_holder
from tests.support.hosts import free_port
from tests.support.machine import LIMIT_S, ROOT, program

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

PROMETHEUS = program("prometheus")
pytestmark = [
    pytest.mark.xdist_group("prometheus"),  # one server for all tests
    pytest.mark.skipif(PROMETHEUS is None, reason="needs Prometheus"),
]

DOCS = ROOT / "docs"
QUERY = re.compile(r"^### ([^\n]+)\n(?:(?!^#).)*?^```promql\n(.*?)^```$", re.MULTILINE | re.DOTALL)

Answer: TypeAlias = "dict[tuple[str, ...], float]"
Event = TypeVar("Event", "Hold", "Wait", "Stray")

# -- what happens ----------------------------------------------------------------------------------

MINUTES = 300
NEVER = MINUTES
MIB = 1 << 20
MEMORY_MIB = {
    "lab1": {"0": 40960, "1": 40960, "2:0": 20480, "3": 40960},  # nobody ever has 3
    "lab2": {"0": 24576, "1": 24576},
}
HOSTS = tuple(MEMORY_MIB)
OFF = {"lab1": range(60, 70)}  # the machine is off: each scrape fails
PAUSE = range(200, 210)  # Prometheus itself is off: no scrape is tried
LAST_FILE = {"lab1": NEVER, "lab2": 285}  # cron stops, and the file stays
FILE = {"lab1": "/var/lib/node_exporter/textfile/gpus.prom", "lab2": "gpus.prom"}


class Hold(NamedTuple):
    """A reservation of one process, from minute `first` until before `last`."""

    host: str
    gpu: str
    user: str
    first: int
    last: int
    memory_limit_mib: float | None = None
    used_mib: float | None = None
    idle_from: int = NEVER


HOLDS = (
    # Two users share a GPU. Alice has two parts of it, and is over for some time. Both go idle.
    Hold("lab1", "0", "alice", 10, 140, 4096, 5000, idle_from=120),
    Hold("lab1", "0", "alice", 40, 110, 8192, 7500),
    Hold("lab1", "0", "bob", 30, 260, 10240, 9000, idle_from=120),
    # One user has a GPU with two processes, then with one, which is forgotten.
    Hold("lab1", "1", "alice", 20, 290, idle_from=45),
    Hold("lab1", "1", "alice", 25, 90, idle_from=45),
    # A MIG instance. Nothing begins or ends while a machine or Prometheus is off.
    Hold("lab1", "2:0", "carol", 30, 190, idle_from=150),
    Hold("lab1", "2:0", "alice", 192, 240, idle_from=195),  # she has two that are idle
    # The other machine: somebody who shares without a size, and a reservation that goes on.
    Hold("lab2", "0", "bob", 0, MINUTES, idle_from=20),
    Hold("lab2", "1", "carol", 205, MINUTES, None, 900),
    Hold("lab2", "1", "alice", 206, MINUTES, 2048, 3000),
)


class Wait(NamedTuple):
    """A process in the queue of a machine."""

    host: str
    user: str
    first: int
    last: int


# Dave never gets a GPU.
WAITS = (
    Wait("lab1", "dave", 50, 130),
    Wait("lab1", "dave", 55, 75),
    Wait("lab2", "alice", 180, 206),
    Wait("lab2", "dave", 270, MINUTES),
)


class Stray(NamedTuple):
    """A process that uses a GPU without a reservation."""

    host: str
    gpu: str
    first: int
    last: int


STRAYS = (Stray("lab2", "1", 40, 80), Stray("lab1", "1", 100, 130))


def active(events: Iterable[Event], host: str, minute: int) -> list[Event]:
    return [each for each in events if each.host == host and each.first <= minute < each.last]


def status(host: str, minute: int, start: float) -> Status:
    """Return the status that reserve_gpu would have shown in that minute."""
    now = start + 60 * minute
    rows = tuple(row(host, gpu, minute, start) for gpu in MEMORY_MIB[host])
    waiting = tuple(
        Ticket(number, f"{number}", None, a_holder(number, each.user))
        for number, each in enumerate(active(WAITS, host, minute))
    )
    return Status(rows, waiting, time=now, host=host)


def row(host: str, gpu: str, minute: int, start: float) -> DeviceStatus:
    index, _, instance = gpu.partition(":")
    device = Device(
        int(index), f"GPU-{host}-{gpu}", "A100", memory_mib=MEMORY_MIB[host][gpu],
        instance=int(instance) if instance else None, gpu_uuid=f"GPU-{host}-{index}",
    )  # fmt: skip
    holds = [each for each in active(HOLDS, host, minute) if each.gpu == gpu]
    is_stray = any(each.gpu == gpu for each in active(STRAYS, host, minute))
    state = State.RESERVED if holds else State.BUSY if is_stray else State.FREE
    return DeviceStatus(
        device, state, Usage(compute=0, mps=0, used_mib=0),
        holders=tuple(holder(pid, each, start) for pid, each in enumerate(holds, 1)),
        is_unused=bool(holds) and all(minute >= each.idle_from for each in holds),
        is_unreserved_use=is_stray,
    )  # fmt: skip


def holder(pid: int, hold: Hold, start: float) -> Holder:
    return a_holder(
        pid, hold.user, since=start + 60 * hold.first - 20,
        terms=ReservationTerms(Size(hold.memory_limit_mib) if hold.memory_limit_mib else None),
        used_mib=hold.used_mib,
        last_cell=None if hold.idle_from == NEVER else start + 60 * hold.idle_from - 20,
    )  # fmt: skip


# -- what Prometheus is given ----------------------------------------------------------------------

SCRAPED_AT_S = 7  # after the minute; the file is a few seconds old then
LOOKBACK_S = 300
# Each interval has five hours of its own, as weeks lie between them.
STARTS = {15: 1_767_571_200, 60: 1_769_385_600, 150: 1_771_200_000}
WRITTEN_AT_ONCE = 20  # minutes: Prometheus refuses what is an hour older than the newest sample
STALE = struct.pack("<Q", 0x7FF0000000000002)  # prometheus/prometheus: model/value/value.go

Labels: TypeAlias = "tuple[tuple[str, str], ...]"
Sample: TypeAlias = "tuple[float, Labels, bytes]"


@cache
def scrape(host: str, minute: int, start: float) -> dict[Labels, bytes]:
    """Return what a scrape reads, in an order of labels that Prometheus wants."""
    from prometheus_client.parser import text_string_to_metric_families

    text = prometheus.text(status(host, minute, start))
    text += f'node_textfile_mtime_seconds{{file="{FILE[host]}"}} {start + 60 * minute}\n'
    target = {"instance": f"{host}:9100", "job": "node"}
    return {
        tuple(sorted({"__name__": sample.name, **target, **sample.labels}.items())): struct.pack(
            "<d", sample.value
        )
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scrapes(interval: int) -> Iterator[Sample]:
    """Yield all samples, with the markers that Prometheus writes where a series ends."""
    start = STARTS[interval]
    before: dict[str, Mapping[Labels, bytes]] = {host: {} for host in HOSTS}
    for after_s in range(SCRAPED_AT_S, 60 * MINUTES, interval):
        if after_s // 60 in PAUSE:
            continue
        for host in HOSTS:
            minute = minute_of_file(host, after_s)
            series = {} if minute is None else scrape(host, minute, start)
            for labels, value in series.items():
                yield start + after_s, labels, value
            for labels in before[host].keys() - series.keys():
                yield start + after_s, labels, STALE
            before[host] = series


def minute_of_file(host: str, after_s: int) -> int | None:
    """Return when the file was written that a scrape reads; None for a machine that is off."""
    minute = after_s // 60
    return None if minute in OFF.get(host, ()) else min(minute, LAST_FILE[host])


def varint(number: int) -> bytes:
    more = b""
    while number > 0x7F:
        more += bytes([number & 0x7F | 0x80])
        number >>= 7
    return more + bytes([number])


def field(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def write_request(samples: Iterable[Sample]) -> bytes:
    """Return a body of https://prometheus.io/docs/specs/prw/remote_write_spec/."""
    by_series: defaultdict[Labels, bytes] = defaultdict(bytes)
    for at, labels, value in samples:
        by_series[labels] += field(2, b"\x09" + value + b"\x10" + varint(round(at * 1000)))
    return b"".join(
        field(1, b"".join(field(1, field(1, name.encode()) + field(2, text.encode()))
                          for name, text in labels) + written)
        for labels, written in by_series.items()
    )  # fmt: skip


def snappy(data: bytes) -> bytes:
    """Return data in Snappy's format, not compressed: literals of up to 64 KiB."""
    pieces = (data[at : at + 65536] for at in range(0, len(data), 65536))
    literals = (b"\xf4" + struct.pack("<H", len(piece) - 1) + piece for piece in pieces)
    return varint(len(data)) + b"".join(literals)


class Server:
    """A Prometheus on this machine."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.open = partial(build_opener(ProxyHandler({})).open, timeout=LIMIT_S)

    def is_ready(self) -> bool:
        try:
            with self.open(f"{self.url}/-/ready"):
                return True
        except (URLError, ConnectionError):
            return False

    def write(self, samples: Iterable[Sample]) -> None:
        headers = {
            "Content-Encoding": "snappy",
            "Content-Type": "application/x-protobuf",
            "X-Prometheus-Remote-Write-Version": "0.1.0",
        }
        body = snappy(write_request(samples))
        with self.open(Request(f"{self.url}/api/v1/write", body, headers)):  # noqa: S310 - http
            pass

    def get(self, path: str, **parameters: str) -> list[Any]:
        with self.open(f"{self.url}/api/v1/{path}?{urlencode(parameters)}") as response:
            answer = json.load(response)
        assert answer["status"] == "success"
        data = answer["data"]
        return list(data["result"] if isinstance(data, dict) else data)

    def ask(self, query: str, at: float, *labels: str) -> Answer:
        """Return the answer at a moment, by these labels, which are all that matter in it."""
        found: Answer = {}
        for each in self.get("query", query=query, time=str(at)):
            key = tuple(each["metric"].get(label, "") for label in labels)
            assert key not in found, f"{key} stands there twice"
            found[key] = float(each["value"][1])
        return found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start a Prometheus that has scraped both machines at each of the intervals."""
    folder = tmp_path_factory.mktemp("prometheus")
    (folder / "prometheus.yml").write_text("")
    port = free_port("127.0.0.1")
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [str(PROMETHEUS), f"--config.file={folder}/prometheus.yml",
             f"--storage.tsdb.path={folder}/data", "--storage.tsdb.retention.time=10y",
             f"--web.listen-address=127.0.0.1:{port}", "--web.enable-remote-write-receiver"],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        made = Server(port)
        deadline = time.monotonic() + LIMIT_S
        while not made.is_ready():
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        for interval in STARTS:
            for _, samples in groupby(
                scrapes(interval), lambda sample: sample[0] // (60 * WRITTEN_AT_ONCE)
            ):
                made.write(samples)
        yield made
    finally:
        process.terminate()
        process.wait(LIMIT_S)


# -- what it should answer -------------------------------------------------------------------------


class Look(NamedTuple):
    """What Prometheus knows at one moment: of each machine the minute in which its file was made.

    start: of the five hours. at: the moment, in seconds after it.
    """

    minutes: Mapping[str, int]
    start: int
    at: float


class Asked(NamedTuple):
    """A query's moment, and the looks of its range, one in each minute."""

    now: Look
    range: list[Look]


def look(interval: int, at: float, hosts: Iterable[str] = HOSTS) -> Look:
    """Return what the last scrape before a moment has read, if that is no longer ago than 5 min."""
    last = int((at - SCRAPED_AT_S) // interval) * interval + SCRAPED_AT_S
    last = min(last, (60 * MINUTES - 1 - SCRAPED_AT_S) // interval * interval + SCRAPED_AT_S)
    while last // 60 in PAUSE:
        last -= interval
    minutes = {}
    if last >= SCRAPED_AT_S and at - last < LOOKBACK_S:
        of_each = {host: minute_of_file(host, last) for host in hosts}
        minutes = {host: minute for host, minute in of_each.items() if minute is not None}
    return Look(minutes, STARTS[interval], at)


def asked(interval: int, at: float, range_s: float, hosts: Iterable[str] = HOSTS) -> Asked:
    first = max(0, int((at - range_s) // 60) + 1)
    looks = [look(interval, 60 * minute, hosts) for minute in range(first, int(at // 60) + 1)]
    return Asked(look(interval, at, hosts), looks)


def of_each_user(host: str, minute: int) -> dict[tuple[str, str], list[Hold]]:
    """Return the reservations in a minute, by device and user."""
    found: defaultdict[tuple[str, str], list[Hold]] = defaultdict(list)
    for hold in active(HOLDS, host, minute):
        found[hold.gpu, hold.user].append(hold)
    return found


def hours(count: Callable[[str, int], Iterable[tuple[str, float]]]) -> Callable[[Asked], Answer]:
    """Sum what is counted of each machine in each minute of the range."""

    def answer(question: Asked) -> Answer:
        found: defaultdict[tuple[str, ...], float] = defaultdict(float)
        for each in question.range:
            for host, minute in each.minutes.items():
                for name, value in count(host, minute):
                    found[name,] += value / 60
        return dict(found)

    return answer


def reserved(host: str, minute: int) -> Iterator[tuple[str, float]]:
    for _, user in of_each_user(host, minute):
        yield user, 1


def by_size(host: str, minute: int) -> Iterator[tuple[str, float]]:
    for (gpu, user), holds in of_each_user(host, minute).items():
        parts = [hold.memory_limit_mib for hold in holds if hold.memory_limit_mib is not None]
        yield user, sum(parts) / MEMORY_MIB[host][gpu] if len(parts) == len(holds) else 1


def idle_holds(host: str, minute: int) -> Iterator[Hold]:
    """Yield each reservation that is idle, of a device that nobody else has."""
    holds = active(HOLDS, host, minute)
    for hold in holds:
        is_alone = sum(each.gpu == hold.gpu for each in holds) == 1
        if is_alone and minute >= hold.idle_from:
            yield hold


def idle(host: str, minute: int) -> Iterator[tuple[str, float]]:
    for hold in idle_holds(host, minute):
        yield hold.user, 1


def over_by(host: str, minute: int) -> Iterator[tuple[str, str, float]]:
    """Yield the device, the user and the use of each user who is over."""
    for (gpu, user), holds in of_each_user(host, minute).items():
        if all(hold.memory_limit_mib is not None for hold in holds):
            used = sum(hold.used_mib or 0 for hold in holds)
            if used > sum(hold.memory_limit_mib or 0 for hold in holds):
                yield gpu, user, used


def over(host: str, minute: int) -> Iterator[tuple[str, float]]:
    for _, user, _ in over_by(host, minute):
        yield user, 1


def waiting(host: str, minute: int) -> Iterator[tuple[str, float]]:
    for each in active(WAITS, host, minute):
        yield each.user, 1


def unreserved(host: str, minute: int) -> Iterator[tuple[str, float]]:
    yield host, len(active(STRAYS, host, minute))


def share_of(host: str, minute: int) -> float:
    return len({hold.gpu for hold in active(HOLDS, host, minute)}) / len(MEMORY_MIB[host])


def share(question: Asked) -> Answer:
    return {(host,): share_of(host, minute) for host, minute in question.now.minutes.items()}


def mean_share(question: Asked) -> Answer:
    shares: defaultdict[tuple[str, ...], list[float]] = defaultdict(list)
    for each in question.range:
        for host, minute in each.minutes.items():
            shares[host,].append(share_of(host, minute))
    return {host: sum(values) / len(values) for host, values in shares.items()}


def idle_now(question: Asked, longer_than_s: float = 0) -> Answer:
    found = {
        (host, hold.gpu, hold.user): 60.0 * (minute - hold.idle_from) + 20
        for host, minute in question.now.minutes.items()
        for hold in idle_holds(host, minute)
    }
    return {key: seconds for key, seconds in found.items() if seconds > longer_than_s}


def over_now(question: Asked) -> Answer:
    return {
        (host, gpu, user): used * MIB
        for host, minute in question.now.minutes.items()
        for gpu, user, used in over_by(host, minute)
    }


def old_files(question: Asked) -> Answer:
    ages = {
        (f"{host}:9100",): question.now.at - 60 * minute
        for host, minute in question.now.minutes.items()
    }
    return {host: age for host, age in ages.items() if age > 300}


def number_of(count: Callable[[str, int], int | None]) -> Callable[[Asked], Answer]:
    """Sum over the machines that are known at the moment; nothing if nothing is known of any."""

    def answer(question: Asked) -> Answer:
        counts = [count(*each) for each in question.now.minutes.items()]
        known = [each for each in counts if each is not None]
        return {(): sum(known)} if known else {}

    return answer


def idle_devices(host: str, minute: int) -> int | None:
    """Count the devices that are idle, None if of no device it is known whether it is."""
    holds = active(HOLDS, host, minute)
    unknown = {
        gpu for gpu in {hold.gpu for hold in holds}
        if sum(hold.gpu == gpu for hold in holds) > 1
        and all(minute >= hold.idle_from for hold in holds if hold.gpu == gpu)
    }  # fmt: skip
    if not {hold.gpu for hold in holds} - unknown:
        return None
    return len(list(idle_holds(host, minute)))


def free_devices(host: str, minute: int) -> int:
    reserved_ones = {hold.gpu for hold in active(HOLDS, host, minute)}
    used = {stray.gpu for stray in active(STRAYS, host, minute)}
    return len(MEMORY_MIB[host].keys() - reserved_ones - used)


def waiting_now(question: Asked) -> Answer:
    found: defaultdict[tuple[str, ...], float] = defaultdict(float)
    for host, minute in question.now.minutes.items():
        for each in active(WAITS, host, minute):
            found[each.user,] += 1
    return dict(found)


Expected: TypeAlias = "tuple[Callable[[Asked], Answer], tuple[str, ...]]"
DEVICE = ("hostname", "index", "username")
# By the heading that the query stands under.
OF_PAGE: dict[str, Expected] = {
    "Hours reserved, by user": (hours(reserved), ("username",)),
    "Hours reserved, by user, with parts by size": (hours(by_size), ("username",)),
    "Hours idle, by user": (hours(idle), ("username",)),
    "Hours over the promise, by user": (hours(over), ("username",)),
    "Hours waiting, by user": (hours(waiting), ("username",)),
    "Hours used without a reservation, by machine": (hours(unreserved), ("hostname",)),
    "Share of devices reserved, by machine": (share, ("hostname",)),
    "Mean share of devices reserved, by machine": (mean_share, ("hostname",)),
    "Idle now, the longest first": (idle_now, DEVICE),
    "Idle for four hours": (partial(idle_now, longer_than_s=4 * 3600), DEVICE),
    "Over the promise now": (over_now, DEVICE),
    "Machines with an outdated file": (old_files, ("instance",)),
}
# By the title of the panel, and what the query is called in it.
OF_BOARD: dict[tuple[str, str], Expected] = {
    ("Devices", "A"): (number_of(lambda *at: round(share_of(*at) * len(MEMORY_MIB[at[0]]))), ()),
    ("Devices", "B"): (number_of(idle_devices), ()),
    ("Devices", "C"): (number_of(free_devices), ()),
    ("Devices", "D"): (number_of(lambda *at: len(active(STRAYS, *at))), ()),
    ("Share of devices reserved", "A"): (share, ("hostname",)),
    ("Hours by user, in the chosen time range", "A"): (hours(reserved), ("username",)),
    ("Hours by user, in the chosen time range", "B"): (hours(by_size), ("username",)),
    ("Hours by user, in the chosen time range", "C"): (hours(idle), ("username",)),
    ("Hours by user, in the chosen time range", "D"): (hours(over), ("username",)),
    ("Hours by user, in the chosen time range", "E"): (hours(waiting), ("username",)),
    ("By machine, in the chosen time range", "A"): (mean_share, ("hostname",)),
    ("By machine, in the chosen time range", "B"): (hours(unreserved), ("hostname",)),
    ("Idle, the longest first", "A"): (idle_now, DEVICE),
    ("Processes that wait", "A"): (waiting_now, ("username",)),
}

END = 60 * MINUTES + 30
# Half a minute after a look: Prometheus 2 and 3 differ in whether a range has both of its ends.
MOMENTS = [60 * minute + 30 for minute in (15, 65, 85, 125, 145, 203, 208, 240)] + [END]
WEEK_S = 7 * 86400


def queries() -> dict[str, str]:
    """Return the queries of the page, by the headings that they stand under."""
    text = (DOCS / "formats.md").read_text()
    found = QUERY.findall(text)
    assert len(found) == text.count("```promql"), "a query has no heading of its own"
    return dict(found)


def board() -> Any:
    return json.loads((DOCS / "grafana.json").read_text())


def expressions() -> dict[tuple[str, str], str]:
    """Return the queries of the board, by panel and name."""
    return {
        (panel["title"], target["refId"]): target["expr"]
        for panel in board()["panels"]
        for target in panel["targets"]
    }


# -- whether it does -------------------------------------------------------------------------------


def test_every_query_is_tested() -> None:
    """Each query of the page and of the board has its numbers here."""
    assert queries().keys() == OF_PAGE.keys()
    assert expressions().keys() == OF_BOARD.keys()


@pytest.mark.parametrize("interval", STARTS)
@pytest.mark.parametrize("heading", OF_PAGE)
def test_page(server: Server, heading: str, interval: int) -> None:
    """A query of the page counts what has happened, whatever the scrape interval."""
    count, labels = OF_PAGE[heading]
    answers = [count(asked(interval, at, WEEK_S)) for at in MOMENTS]
    assert any(answers), "nothing happens that this query could find"
    for at, expected in zip(MOMENTS, answers, strict=True):
        found = server.ask(queries()[heading], STARTS[interval] + at, *labels)
        assert found == pytest.approx(expected), at


@pytest.mark.parametrize("hosts", [HOSTS, HOSTS[:1], HOSTS[1:]], ids=" ".join)
@pytest.mark.parametrize(("panel", "name"), OF_BOARD)
def test_board(server: Server, panel: str, name: str, hosts: tuple[str, ...]) -> None:
    """A query of the board counts the chosen machines in the chosen range."""
    count, labels = OF_BOARD[panel, name]
    chosen = ".*" if hosts == HOSTS else "|".join(hosts)
    query = expressions()[panel, name].replace("$hostname", chosen).replace("$__range", "7200s")
    assert "$" not in query
    answers = {
        (interval, at): count(asked(interval, at, 7200, hosts))
        for interval in STARTS
        for at in MOMENTS
    }
    assert any(answers.values()), "nothing happens that this query could find"
    for (interval, at), expected in answers.items():
        assert server.ask(query, STARTS[interval] + at, *labels) == pytest.approx(expected), at


def test_variables_of_the_board(server: Server) -> None:
    """The board asks for the machines by a metric and a label that there are."""
    variables = {each["name"]: each for each in board()["templating"]["list"]}
    assert variables["datasource"]["query"] == "prometheus"
    (asks,) = re.findall(r"^label_values\((\w+), (\w+)\)$", variables["hostname"]["query"]["query"])
    metric, label = asks
    ends = {"start": str(STARTS[60]), "end": str(STARTS[60] + END)}
    found = server.get(f"label/{label}/values", **{"match[]": metric}, **ends)
    assert found == [*HOSTS]


def test_the_board_needs_no_plugin() -> None:
    """The board has panels that come with Grafana, and asks the chosen data source and machines."""
    panels = board()["panels"]
    assert {panel["type"] for panel in panels} == {"table", "timeseries"}
    assert len({panel["id"] for panel in panels}) == len(panels)
    chosen = {"type": "prometheus", "uid": "${datasource}"}
    for panel in panels:
        assert panel["datasource"] == chosen
        for target in panel["targets"]:
            assert target["datasource"] == chosen
            metrics = re.findall(r"reserve_gpu_\w+(.{11})", target["expr"])
            assert set(metrics) == {"{hostname=~"}


def test_columns_of_the_board() -> None:
    """Each column of a table has a name for people: each query's, and what it is counted by."""
    for panel in board()["panels"]:
        if panel["type"] == "table":
            (names,) = (
                each["options"]["renameByName"]
                for each in panel["transformations"]
                if each["id"] == "organize"
            )
            queries_of = [target["refId"] for target in panel["targets"]]
            values = [f"Value #{name}" for name in queries_of] if queries_of[1:] else ["Value"]
            labels = OF_BOARD[panel["title"], "A"][1]
            assert names.keys() == {*labels, *values}
            assert panel["options"]["sortBy"][0]["displayName"] in names.values()


@pytest.mark.parametrize("interval", STARTS)
def test_hours_are_hours(server: Server, interval: int) -> None:
    """Carol has an instance for 160 minutes, in 10 of which the machine is off: 2.5 hours."""
    query = queries()["Hours reserved, by user"]
    found = server.ask(query, STARTS[interval] + 195 * 60 + 30, "username")
    assert found["carol",] == pytest.approx(2.5, abs=2 * interval / 3600)


def test_without_the_step_hours_are_no_hours(server: Server) -> None:
    """A sum over samples, as the page warns, is larger the more often Prometheus scrapes."""
    query = 'sum(sum_over_time(reserve_gpu_reserved{username="carol"}[5h]))'
    often, seldom = (server.ask(query, STARTS[each] + END)[()] for each in (15, 60))
    assert often / seldom == pytest.approx(4, rel=0.02)
