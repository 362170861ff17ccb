"""Does each installed framework use exactly the GPUs that are reserved? Asked before any work.

Each is asked in a child process with this process's environment, so this process starts nothing.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from reserve_gpu import api
from reserve_gpu.commands.check import probes, verdict
from reserve_gpu.commands.check.verdict import Finding, Verdict
from reserve_gpu.commands.output import Output
from reserve_gpu.gpus import cuda_environment, memory_caps
from reserve_gpu.model.devices import Device
from reserve_gpu.model.errors import (
    DriverError,
    ImpossibleError,
    ReserveGPUError,
    WaitInterrupted,
    own_command,
)
from reserve_gpu.model.option import Option, add
from reserve_gpu.model.requests import ReservationTerms, Size
from reserve_gpu.model.untrusted import sanitize
from reserve_gpu.render import html, messages, phrases
from reserve_gpu.render.columns import GAP, width_of, wrapped
from reserve_gpu.render.durations import duration
from reserve_gpu.render.frontends import MAGIC, PYTHON, Frontend, shell
from reserve_gpu.render.notices import FRAMEWORKS, to_type
from reserve_gpu.render.phrases import escape, listed, plain
from reserve_gpu.render.progress import Live
from reserve_gpu.render.terminal import PLAIN_COLUMNS, is_terminal, size
from reserve_gpu.reservation import status
from reserve_gpu.reservation.session import session
from reserve_gpu.system import executor, procfs, spawn, subprocesses

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Callable, Mapping, Sequence

    from reserve_gpu.model.holders import DeviceStatus
    from reserve_gpu.model.progress import Progress


LIMIT_S = 120.0  # importing a framework from a slow disk alone can take a minute
PATH_LIMIT = 500  # characters of a path that are shown
VALUE_LIMIT = 100  # likewise of a variable
DOES_NOT_FIT = 1  # exit code
LEAST = 30  # columns for the result, however narrow the terminal
DRIVER = "driver"
NAMES = {
    DRIVER: "CUDA driver",
    **FRAMEWORKS,
    "jax": "JAX",
    "cupy": "CuPy",
    "numba": "Numba",
}
# For the children alone: the reserved GPU may be in use already, so JAX takes none of its memory.
QUIET = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


@dataclass(frozen=True)
class Check:
    """What the driver and the frameworks see; shows itself as text and as a table in a notebook.

    reserved: what they should see, in CUDA's order. visible: CUDA_VISIBLE_DEVICES at the time.
    python: the path of the Python whose frameworks these are.
    part: of each of the reserved, None where all of it is reserved. frontend: where it is read.
    """

    rows: tuple[Finding, ...]
    reserved: tuple[Device, ...] = ()
    visible: str | None = None
    python: str = ""
    part: Size | None = None
    frontend: Frontend = PYTHON

    @property
    def is_well(self) -> bool:
        """Tell whether every framework that is installed sees what it should."""
        return all(row.is_well for row in self.rows)

    def __repr__(self) -> str:
        rows = [_titles(self), *(_cells(self, row) for row in _present(self))]
        *widths, _ = (max(map(width_of, column)) + GAP for column in zip(*rows, strict=True))
        screen = size(sys.stdout)[0] if is_terminal(sys.stdout) else PLAIN_COLUMNS
        lines = _above(self)
        for *cells, result in rows:
            start = "".join(map(str.ljust, cells, widths))
            first, *more = wrapped((result,), max(screen, len(start) + LEAST), len(start))
            lines += [start + plain(first).lstrip(), *map(plain, more)]
        return "\n".join(line.rstrip() for line in [*lines, *_below(self)])

    def _repr_html_(self) -> str:
        """Return the table in HTML, with inline styles: an untrusted notebook keeps no others."""
        rows = ""
        for row in _present(self):
            contents = map(escape, _cells(self, row))
            cells = (f'<td style="{html.LINE};{html.LONG}">{content}</td>' for content in contents)
            rows += f'<tr style="{html.ROW}">{"".join(cells)}</tr>'
        above, below = (html.divs([(line,) for line in f(self)]) for f in (_above, _below))
        return f"{above}{html.table(_titles(self), rows)}{below}"

    def to_dict(self) -> dict[str, Any]:
        """Return what programs read, as JSON takes it; names are only ever added."""
        return {
            "is_well": self.is_well,
            "python": self.python,
            "reserved": [{"label": d.label, "uuid": d.uuid} for d in self.reserved],
            "part_mib": self.part.mib if self.part else None,
            "cuda_visible_devices": self.visible,
            "frameworks": [_row_dict(row) for row in self.rows],
        }


def check(
    *,
    limit_s: float = LIMIT_S,
    progress: Callable[[str, float], object] | None = None,
    slow: Callable[[Progress], object] = lambda _: None,
    frontend: Frontend = PYTHON,
) -> Check:
    """Ask the driver and each installed framework what they see with this process's variables.

    limit_s: seconds that each may take; they are asked at the same time.
    progress: called now and then with a line that says how this stands, and the seconds so far.
    slow: is told of a driver that takes long. frontend: where the result is read.

    Where something else than what is reserved is visible, no framework is started on it.
    Raises ImpossibleError on a system where nothing can be reserved, DriverError where there is no
    driver, or it fails, and nothing is held; ReserveGPUError where no process can be started.
    """
    if not sys.platform.startswith("linux"):
        raise ImpossibleError(f"A check needs Linux or WSL2; this is {sys.platform}.")
    reservation = api.current()
    try:
        rows = status.look(slow).rows
    except DriverError:
        if reservation is None:
            raise
        rows = ()
    reserved, terms = _inherited(rows)
    if reservation:
        reserved, terms = reservation.devices, session().terms_of(reservation)
    answers = _answers(reserved, limit_s, progress)
    place = verdict.Expectation(
        reserved=reserved,
        known=tuple(row.device for row in rows if isinstance(row.device, Device)),
        visible=os.environ.get(cuda_environment.VISIBLE),
        expected=reservation.environ[cuda_environment.VISIBLE] if reservation else None,
        driver=answers[DRIVER],
    )
    findings = [
        _capped(key, verdict.evaluate(name, answers[key], place), reserved, terms.size)
        if key in answers
        else Finding(name, Verdict.ABSENT)
        for key, name in NAMES.items()
    ]
    return Check((*findings,), reserved, place.visible, sys.executable, terms.size, frontend)


def _capped(key: str, found: Finding, devices: Sequence[Device], part: Size | None) -> Finding:
    """Return the finding with what keeps the framework within a part, or the line that would."""
    if part is None:
        return found
    names = memory_caps.kept_by(os.environ)
    if name := names.get(key):
        return found._replace(cap=f"{name}={sanitize(os.environ[name], VALUE_LIMIT)}")
    return found._replace(to_type=memory_caps.to_type(devices, part.mib).get(key))


def _answers(
    reserved: Sequence[Device],
    limit_s: float,
    progress: Callable[[str, float], object] | None,
) -> dict[str, verdict.FrameworkAnswer]:
    """Return what the driver and each installed framework say."""
    present = [key for key in NAMES if key == DRIVER or probes.is_installed(key)]
    allowed = json.dumps([verdict.cuda_uuid(device) for device in reserved])
    # As Python has it, but for the working directory: a framework imports much by common names.
    path = json.dumps([each for each in sys.path if type(each) is str and os.path.isabs(each)])

    def tell(running: Sequence[str], waited_s: float) -> None:
        if progress is not None:
            done, left = len(present) - len(running), ", ".join(NAMES[key] for key in running)
            how = f"{done} of {len(present)} have answered, {duration(waited_s)}"
            progress(f"Checking what each framework sees: {how}. Waiting for {left}", waited_s)

    commands = {key: spawn.python(probes.__file__, key, allowed, path) for key in present}
    try:
        return executor.apart(_run, commands, limit_s, show=lambda news: tell(*news))
    except OSError as error:
        raise ReserveGPUError(f"The check can't start a process: {error}.") from error


def _run(
    commands: Mapping[str, Sequence[str]], limit_s: float
) -> dict[str, verdict.FrameworkAnswer]:
    """Return what each says until its end, or until limit_s."""
    answers = dict[str, verdict.FrameworkAnswer]()
    with subprocesses.started(commands, {**spawn.environment(), **QUIET}) as started:
        for key in subprocesses.heard(started, limit_s, show=lambda *news: executor.tell(news)):
            answers[key] = verdict.answer(*started[key].said, started[key].code(), limit_s)
            started[key].end()
        late = {key: verdict.answer(*each.said, None, limit_s) for key, each in started.items()}
    return {**late, **answers}


def _inherited(rows: Sequence[DeviceStatus]) -> tuple[tuple[Device, ...], ReservationTerms]:
    """Return what an ancestor has reserved for this process, in CUDA's order, and its promise."""
    ancestors = procfs.ancestors()
    held = {
        row.device: holder.record.terms
        for row in rows
        if isinstance(row.device, Device)
        for holder in row.holders
        if holder.listed_pid in ancestors
    }
    devices = cuda_environment.in_visible_order(held, os.environ.get(cuda_environment.VISIBLE, ""))
    return devices, next(iter(held.values()), ReservationTerms())


# -- the parts of a result -------------------------------------------------------------------------


def _above(check: Check) -> list[str]:
    """Return the lines above the table; what can be typed stands alone on one."""
    python = f" Python: {sanitize(check.python, PATH_LIMIT)}."
    if check.reserved:
        part = f"{phrases.part(check.part)} of " if check.part else ""
        return [f"Reserved: {part}{phrases.labels(check.reserved)}.{python}"]
    now = "not set" if check.visible is None else repr(sanitize(check.visible))
    return [
        "Nothing is reserved here, so no framework was started on a GPU.",
        "Reserve one first:",
        check.frontend.typed(messages.ANY),
        f"CUDA_VISIBLE_DEVICES is {now}.{python}",
    ]


def _present(check: Check) -> list[Finding]:
    """Return the rows of what is installed."""
    return [row for row in check.rows if row.verdict is not Verdict.ABSENT]


def _below(check: Check) -> list[str]:
    """Return the lines below the table: what is not installed, what to do, what can be typed."""
    names = [row.name for row in check.rows if row.verdict is Verdict.ABSENT]
    absent = [f"Not installed: {listed(names)}."] if names else []
    if len(names) == len(check.rows) - 1:
        absent.append("Only the driver was asked. Do your programs run with another Python?")
    texts = [row.remedy for row in check.rows if row.remedy]
    texts += [to_type(row.name, row.to_type) for row in check.rows if row.to_type]
    return [*absent, *(line for text in texts for line in text.splitlines())]


def _titles(check: Check) -> tuple[str, ...]:
    cap = ("cap",) if check.part else ()
    return "framework", "version", "built for", "sees", *cap, "result"


def _cells(check: Check, row: Finding) -> list[str]:
    """Return the columns of one framework; one for its cap where a part is reserved."""
    if row.build is None:
        built_for = "CPU" if row.version else ""
    else:
        built_for = f"CUDA {row.build}".rstrip()
    result = f"{row.verdict.value}: {row.reason}" if row.reason else row.verdict.value
    cap = [row.cap or "not capped"] if check.part else []
    sees = ", ".join(label for label, _ in row.sees)
    return [row.name, row.version or "", built_for, sees, *cap, result]


def _row_dict(row: Finding) -> dict[str, Any]:
    """Return a row as programs read it: the finding's fields, some of them by other names."""
    told = row._asdict()
    build, told["state"] = told.pop("build"), told.pop("verdict").value
    told["is_built_for_cuda"] = build is not None if row.version else None
    told["sees"] = [{"label": label, "uuid": uuid} for label, uuid in row.sees]
    return told | {"cuda_version": build or None, "reason": row.reason or None}


# -- for a shell and for a notebook ----------------------------------------------------------------


def run(arguments: Namespace) -> Output:
    """Return what a check comes to."""
    with Live(sys.stderr) as live:
        frontend = shell([*shlex.split(own_command()), "check"])
        found = check(progress=live.show_check, slow=live.show, frontend=frontend)
    text = json.dumps(found.to_dict(), indent=2) if arguments.json else str(found)
    return Output(text, 0 if found.is_well else DOES_NOT_FIT)


def run_in_notebook(_arguments: Namespace) -> Check:
    """Return what a check comes to. Raises WaitInterrupted."""
    try:
        with Live() as live:
            return check(progress=live.show_check, slow=live.show, frontend=MAGIC)
    except KeyboardInterrupt:
        raise WaitInterrupted("Stopped the check; nothing was changed.") from None


MORE = """\
It asks PyTorch, TensorFlow, JAX and others of this Python, each in a process
of its own. The exit code is 1 if one of them uses other GPUs. To check what a
command would get: reserve-gpu run -- reserve-gpu check
"""


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `check`."""
    parser.epilog = MORE
    add((Option("--json", "as JSON, for programs"),), parser)
