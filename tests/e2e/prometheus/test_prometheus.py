"""A real Prometheus evaluates the queries of docs/formats.md and of the Grafana dashboard.

The metrics of five hours on two machines are invented, minute by minute. The answers are compared
with sums over the same minutes.
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
Event = TypeVar("Event", "Hold", "Wait", "UnreservedUse")

# -- the invented events ---------------------------------------------------------------------------

MINUTES = 300
NEVER = MINUTES
MIB = 1 << 20
MEMORY_MIB = {
    "lab1": {"0": 40960, "1": 40960, "2:0": 20480, "3": 40960},  # 3 is never reserved
    "lab2": {"0": 24576, "1": 24576},
}
HOSTS = tuple(MEMORY_MIB)
OFF = {"lab1": range(60, 70)}  # the machine is off, and each scrape fails
PAUSE = range(200, 210)  # Prometheus is off
LAST_FILE = {"lab1": NEVER, "lab2": 285}  # the cron job stops, and its file remains
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
    # Two users share a GPU. Alice has two parts, and exceeds them for some time.
    Hold("lab1", "0", "alice", 10, 140, 4096, 5000, idle_from=120),
    Hold("lab1", "0", "alice", 40, 110, 8192, 7500),
    Hold("lab1", "0", "bob", 30, 260, 10240, 9000, idle_from=120),
    # A user holds a GPU with two processes, later with one.
    Hold("lab1", "1", "alice", 20, 290, idle_from=45),
    Hold("lab1", "1", "alice", 25, 90, idle_from=45),
    # A MIG instance. No event is at a time when a machine or Prometheus is off.
    Hold("lab1", "2:0", "carol", 30, 190, idle_from=150),
    Hold("lab1", "2:0", "alice", 192, 240, idle_from=195),  # her second idle device
    # On the other machine, a user shares a GPU without a memory limit.
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


WAITS = (
    Wait("lab1", "dave", 50, 130),
    Wait("lab1", "dave", 55, 75),
    Wait("lab2", "alice", 180, 206),
    Wait("lab2", "dave", 270, MINUTES),
)


class UnreservedUse(NamedTuple):
    """A process that uses a GPU without a reservation."""

    host: str
    gpu: str
    first: int
    last: int


UNRESERVED = (UnreservedUse("lab2", "1", 40, 80), UnreservedUse("lab1", "1", 100, 130))


def active(events: Iterable[Event], host: str, minute: int) -> list[Event]:
    return [each for each in events if each.host == host and each.first <= minute < each.last]


def status_at(host: str, minute: int, start: float) -> Status:
    """Return the status of a machine in that minute."""
    now = start + 60 * minute
    rows = tuple(device_row(host, gpu, minute, start) for gpu in MEMORY_MIB[host])
    waiting = tuple(
        Ticket(number, f"{number}", None, a_holder(number, each.user))
        for number, each in enumerate(active(WAITS, host, minute))
    )
    return Status(rows, waiting, time=now, host=host)


def device_row(host: str, gpu: str, minute: int, start: float) -> DeviceStatus:
    index, _, instance = gpu.partition(":")
    device = Device(
        int(index), f"GPU-{host}-{gpu}", "A100", memory_mib=MEMORY_MIB[host][gpu],
        instance=int(instance) if instance else None, gpu_uuid=f"GPU-{host}-{index}",
    )  # fmt: skip
    holds = [each for each in active(HOLDS, host, minute) if each.gpu == gpu]
    is_stray = any(each.gpu == gpu for each in active(UNRESERVED, host, minute))
    state = State.RESERVED if holds else State.BUSY if is_stray else State.FREE
    return DeviceStatus(
        device, state, Usage(compute=0, mps=0, used_mib=0),
        holders=tuple(holder_of(pid, each, start) for pid, each in enumerate(holds, 1)),
        is_unused=bool(holds) and all(minute >= each.idle_from for each in holds),
        is_unreserved_use=is_stray,
    )  # fmt: skip


def holder_of(pid: int, hold: Hold, start: float) -> Holder:
    return a_holder(
        pid, hold.user, since=start + 60 * hold.first - 20,
        terms=ReservationTerms(Size(hold.memory_limit_mib) if hold.memory_limit_mib else None),
        used_mib=hold.used_mib,
        last_cell=None if hold.idle_from == NEVER else start + 60 * hold.idle_from - 20,
    )  # fmt: skip


# -- samples for Prometheus ------------------------------------------------------------------------

SCRAPED_AT_S = 7  # after the full minute; the file is a few seconds old
LOOKBACK_S = 300
# The start of the five hours, for each scrape interval.
STARTS = {15: 1_767_571_200, 60: 1_769_385_600, 150: 1_771_200_000}
WRITTEN_AT_ONCE = 20  # minutes; Prometheus refuses samples one hour older than the newest one
STALE = struct.pack("<Q", 0x7FF0000000000002)  # prometheus/prometheus: model/value/value.go

Labels: TypeAlias = "tuple[tuple[str, str], ...]"
Sample: TypeAlias = "tuple[float, Labels, bytes]"


@cache
def scrape(host: str, minute: int, start: float) -> dict[Labels, bytes]:
    """Return the series that a scrape reads, with sorted labels."""
    from prometheus_client.parser import text_string_to_metric_families

    text = prometheus.text(status_at(host, minute, start))
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
    """Yield all samples, with the stale markers that Prometheus writes at the end of a series."""
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
    """Return the minute in which the scraped file was written, or None if the machine is off."""
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
    """Return the body of a request (https://prometheus.io/docs/specs/prw/remote_write_spec/)."""
    by_series: defaultdict[Labels, bytes] = defaultdict(bytes)
    for at, labels, value in samples:
        by_series[labels] += field(2, b"\x09" + value + b"\x10" + varint(round(at * 1000)))
    return b"".join(
        field(1, b"".join(field(1, field(1, name.encode()) + field(2, text.encode()))
                          for name, text in labels) + written)
        for labels, written in by_series.items()
    )  # fmt: skip


def snappy(data: bytes) -> bytes:
    """Return data in Snappy's format, uncompressed, as literals of up to 64 KiB."""
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
        return list(answer["data"]["result"])

    def evaluate(self, query: str, at: float, *labels: str) -> Answer:
        """Return the values of a query at a time, by these labels."""
        found: Answer = {}
        for each in self.get("query", query=query, time=str(at)):
            key = tuple(each["metric"].get(label, "") for label in labels)
            assert key not in found, f"duplicate {key}"
            found[key] = float(each["value"][1])
        return found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start a Prometheus with the samples of both machines at each scrape interval."""
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
        started = Server(port)
        deadline = time.monotonic() + LIMIT_S
        while not started.is_ready():
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        for interval in STARTS:
            for _, samples in groupby(
                scrapes(interval), lambda sample: sample[0] // (60 * WRITTEN_AT_ONCE)
            ):
                started.write(samples)
        yield started
    finally:
        process.terminate()
        process.wait(LIMIT_S)


# -- expected answers ------------------------------------------------------------------------------


class Snapshot(NamedTuple):
    """The state of Prometheus at one time.

    Attributes:
        minutes: The minute of each known machine's newest file.
        start: The start of the five hours.
        at: The time in seconds since the start.
    """

    minutes: Mapping[str, int]
    start: int
    at: float


class Question(NamedTuple):
    """The snapshot at the time of a query, and one for each minute of its range."""

    now: Snapshot
    range: list[Snapshot]


def snapshot_at(interval: int, at: float, hosts: Iterable[str] = HOSTS) -> Snapshot:
    """Return the data of the last scrape before a time, unless it is more than 5 min ago."""
    last = int((at - SCRAPED_AT_S) // interval) * interval + SCRAPED_AT_S
    last = min(last, (60 * MINUTES - 1 - SCRAPED_AT_S) // interval * interval + SCRAPED_AT_S)
    while last // 60 in PAUSE:
        last -= interval
    minutes = {}
    if last >= SCRAPED_AT_S and at - last < LOOKBACK_S:
        of_each = {host: minute_of_file(host, last) for host in hosts}
        minutes = {host: minute for host, minute in of_each.items() if minute is not None}
    return Snapshot(minutes, STARTS[interval], at)


def question_at(interval: int, at: float, range_s: float, hosts: Iterable[str] = HOSTS) -> Question:
    first = max(0, int((at - range_s) // 60) + 1)
    snapshots = [
        snapshot_at(interval, 60 * minute, hosts) for minute in range(first, int(at // 60) + 1)
    ]
    return Question(snapshot_at(interval, at, hosts), snapshots)


def of_each_user(host: str, minute: int) -> dict[tuple[str, str], list[Hold]]:
    """Return the reservations in a minute by device and user."""
    found: defaultdict[tuple[str, str], list[Hold]] = defaultdict(list)
    for hold in active(HOLDS, host, minute):
        found[hold.gpu, hold.user].append(hold)
    return found


def hours(count: Callable[[str, int], Iterable[tuple[str, float]]]) -> Callable[[Question], Answer]:
    """Return a function that sums the counts of all machines and minutes, in hours."""

    def answer(question: Question) -> Answer:
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
    """Yield the idle reservations of devices with one holder."""
    holds = active(HOLDS, host, minute)
    for hold in holds:
        is_alone = sum(each.gpu == hold.gpu for each in holds) == 1
        if is_alone and minute >= hold.idle_from:
            yield hold


def idle(host: str, minute: int) -> Iterator[tuple[str, float]]:
    for hold in idle_holds(host, minute):
        yield hold.user, 1


def over_by(host: str, minute: int) -> Iterator[tuple[str, str, float]]:
    """Yield the device, the user and the memory of each user who exceeds their parts."""
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
    yield host, len(active(UNRESERVED, host, minute))


def reserved_share(host: str, minute: int) -> float:
    return len({hold.gpu for hold in active(HOLDS, host, minute)}) / len(MEMORY_MIB[host])


def share(question: Question) -> Answer:
    return {(host,): reserved_share(host, minute) for host, minute in question.now.minutes.items()}


def mean_share(question: Question) -> Answer:
    shares: defaultdict[tuple[str, ...], list[float]] = defaultdict(list)
    for each in question.range:
        for host, minute in each.minutes.items():
            shares[host,].append(reserved_share(host, minute))
    return {host: sum(values) / len(values) for host, values in shares.items()}


def idle_now(question: Question, longer_than_s: float = 0) -> Answer:
    found = {
        (host, hold.gpu, hold.user): 60.0 * (minute - hold.idle_from) + 20
        for host, minute in question.now.minutes.items()
        for hold in idle_holds(host, minute)
    }
    return {key: seconds for key, seconds in found.items() if seconds > longer_than_s}


def over_now(question: Question) -> Answer:
    return {
        (host, gpu, user): used * MIB
        for host, minute in question.now.minutes.items()
        for gpu, user, used in over_by(host, minute)
    }


def old_files(question: Question) -> Answer:
    ages = {
        (f"{host}:9100",): question.now.at - 60 * minute
        for host, minute in question.now.minutes.items()
    }
    return {host: age for host, age in ages.items() if age > 300}


Expected: TypeAlias = "tuple[Callable[[Question], Answer], tuple[str, ...]]"
DEVICE = ("hostname", "index", "username")
# By the heading above the query.
PAGE_ANSWERS: dict[str, Expected] = {
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
# By the title of the panel and the name of the query.
DASHBOARD_ANSWERS: dict[tuple[str, str], Expected] = {
    ("Share of devices reserved", "A"): (share, ("hostname",)),
    ("Hours by user, in the chosen time range", "A"): (hours(reserved), ("username",)),
    ("Hours by user, in the chosen time range", "B"): (hours(by_size), ("username",)),
    ("Hours by user, in the chosen time range", "C"): (hours(idle), ("username",)),
    ("Hours by user, in the chosen time range", "D"): (hours(over), ("username",)),
    ("Hours by user, in the chosen time range", "E"): (hours(waiting), ("username",)),
    ("By machine, in the chosen time range", "A"): (mean_share, ("hostname",)),
    ("By machine, in the chosen time range", "B"): (hours(unreserved), ("hostname",)),
    ("Idle, the longest first", "A"): (idle_now, DEVICE),
}

END = 60 * MINUTES + 30
# At half minutes, because only Prometheus 2 includes both ends of a range.
MOMENTS = [60 * minute + 30 for minute in (15, 65, 85, 125, 145, 203, 208, 240)] + [END]
WEEK_S = 7 * 86400


def page_queries() -> dict[str, str]:
    """Return the queries of the page, by heading."""
    text = (DOCS / "formats.md").read_text()
    found = QUERY.findall(text)
    assert len(found) == text.count("```promql"), "a query has no heading"
    return dict(found)


def dashboard_queries() -> dict[tuple[str, str], str]:
    """Return the queries of the dashboard, by panel and name."""
    return {
        (panel["title"], target["refId"]): target["expr"]
        for panel in json.loads((DOCS / "grafana.json").read_text())["panels"]
        for target in panel["targets"]
    }


# -- tests -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("interval", STARTS)
@pytest.mark.parametrize("heading", PAGE_ANSWERS)
def test_page_query(server: Server, heading: str, interval: int) -> None:
    """A query of the page counts the events, at every scrape interval."""
    count, labels = PAGE_ANSWERS[heading]
    answers = [count(question_at(interval, at, WEEK_S)) for at in MOMENTS]
    assert any(answers), "no event for this query"
    for at, expected in zip(MOMENTS, answers, strict=True):
        found = server.evaluate(page_queries()[heading], STARTS[interval] + at, *labels)
        assert found == pytest.approx(expected), at


@pytest.mark.parametrize(("panel", "name"), DASHBOARD_ANSWERS)
def test_dashboard(server: Server, panel: str, name: str) -> None:
    """A query of the dashboard counts the selected machine in the selected range."""
    count, labels = DASHBOARD_ANSWERS[panel, name]
    query = (
        dashboard_queries()[panel, name].replace("$hostname", HOSTS[1]).replace("$__range", "7200s")
    )
    assert "$" not in query
    answers = {
        (interval, at): count(question_at(interval, at, 7200, HOSTS[1:]))
        for interval in STARTS
        for at in MOMENTS
    }
    assert any(answers.values()), "no event for this query"
    for (interval, at), expected in answers.items():
        assert server.evaluate(query, STARTS[interval] + at, *labels) == pytest.approx(expected), at
