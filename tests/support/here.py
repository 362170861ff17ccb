"""A simulated machine that the test process itself runs on."""

from __future__ import annotations

import _thread
import json
import os
import re
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import reserve_gpu
from reserve_gpu.reservation.session import session
from tests import driver
from tests.support.machine import Machine

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from ctypes import CDLL
    from pathlib import Path

    from typing_extensions import Self

    from reserve_gpu.reservation.feature import Feature
    from tests.support.machine import Kernel
    from tests.support.shell import Shell

F = TypeVar("F", bound="Feature")
NOT_INITIALIZED = 1  # NVML_ERROR_UNINITIALIZED
ENDING_S = 0.2  # time for threads outside of the driver to end
HUNG_S = 5.0  # time for threads in a hanging driver call to end


def feature(kind: type[F]) -> F:
    """Return this process's feature of this type, which must have been created."""
    (found,) = (each for each in session().features.values() if isinstance(each, kind))
    return found


class Here(Machine):
    """A machine that the test process runs on, as a context manager.

    The test process uses the machine's environment, working directory and driver until the end,
    when its reservation is released. `child`, `kernel` and the other methods of Machine start
    processes on the same machine.

    Tests must start CUDA in a child, because cuInit lasts until a process ends.
    """

    _is_on = False

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._shells: list[Shell] = []

    def __enter__(self) -> Self:
        driver.load()
        self._threads = _thread._count()
        self._environ, self._folder = dict(os.environ), os.getcwd()
        become(self.environ())
        os.chdir(self.folder)
        self._is_on = True
        self._choose_library()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            for shell in reversed(self._shells):
                shell.close()
            reserve_gpu.release()
            left = self._shut_down()
        finally:
            os.chdir(self._folder)
            become(self._environ)
        assert reserve_gpu.current() is None, "the reservation outlives its release"
        assert not left, f"NVML was not shut down: {left} more of nvmlInit than of nvmlShutdown"

    def write(self, text: str) -> None:
        """Use a scenario, including its `missing` functions."""
        super().write(text)
        if self._is_on:
            self._choose_library()

    def shell(self, *, is_notebook: bool = False) -> Shell:
        """Return a new IPython shell in this process, with the extension loaded.

        Args:
            is_notebook: Whether the shell behaves like that of a notebook.
        """
        from tests.support.shell import Shell  # imported here because it loads IPython

        shell = Shell(is_notebook=is_notebook)
        self._shells.append(shell)
        return shell

    @contextmanager
    def rival(self, number: str = "0", *, note: str | None = None, **record: Any) -> Iterator[None]:
        """Let a rival reserve a device during the block.

        The rival is in this process, because flock excludes other openings of a file even in the
        same process. The kernel shows this process as the holder; use `child` for another PID.

        Args:
            number: The device's number, such as `0` or `1:0`.
            note: The rival's note.
            record: More fields of the record; with `part_mib`, the rival is a sharer.
        """
        from reserve_gpu.locks.directory import LockDirectory
        from reserve_gpu.locks.lock import Lock
        from reserve_gpu.system.procfs import pid_namespace

        with LockDirectory(str(self.locks)) as directory:
            with directory.mutex():
                lock = directory.lock_device(self.uuid(number), share="part_mib" in record)
            assert isinstance(lock, Lock), lock
            try:
                own: dict[str, Any] = {
                    "pid": os.getpid(),
                    "namespace": pid_namespace(),
                    "since": lock.since,
                    "written": time.time(),
                }
                says = {**own, "user": "rival", "notebook": "rival.ipynb", "note": note, **record}
                for each in (lock, lock.owned):
                    if each:
                        os.pwrite(each.descriptor, json.dumps(says).encode(), 0)
                yield
            finally:
                lock.release()

    def uuid(self, number: str) -> str:
        """Return the UUID of a device by its number, such as `0` or `1:0`."""
        index, _, instance = number.partition(":")
        gpus = re.split(r"^\s*gpu\b.*$", self.scenario.read_text(), flags=re.MULTILINE)[1:]
        whole, *parts = re.split(r"^\s*instance\s+", gpus[int(index)], flags=re.MULTILINE)
        if not instance:
            return described_uuid(whole) or default_uuid("GPU", int(index))
        (part,) = (part for part in parts if part.split()[0] == instance)
        return described_uuid(part) or default_uuid("MIG", 100 * (int(index) + 1) + int(instance))

    def _choose_library(self) -> None:
        """Let the bindings use a library without the functions that are missing in the scenario."""
        import pynvml

        missing = frozenset(driver.named_functions(self.scenario)["missing"])
        driver.check_functions(missing)
        if pynvml.nvmlLib is not None or missing:  # otherwise, they open it by name
            pynvml.nvmlLib = Without(missing, driver.load())
            pynvml._nvmlGetFunctionPointer_cache.clear()

    def _shut_down(self) -> int:
        """End hanging calls and NVML; return the number of missing calls of nvmlShutdown."""
        self._wait_for_threads(ENDING_S)
        is_hung = _thread._count() > self._threads
        self.scenario.unlink()
        self._wait_for_threads(HUNG_S)
        os.environ.pop("STAND_IN_LOG", None)
        self.write("gpu")
        left = sum(1 for _ in iter(driver.load().nvmlShutdown, NOT_INITIALIZED))
        return 0 if is_hung else left

    def _wait_for_threads(self, limit_s: float) -> None:
        end = time.monotonic() + limit_s
        while _thread._count() > self._threads and time.monotonic() < end:
            time.sleep(0.001)


class Two(NamedTuple):
    """Two kernels on one machine with two GPUs; the first kernel's notebook has a name."""

    machine: Here
    first: Kernel
    second: Kernel


class Without:
    """A library without some of its functions, for the bindings."""

    def __init__(self, missing: frozenset[str], library: CDLL) -> None:
        self._missing, self._library = missing, library

    def __getattr__(self, name: str) -> Any:
        if name in self._missing:
            raise AttributeError(f"undefined symbol: {name}")
        return getattr(self._library, name)


def become(environ: Mapping[str, str]) -> None:
    """Replace the environment of this process."""
    keep = "PYTEST_CURRENT_TEST"  # pytest removes it
    for name in set(os.environ) - set(environ) - {keep}:
        del os.environ[name]
    os.environ.update({k: v for k, v in environ.items() if os.environ.get(k) != v and k != keep})


def described_uuid(text: str) -> str | None:
    """Return the UUID in the scenario's text of a device, or None."""
    match = re.search(r"^\s*uuid\s+(.*?)\s*(#.*)?$", text, re.MULTILINE)
    return match[1] if match else None


def default_uuid(kind: str, position: int) -> str:
    """Return the UUID of a device without one in the scenario, like default_uuid in parse.c."""
    mixed = (position + 1) * 0x9E3779B9 & 0xFFFFFFFF
    return (
        f"{kind}-{mixed:08x}-{mixed & 0xFFFF:04x}-4{mixed >> 20:03x}-8{mixed & 0xFFF:03x}"
        f"-{position + 1:012x}"
    )
