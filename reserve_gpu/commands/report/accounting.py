"""The `reserve-gpu report` command: total the usage history of this machine or others."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from reserve_gpu.allocation.request import rules
from reserve_gpu.commands import output
from reserve_gpu.commands.hosts.hosts_option import HOSTS, other_machines
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

    from reserve_gpu.commands.hosts.remote_status import OtherMachines
    from reserve_gpu.commands.report.totals import Hours, Summary

DRIVER_LIMIT_S = 5.0  # seconds to wait for the driver to list the devices
REPORT_COMMAND = ("reserve-gpu", "report", "--format", "json")


def run(arguments: Namespace) -> output.Output:
    """Return the requested report.

    Raises:
        RequestError: An argument is invalid.
    """
    now = time.time()
    since, lasts_s = parsing.parse_since(arguments.since, now)
    machines = other_machines(arguments)
    if machines is None:
        report = _local_report(arguments.by, since, now)
    else:
        output.end_with_ssh()
        report = _remote_report(machines, arguments.by, since)._replace(since=since, until=now)
    code = 0 if report.has_answers else DriverError.exit_code
    return output.answer(report._replace(lasts_s=lasts_s), arguments.format, "GPU-hours", code)


def _remote_report(machines: OtherMachines, by: str, since: float) -> Report:
    words = (*REPORT_COMMAND, "--by", by, "--since", f"@{since:.0f}")
    answers = machines.run(words, read_report)
    problems = {name: each for name, each in answers.items() if isinstance(each, str)}
    reports = {name: each for name, each in answers.items() if isinstance(each, Report)}
    total = merged(reports, by)
    return total._replace(host=", ".join(answers), problems=problems, has_answers=bool(reports))


def _local_report(by: str, since: float, now: float) -> Report:
    cut: set[str] = set()
    summary = totals.summed(log_reader.since(since, now, cut), by)
    is_tiny = totals.together(summary.days.values()).reserved < LEAST_HOURS
    is_only_today = [*summary.days] == [totals.day(now)]
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
        is_kept=log_reader.exists() or _is_enabled(),
        file=settings.user_file(),
        cut=tuple(sorted(cut)),
        is_new=is_tiny and is_only_today and not any(older),
    )


def _is_enabled() -> bool:
    """Return whether this user's new reservations are logged."""
    with suppress(RequestError):  # the user's configuration file is invalid
        return places.path_to_write(rules()) is not None
    return False


def _labelled(summary: Summary) -> Mapping[str, Hours]:
    """Return the rows, with device labels instead of UUIDs as their names.

    If several devices have the same label, the start of the UUID is appended to each label. A
    device that the driver no longer lists gets its label from the history, but only in a report
    about a single user, because one of several users could write misleading labels.
    """
    labels: dict[str, str] = dict(*summary.labels.values()) if len(summary.labels) == 1 else {}
    with suppress(DriverError), Nvml(DRIVER_LIMIT_S) as gpus:
        labels |= {each.uuid: each.label for each in gpus.walk() if isinstance(each, Device)}
    row_labels = [labels.get(uuid, uuid) for uuid in summary.rows]
    names = (
        f"{label} {uuid[:12]}" if row_labels.count(label) > 1 else label
        for label, uuid in zip(row_labels, summary.rows, strict=True)
    )
    return dict(zip(names, summary.rows.values(), strict=True))


def merged(reports: Mapping[str, Report], by: str) -> Report:
    """Merge the reports from several hosts.

    Args:
        reports: Each host's report, by host name.
        by: How the rows are grouped: `user`, `notebook`, `gpu`, or `day`. The names of GPU rows are
            prefixed with the host name.
    """

    def full_name(host: str, row: str) -> str:
        return f"{host}:{row}" if by == "gpu" else row

    idle = [
        each._replace(gpus=tuple(f"{name}:{gpu}" for gpu in each.gpus))
        for name, one in reports.items()
        for each in one.longest_idle
    ]
    users = {one.user for one in reports.values()}
    return Report(
        by,
        _summed((full_name(host, row), hours) for host, one in reports.items()
                for row, hours in one.rows.items()),
        _summed(row for one in reports.values() for row in one.days.items()),
        tuple(sorted(idle, key=lambda each: -each.idle_hours)[: totals.MOST_IDLE]),
        user=users.pop() if len(users) == 1 else None,
        is_kept=any(one.is_kept for one in reports.values()) or not reports,
        file=settings.user_file(),
        cut=tuple(sorted({user for one in reports.values() for user in one.cut})),
    )  # fmt: skip


def _summed(rows: Iterable[tuple[str, Hours]]) -> Mapping[str, Hours]:
    sums: dict[str, Hours] = {}
    for name, hours in rows:
        sums[name] = totals.together([sums[name], hours]) if name in sums else hours
    return sums


MORE = """\
The report covers reservations made while `history = true` was set: your own
or, for root, those of all users. A part of a GPU counts in proportion to its
share of the memory.

examples:
  reserve-gpu report                            each user, in the last 7 days
  reserve-gpu report --since Mon --by notebook  each notebook, since Monday
  reserve-gpu report --hosts lab                all machines in the group lab
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
    """Add the `report` command's arguments."""
    parser.epilog = MORE
    add(OPTIONS, parser)
