"""Programs that know only the output of `reserve-gpu skill`, and share a machine.

`python -m tests.support.robot TASKS` lets 16 robots run a number of tasks on 4 GPUs.
"""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.support.machine import Machine
from tests.support.processes import US

if TYPE_CHECKING:
    from collections.abc import Sequence

ROBOTS, GPUS = 16, 4
CALL_S = 6.0  # timeout of the tool that runs a robot's commands, in seconds
KILLED = 0.1  # fraction of the calls that their caller kills at a random time

# A task, which writes a line with its GPU and the time when it begins and when it ends.
WORK = """\
import os, sys, time
def note(word):
    line = f"{word} {sys.argv[1]} {os.environ['CUDA_VISIBLE_DEVICES']} {time.time()}\\n"
    os.write(log, line.encode())
log = os.open(sys.argv[2], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
note("begin")
time.sleep(float(sys.argv[3]))
note("end")
"""


class Page(NamedTuple):
    """The rules on the page.

    Attributes:
        line: The command line, which ends before the task.
        retried: The exit codes after which the same line should be run again.
        events: The names of the events.
    """

    line: Sequence[str]
    retried: set[int]
    events: set[str]


def read(page: str) -> Page:
    """Read the rules on the page. Raise ValueError if the page lacks them."""
    line, *_ = re.findall(r"^ {4}(reserve-gpu run .* --) .*$", page, re.MULTILINE)
    codes = re.findall(r"^- ([\d, ]+): (.*(?:\n  .*)*)", page, re.MULTILINE)
    retried = {
        int(code) for each, text in codes if "same line again" in text for code in each.split(",")
    }
    names = re.search(r'object with an "event": ([\w,\s]+?)\.', page)
    events = set(re.findall(r"\w+", names[1])) - {"or"} if names else set()
    return Page(shlex.split(line), retried, events)


class Robot:
    """A program that does its tasks one after the other."""

    def __init__(self, name: str, machine: Machine, page: Page, log: Path) -> None:
        self._name, self._machine, self._page, self._log = name, machine, page, log
        self._random = random.Random(name)  # noqa: S311 - no secret
        self.seen: Counter[str] = Counter()
        self.faults: list[str] = []
        self.done: list[str] = []
        self.late_s = 0.0  # longest time between the end of a task and its last event

    def work(self, tasks: Sequence[str]) -> None:
        """Do the tasks, and record output that breaks the rules as a fault."""
        try:
            for task in tasks:
                while not self._try(task):
                    self.seen["retried"] += 1
        except (ValueError, KeyError, OSError) as error:
            self.faults.append(repr(error)[:1000])

    def _try(self, task: str) -> bool:
        """Run the task once, or until its caller kills it. Return whether it is done.

        Some calls wait only briefly, so that they are refused.
        """
        self.seen["calls"] += 1
        seconds = self._random.uniform(0, 0.5)
        ours = [*US, *self._page.line[1:-1]]
        ours[ours.index("--wait") + 1] = self._random.choice(("5s", "0.3s"))
        name = f"{task}/{self.seen['calls']}"
        work = [sys.executable, "-S", "-c", WORK, name, str(self._log), str(seconds)]
        environ = self._machine.environ(RESERVE_GPU_AGENT=self._name)
        process = subprocess.Popen(
            [*ours, "--", *work], env=environ, cwd=self._machine.folder, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
        limit_s = self._random.uniform(0, 2) if self._random.random() < KILLED else CALL_S
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            self.seen["killed"] += 1
        end = time.monotonic()
        _, err = process.communicate()  # until the last event
        self.late_s = max(self.late_s, time.monotonic() - end)
        self._read_events(err)
        if process.returncode == 0:
            self.done.append(task)
        elif process.returncode > 0 and process.returncode not in self._page.retried:
            raise ValueError(f"{process.returncode}: {err}")
        return process.returncode == 0

    def _read_events(self, text: str) -> None:
        """Read each line. Raise ValueError for a line that is not an event on the page."""
        for line in text.splitlines():
            event: dict[str, Any] = json.loads(line)
            if event["event"] not in self._page.events or event["version"] != 1:
                raise ValueError(line)
            self.seen[event["event"]] += 1
            if event["event"] == "refused":
                self._require_next(event)

    def _require_next(self, refusal: dict[str, Any]) -> None:
        """Raise ValueError for a refusal without a useful and harmless next step."""
        harmful = [each for each in refusal["next"] if "release" in each or "--end" in each]
        is_seen = refusal["reason"] != "mutex_held"  # otherwise, no GPU was read
        if harmful or not refusal["retry_after_s"]:
            raise ValueError(str(refusal))
        if is_seen and not (refusal["next"] and refusal["place"]):
            raise ValueError(str(refusal))


class Result(NamedTuple):
    """The result of all robots.

    Attributes:
        done: The tasks that were done.
        faults: Descriptions of output that broke the rules.
        seen: The number of events by their names, and of calls, retries and killed calls.
        late_s: The longest time between the end of a task and its last event, in seconds.
        overlaps: Calls that had the same GPU at the same time.
        held: The labels of the devices that are reserved at the end.
        seconds: The duration of all tasks.
    """

    done: list[str]
    faults: list[str]
    seen: Counter[str]
    late_s: float
    overlaps: list[str]
    held: list[str]
    seconds: float


def run(folder: Path, tasks: int) -> Result:
    """Let the robots do a number of tasks."""
    machine = Machine(folder)
    machine.write("gpu\n" * GPUS)
    page = read(machine.command(*US, "skill").stdout)
    log = folder / "work.log"
    robots = [Robot(f"robot{number}", machine, page, log) for number in range(ROBOTS)]
    names = [f"task{number}" for number in range(tasks)]
    threads = [
        threading.Thread(target=robot.work, args=[names[place::ROBOTS]])
        for place, robot in enumerate(robots)
    ]
    start = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    status = json.loads(machine.command(*US, "status", "--json").stdout)
    return Result(
        [task for robot in robots for task in robot.done],
        [fault for robot in robots for fault in robot.faults],
        sum((robot.seen for robot in robots), Counter()),
        max(robot.late_s for robot in robots),
        overlaps(log.read_text().splitlines()),
        [each["label"] for each in status["devices"] if each["holders"]],
        time.monotonic() - start,
    )


def overlaps(lines: Sequence[str]) -> list[str]:
    """Return the calls that began on a GPU during another call on it.

    A call without an end was killed, and is ignored.
    """
    found, running = [], dict[str, str]()
    ended = {line.split()[1] for line in lines if line.startswith("end")}
    for line in sorted(lines, key=lambda line: float(line.split()[3])):
        word, task, gpu, _ = line.split()
        if word == "end":
            running.pop(gpu, None)
        else:
            if (other := running.get(gpu)) and other in ended:
                found.append(f"{task} and {other} on {gpu}")
            running[gpu] = task
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        print(run(Path(temporary), int(sys.argv[1]))._replace(done=[]))
