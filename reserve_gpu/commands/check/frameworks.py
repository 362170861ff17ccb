"""Check whether each installed framework sees exactly the reserved GPUs.

Each framework runs in a child process that inherits this process's environment, so this process
never initializes CUDA itself.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from reserve_gpu import api
from reserve_gpu.commands.check import probes, verdict
from reserve_gpu.commands.check.verdict import Finding, Verdict
from reserve_gpu.commands.output import Output
from reserve_gpu.gpus import cuda_environment, memory_caps
from reserve_gpu.gpus.nvml import Nvml
from reserve_gpu.model.devices import Device
from reserve_gpu.model.errors import (
    DriverError,
    ImpossibleError,
    ReserveGPUError,
    WaitInterrupted,
    program_command,
)
from reserve_gpu.model.option import Option, add
from reserve_gpu.model.requests import ReservationTerms, Size
from reserve_gpu.model.untrusted import sanitize
from reserve_gpu.render import html, messages, phrases
from reserve_gpu.render.columns import GAP, width_of, wrapped
from reserve_gpu.render.durations import duration
from reserve_gpu.render.frontends import MAGIC, PYTHON, Frontend, shell
from reserve_gpu.render.notices import FRAMEWORKS, framework_limit_hint
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


LIMIT_S = 120.0  # seconds; importing a framework from a slow disk can take a minute
PATH_LIMIT = 500  # maximum length of a displayed path, in characters
VALUE_LIMIT = 100  # maximum length of a variable's displayed value, in characters
DOES_NOT_FIT = 1  # exit code unless every framework sees exactly the reserved GPUs
MIN_COLUMNS = 30  # minimum width of the result column, even in a narrow terminal
DRIVER, TORCH = "driver", "torch"
NAMES = {
    DRIVER: "CUDA driver",
    **FRAMEWORKS,
    "jax": "JAX",
    "cupy": "CuPy",
    "numba": "Numba",
}
# Extra environment variables for the child processes. JAX must not preallocate memory, because the
# reserved GPU might already be in use.
QUIET = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


@dataclass(frozen=True)
class Check:
    """The result of a check, displayed as text in a terminal and as a table in a notebook.

    Attributes:
        rows: The results for the driver and each framework.
        reserved: The reserved devices, in CUDA order.
        visible: The value of CUDA_VISIBLE_DEVICES at the time of the check.
        python: The path of the Python interpreter that imported the frameworks.
        part: The amount of memory reserved on each device; None if whole devices are reserved.
        frontend: The frontend that displays the result. Hints use its command syntax.
    """

    rows: tuple[Finding, ...]
    reserved: tuple[Device, ...] = ()
    visible: str | None = None
    python: str = ""
    part: Size | None = None
    frontend: Frontend = PYTHON

    @property
    def is_well(self) -> bool:
        """Return whether every installed framework sees exactly the reserved devices."""
        return all(row.is_well for row in self.rows)

    def __repr__(self) -> str:
        rows = [_titles(self), *(_cells(self, row) for row in _present(self))]
        *widths, _ = (max(map(width_of, column)) + GAP for column in zip(*rows, strict=True))
        screen = size(sys.stdout)[0] if is_terminal(sys.stdout) else PLAIN_COLUMNS
        lines = _above(self)
        for *cells, result in rows:
            start = "".join(map(str.ljust, cells, widths))
            first, *more = wrapped((result,), max(screen, len(start) + MIN_COLUMNS), len(start))
            lines += [start + plain(first).lstrip(), *map(plain, more)]
        return "\n".join(line.rstrip() for line in [*lines, *_below(self)])

    def _repr_html_(self) -> str:
        """Return an HTML table with inline styles, because untrusted notebooks drop all others."""
        rows = ""
        for row in _present(self):
            texts = map(escape, _cells(self, row))
            cells = (f'<td style="{html.LINE};{html.LONG}">{text}</td>' for text in texts)
            rows += f'<tr style="{html.ROW}">{"".join(cells)}</tr>'
        above, below = (html.divs([(line,) for line in f(self)]) for f in (_above, _below))
        return f"{above}{html.table(_titles(self), rows)}{below}"

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object that docs/formats.md describes. Later versions only add fields."""
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
    """Check which devices the driver and each installed framework see in this environment.

    If an unreserved device is visible, no framework initializes CUDA, because that could
    allocate memory on the device.

    Args:
        limit_s: Timeout in seconds for each framework. All frameworks are checked in parallel.
        progress: A function that is called repeatedly with a progress message and the elapsed
            time in seconds.
        slow: A function that is called while the driver is slow to respond.
        frontend: The frontend that displays the result. Hints use its command syntax.

    Raises:
        ImpossibleError: The operating system is not Linux.
        DriverError: The driver is missing or fails, and this process has no reservation.
        ReserveGPUError: A child process can't be started.
    """
    if not sys.platform.startswith("linux"):
        raise ImpossibleError(f"The check needs Linux or WSL2; this is {sys.platform}.")
    reservation = api.current()
    try:
        rows = status.read_status(slow).rows
    except DriverError:
        if reservation is None:
            raise
        rows = ()
    reserved, terms = _inherited(rows)
    if reservation:
        reserved, terms = reservation.devices, session().terms_of(reservation)
    answers = _answers(reserved, limit_s, progress)
    awaits_ready_state = None
    if answers[DRIVER].driver_code == verdict.NOT_READY:
        awaits_ready_state = executor.run_on_new_thread(_awaits_ready_state, show=slow)
    expectation = verdict.Expectation(
        reserved=reserved,
        known=tuple(row.device for row in rows if isinstance(row.device, Device)),
        visible=os.environ.get(cuda_environment.VISIBLE),
        expected=reservation.environ[cuda_environment.VISIBLE] if reservation else None,
        driver=answers[DRIVER],
        awaits_ready_state=awaits_ready_state,
    )
    findings = {
        key: _capped(key, verdict.evaluate(name, answers[key], expectation), reserved, terms.size)
        if key in answers
        else Finding(name, Verdict.ABSENT)
        for key, name in NAMES.items()
    }
    count = cuda_environment.kept_torch_count()
    findings[TORCH] = verdict.with_early_count(findings[TORCH], count, reserved)
    return Check(
        (*findings.values(),), reserved, expectation.visible, sys.executable, terms.size, frontend
    )


def _capped(key: str, finding: Finding, devices: Sequence[Device], part: Size | None) -> Finding:
    """Add to the finding the framework's memory limit or, if there is none, code that sets one."""
    if part is None:
        return finding
    variables = memory_caps.limiting_variables(os.environ)
    if name := variables.get(key):
        return finding._replace(cap=f"{name}={sanitize(os.environ[name], VALUE_LIMIT)}")
    return finding._replace(to_type=memory_caps.code_lines(devices, part.mib).get(key))


def _answers(
    reserved: Sequence[Device],
    limit_s: float,
    progress: Callable[[str, float], object] | None,
) -> dict[str, verdict.FrameworkAnswer]:
    """Probe the driver and each installed framework, and return the results."""
    present = [key for key in NAMES if key == DRIVER or probes.is_installed(key)]
    allowed = json.dumps([verdict.cuda_uuid(device) for device in reserved])
    # Relative paths are left out, because a file in the working directory could shadow a module
    # that a framework imports.
    path = json.dumps([each for each in sys.path if type(each) is str and os.path.isabs(each)])

    def show(running: Sequence[str], waited_s: float) -> None:
        if progress is not None:
            done, names = len(present) - len(running), ", ".join(NAMES[key] for key in running)
            state = f"{done} of {len(present)} have answered, {duration(waited_s)}"
            progress(f"Checking what each framework sees: {state}. Waiting for {names}", waited_s)

    commands = {key: spawn.python(probes.__file__, key, allowed, path) for key in present}
    try:
        return executor.run_on_new_thread(_run, commands, limit_s, show=lambda news: show(*news))
    except OSError as error:
        python = sanitize(sys.executable, PATH_LIMIT)
        text = f"The check can't start {python}: {error.strerror}."
        raise ReserveGPUError(text) from error


def _run(
    commands: Mapping[str, Sequence[str]], limit_s: float
) -> dict[str, verdict.FrameworkAnswer]:
    """Run the commands in parallel, and return all results within `limit_s` seconds."""
    answers = dict[str, verdict.FrameworkAnswer]()
    with subprocesses.run_programs(commands, {**spawn.environment(), **QUIET}) as started:
        for key in subprocesses.wait_for_output(
            started, limit_s, show=lambda *news: executor.report_progress(news)
        ):
            answers[key] = verdict.parse_answer(*started[key].output, started[key].code(), limit_s)
            started[key].end()
        late = {
            key: verdict.parse_answer(*each.output, None, limit_s) for key, each in started.items()
        }
    return {**late, **answers}


def _awaits_ready_state() -> bool | None:
    """Return whether GPUs in confidential-computing mode are not ready, or None if unknown."""
    with suppress(DriverError), Nvml() as gpus:
        return gpus.awaits_ready_state()
    return None


def _inherited(rows: Sequence[DeviceStatus]) -> tuple[tuple[Device, ...], ReservationTerms]:
    """Return the devices that an ancestor holds, in CUDA order, and the reservation's terms."""
    ancestors = procfs.ancestors()
    terms = {
        row.device: holder.record.terms
        for row in rows
        if isinstance(row.device, Device)
        for holder in row.holders
        if holder.listed_pid in ancestors
    }
    devices = cuda_environment.in_visible_order(terms, os.environ.get(cuda_environment.VISIBLE, ""))
    return devices, next(iter(terms.values()), ReservationTerms())


# -- parts of the output ---------------------------------------------------------------------------


def _above(check: Check) -> list[str]:
    """Return the lines above the table. Each command is on its own line."""
    python = f" Python: {sanitize(check.python, PATH_LIMIT)}."
    if check.reserved:
        part = f"{phrases.part(check.part)} of " if check.part else ""
        return [f"Reserved: {part}{phrases.labels(check.reserved)}.{python}"]
    value = "not set" if check.visible is None else repr(sanitize(check.visible))
    return [
        "Nothing is reserved here, so no framework was started on a GPU.",
        "Reserve one first:",
        check.frontend.typed(messages.ANY),
        f"CUDA_VISIBLE_DEVICES is {value}.{python}",
    ]


def _present(check: Check) -> list[Finding]:
    """Return the rows for the driver and the installed frameworks."""
    return [row for row in check.rows if row.verdict is not Verdict.ABSENT]


def _below(check: Check) -> list[str]:
    """Return the lines below the table: missing frameworks, advice, and code to type."""
    names = [row.name for row in check.rows if row.verdict is Verdict.ABSENT]
    absent = [f"Not installed: {listed(names)}."] if names else []
    if len(names) == len(check.rows) - 1:
        absent.append("Only the driver was checked. Do your programs use a different Python?")
    texts = [row.remedy for row in check.rows if row.remedy]
    texts += [framework_limit_hint(row.name, row.to_type) for row in check.rows if row.to_type]
    return [*absent, *(line for text in texts for line in text.splitlines())]


def _titles(check: Check) -> tuple[str, ...]:
    cap = ("cap",) if check.part else ()
    return "framework", "version", "built for", "sees", *cap, "result"


def _cells(check: Check, row: Finding) -> list[str]:
    """Return one framework's table cells."""
    if row.build is None:
        built_for = "CPU" if row.version else ""
    else:
        built_for = f"CUDA {row.build}".rstrip()
    result = f"{row.verdict.value}: {row.reason}" if row.reason else row.verdict.value
    cap = [row.cap or "not capped"] if check.part else []
    sees = ", ".join(label for label, _ in row.sees)
    return [row.name, row.version or "", built_for, sees, *cap, result]


def _row_dict(row: Finding) -> dict[str, Any]:
    """Return a finding as a JSON object, with some fields renamed."""
    fields = row._asdict()
    build, fields["state"] = fields.pop("build"), fields.pop("verdict").value
    fields["is_built_for_cuda"] = build is not None if row.version else None
    fields["sees"] = [{"label": label, "uuid": uuid} for label, uuid in row.sees]
    return fields | {"cuda_version": build or None, "reason": row.reason or None}


# -- commands -------------------------------------------------------------------------------------


def run(arguments: Namespace) -> Output:
    """Check the frameworks, and return the result as text or JSON."""
    with Live(sys.stderr) as live:
        frontend = shell([*shlex.split(program_command()), "check"])
        result = check(progress=live.show_check, slow=live.show, frontend=frontend)
    text = json.dumps(result.to_dict(), indent=2) if arguments.json else str(result)
    return Output(text, 0 if result.is_well else DOES_NOT_FIT)


def run_in_notebook(_arguments: Namespace) -> Check:
    """Check the frameworks, and return the result for the notebook to display.

    Raises:
        WaitInterrupted: The user interrupted the check.
    """
    try:
        with Live() as live:
            return check(progress=live.show_check, slow=live.show, frontend=MAGIC)
    except KeyboardInterrupt:
        raise WaitInterrupted("The check was interrupted; nothing was changed.") from None


MORE = """\
This checks PyTorch, TensorFlow, JAX, CuPy and Numba in this Python, each in its
own process. The exit code is 1 if one of them does not see exactly the reserved
GPUs. To check what a command would get: reserve-gpu run -- reserve-gpu check
"""


def add_arguments(parser: ArgumentParser) -> None:
    """Add the `check` command's arguments."""
    parser.epilog = MORE
    add((Option("--json", "print JSON, for programs"),), parser)
