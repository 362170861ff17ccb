"""Does each installed framework use exactly the GPUs that are reserved? Asked before any work.

Each is asked in a child process with this process's environment, so nothing is started here.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING

from reserve_gpu import children, cuda, processes, verdict
from reserve_gpu.checklist import Check, Progress
from reserve_gpu.errors import DriverError, ImpossibleError, ReserveGPUError
from reserve_gpu.reservation import current

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reserve_gpu.device import Device, Row

LIMIT_S = 120.0  # importing a framework from a slow disk alone can take a minute
DRIVER = "driver"
NAMES = {
    DRIVER: "CUDA driver",
    "torch": "PyTorch",
    "tensorflow": "TensorFlow",
    "jax": "JAX",
    "cupy": "CuPy",
    "numba": "Numba",
    "mxnet": "MXNet",
}
# For the children alone: the reserved GPU may be in use already, so none takes all of its memory.
QUIET = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_FORCE_GPU_ALLOW_GROWTH": "true"}
# Without the working directory, where a json.py may lie, until the script takes over our sys.path.
BOOT = (
    "import sys; sys.path = [p for p in sys.path if p]; "
    "import runpy; runpy.run_path(sys.argv.pop(1), run_name='__main__')"
)


def check(*, limit_s: float = LIMIT_S, progress: Callable[[Progress], object] = id) -> Check:
    """Ask the driver and each installed framework what they see with this process's variables.

    limit_s: seconds that each may take; they are asked at the same time.
    progress: called now and then while this waits.

    Where something else than what is reserved is visible, no framework is started on it.
    Raises ImpossibleError on a system where nothing can be reserved, ReserveGPUError where no
    process can be started.
    """
    if not sys.platform.startswith("linux"):
        raise ImpossibleError(f"A check needs Linux or WSL2; this is {sys.platform}.")
    if not sys.executable:
        raise ImpossibleError("A check needs a Python to start, and this one doesn't know its own.")
    held = current()
    reserved = held.devices if held else _inherited()
    present = [key for key in NAMES if key == DRIVER or _is_installed(key)]

    def tell(running: Sequence[str], waited_s: float) -> None:
        done = [NAMES[key] for key in present if key not in running]
        progress(Progress(tuple(done), tuple(NAMES[key] for key in running), waited_s))

    commands = {key: _command(key, reserved) for key in present}
    try:
        ended = children.run_all(commands, {**os.environ, **QUIET}, limit_s, tell)
    except OSError as error:
        raise ReserveGPUError(f"No process can be started to check with: {error}.") from error
    answers = {key: verdict.answer(*end, limit_s) for key, end in ended.items()}
    place = verdict.Place(
        reserved=reserved,
        visible=os.environ.get(cuda.VISIBLE),
        expected=held.environ[cuda.VISIBLE] if held else None,
        driver=answers[DRIVER],
    )
    seen = [one for answer in answers.values() for one in answer.devices or ()]
    if not all(verdict.is_known(one, place) for one in seen):
        place = place.replace(known=tuple(row.device for row in _rows() if row.device))
    rows = [
        verdict.judge(name, answers[key], place) if key in answers else verdict.absent(name)
        for key, name in NAMES.items()
    ]
    return Check(tuple(rows), reserved, place.visible)


def _inherited() -> tuple[Device, ...]:
    """What a process that this one descends from has reserved, in CUDA's order."""
    ancestors = processes.ancestors()
    theirs = [
        row.device
        for row in _rows()
        if row.device and any(h.seen and h.pid in ancestors for h in row.holders)
    ]
    visible = os.environ.get(cuda.VISIBLE, "").split(",")

    def place(device: Device) -> int:
        entry = cuda.variables([device])[cuda.VISIBLE]
        return visible.index(entry) if entry in visible else len(visible)

    return tuple(sorted(theirs, key=place))


def _rows() -> Sequence[Row]:
    from reserve_gpu.overview import status

    try:
        return status().rows
    except DriverError:
        return ()


def _is_installed(module: str) -> bool:
    """Whether it could be imported; a folder of that name beside a notebook is no framework."""
    if sys.modules.get(module) is not None:
        return True
    with suppress(ImportError, ValueError, AttributeError):
        found = find_spec(module)
        return found is not None and found.origin is not None
    return False


def _command(key: str, reserved: Sequence[Device]) -> list[str]:
    allowed = [name for device in reserved for name in verdict.uuids(device)]
    script = os.path.join(os.path.dirname(__file__), "probes.py")
    entries: list[object] = [*sys.path]
    path = [entry for entry in entries if isinstance(entry, str)]  # as Python does
    texts = json.dumps(allowed), json.dumps(path)
    return [sys.executable, "-c", BOOT, script, key, children.ANSWERS, *texts]
