"""`reserve-gpu report`: the histories that this user may read, here and on other machines."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from reserve_gpu.allocation.request import rules
from reserve_gpu.commands import output
from reserve_gpu.commands.hosts.remote_status import HOSTS, OtherMachines, other_machines
from reserve_gpu.commands.report import totals
from reserve_gpu.commands.report.usage_view import Report, read_report
from reserve_gpu.gpus.nvml import Nvml
from reserve_gpu.log import log_reader, places
from reserve_gpu.model import parsing
from reserve_gpu.model.devices import Device
from reserve_gpu.model.errors import DriverError, RequestError
from reserve_gpu.model.option import DAYS, Option, add
from reserve_gpu.render.phrases import LEAST_HOURS
from reserve_gpu.system import procfs, settings

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Iterable, Mapping

    from reserve_gpu.commands.report.totals import Hours, Summary

DRIVER_LIMIT_S = 5.0  # for the driver to say what the devices are called
WORDS = ("reserve-gpu", "report", "--format", "json")


def run(arguments: Namespace) -> output.Output:
    """Return the report that these arguments ask for. Raises RequestError."""
    now = time.time()
    since, lasts_s = parsing.parse_since(arguments.since, now)
    machines = other_machines(arguments)
    if machines is None:
        report = _here(arguments.by, since, now)
    else:
        output.end_with_ssh()
        report = _elsewhere(machines, arguments.by, since)._replace(since=since, until=now)
    code = 0 if report.has_answers else DriverError.exit_code
    return output.answer(report._replace(lasts_s=lasts_s), arguments.format, "GPU-hours", code)


def _elsewhere(machines: OtherMachines, by: str, since: float) -> Report:
    """Return the report of other machines."""
    words = (*WORDS, "--by", by, "--since", f"@{since:.0f}")
    said = machines.ask(words, read_report)
    problems = {name: each for name, each in said.items() if isinstance(each, str)}
    reports = {name: each for name, each in said.items() if isinstance(each, Report)}
    whole = merged(reports, by)
    return whole._replace(host=", ".join(said), problems=problems, has_answers=bool(reports))


def _here(by: str, since: float, now: float) -> Report:
    """Return the report of this machine."""
    cut: set[str] = set()
    summary = totals.summed(log_reader.since(since, now, cut), by)
    is_tiny = totals.together(summary.days.values()).reserved < LEAST_HOURS
    is_of_today = [*summary.days] == [totals.day(now)]
    older = (each.entry.start < since for each in log_reader.since(0.0, since, set()))
    sees_all = os.geteuid() == places.ROOT and places.is_for_all(settings.history_directory())
    return Report(
        by,
        _labelled(summary) if by == "gpu" else summary.rows,
        summary.days,
        summary.idle,
        since,
        now,
        host=procfs.machine_name(),
        user=None if sees_all else procfs.user_name(os.geteuid()),
        is_kept=log_reader.exists() or _is_on(),
        file=settings.user_file(),
        cut=tuple(sorted(cut)),
        is_new=is_tiny and is_of_today and not any(older),
    )


def _is_on() -> bool:
    """Tell whether what this user reserves from now on is logged."""
    with suppress(RequestError):  # a mistake in the user's own file
        return places.path_to_write(rules()) is not None
    return False


def _labelled(summary: Summary) -> Mapping[str, Hours]:
    """Return the rows by what devices are called; of two that had one name with their UUIDs.

    What users have written names what is not there any more, where that is one user's alone.
    """
    labels: dict[str, str] = dict(*summary.labels.values()) if len(summary.labels) == 1 else {}
    with suppress(DriverError), Nvml(DRIVER_LIMIT_S) as gpus:
        labels |= {each.uuid: each.label for each in gpus.walk() if isinstance(each, Device)}
    called = [labels.get(uuid, uuid) for uuid in summary.rows]
    names = (
        f"{label} {uuid[:12]}" if called.count(label) > 1 else label
        for label, uuid in zip(called, summary.rows, strict=True)
    )
    return dict(zip(names, summary.rows.values(), strict=True))


def merged(reports: Mapping[str, Report], by: str) -> Report:
    """Return the reports of several hosts as one; devices are called by the host, too."""

    def named(name: str, what: str) -> str:
        return f"{name}:{what}" if by == "gpu" else what

    idle = [
        each._replace(gpus=tuple(f"{name}:{gpu}" for gpu in each.gpus))
        for name, one in reports.items()
        for each in one.longest_idle
    ]
    users = {one.user for one in reports.values()}
    return Report(
        by,
        _added((named(name, what), hours) for name, one in reports.items()
               for what, hours in one.rows.items()),
        _added(row for one in reports.values() for row in one.days.items()),
        tuple(sorted(idle, key=lambda each: -each.idle_hours)[: totals.MOST_IDLE]),
        user=users.pop() if len(users) == 1 else None,
        is_kept=any(one.is_kept for one in reports.values()) or not reports,
        file=settings.user_file(),
        cut=tuple(sorted({user for one in reports.values() for user in one.cut})),
    )  # fmt: skip


def _added(rows: Iterable[tuple[str, Hours]]) -> Mapping[str, Hours]:
    sums: dict[str, Hours] = {}
    for name, hours in rows:
        sums[name] = totals.together([sums[name], hours]) if name in sums else hours
    return sums


MORE = """\
It shows what was logged where `history = true` is set: your own reservations,
and for root those of all. A part of a GPU counts by its share of the memory.

examples:
  reserve-gpu report                            each user, in the last 7 days
  reserve-gpu report --since Mon --by notebook  each notebook, since Monday
  reserve-gpu report --hosts lab                all machines of the group lab
  reserve-gpu report --since 2026-11-01 --format html > november.html
"""
OPTIONS = (
    Option("--since TIME",
           "7d (the default), 12h, today, yesterday, Mon, 2026-11-01 or '2026-11-01 18:00'",
           f"1d 7d 30d today yesterday {DAYS}", default="7d"),
    Option("--by", "a row for each user (the default), notebook, gpu or day",
           choices=("user", "notebook", "gpu", "day"), default="user"),
    *output.format_options(),
    HOSTS,
)  # fmt: skip


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `report`."""
    parser.epilog = MORE
    add(OPTIONS, parser)
