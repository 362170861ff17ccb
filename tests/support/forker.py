"""A Python process that answers each question in a fork of its own.

What can be done once in a process, as starting CUDA, or ends it, takes a process of its own each
time. A fork costs 5 ms where a new Python costs 150.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.support.machine import Child, Machine

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from typing_extensions import Self

FORK = """
import ast, ctypes, gc, json, uuid
from tests import driver

gc.disable()  # a fork copies each page of memory that it writes to

driver.load()
cuda = ctypes.CDLL("libcuda.so.1")

def answer_in_fork(code, environ):
    '''The value, error and standard error of the code, and how the process that ran it ended.'''
    answer, errors = os.memfd_create("answer"), os.memfd_create("errors")
    *body, last = ast.parse(code).body
    body = compile(ast.Module(body, []), "<asked>", "exec")
    last = compile(ast.Expression(last.value), "<asked>", "eval")
    if not (pid := os.fork()):
        try:
            os.dup2(errors, 2)
            for name in set(os.environ) - set(environ):
                del os.environ[name]
            os.environ.update(environ)
            os.write(answer, json.dumps(value_of(body, last), default=repr).encode())
        finally:
            os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    texts = [os.pread(file, 1 << 20, 0).decode() for file in (answer, errors)]
    os.close(answer), os.close(errors)
    return json.loads(texts[0] or '[null, "no answer"]'), texts[1], status

def value_of(body, last):
    try:
        exec(body, globals())
        return eval(last, globals()), None
    except BaseException as error:
        return None, f"{type(error).__name__}: {error}"

def cuda_devices():
    '''The UUIDs of the devices that CUDA enumerates, without what they are of; starts CUDA.'''
    count, device, data = ctypes.c_int(), ctypes.c_int(), (ctypes.c_ubyte * 16)()
    if cuda.cuInit(0):
        return []
    assert not cuda.cuDeviceGetCount(ctypes.byref(count))
    uuids = []
    for ordinal in range(count.value):
        assert not cuda.cuDeviceGet(ctypes.byref(device), ordinal)
        assert not cuda.cuDeviceGetUuid_v2(ctypes.byref(data), device)
        uuids.append(str(uuid.UUID(bytes=bytes(data))))
    return uuids
"""


class Forker:
    """A process that forks for each question; a context manager.

    The stand-in driver is loaded in it, and CUDA has not started.
    """

    def __init__(self, folder: Path) -> None:
        self._machine = Machine(folder)

    def __enter__(self) -> Self:
        self._child = Child(self._machine.environ(), self._machine.folder)
        started = self._child.run(FORK)
        assert not started.error, started.text
        return self

    def __exit__(self, *_: object) -> None:
        self._child.kill()

    def run(self, code: str, environ: Mapping[str, str]) -> tuple[Any, str | None, str, int]:
        """Run code in a fork with that environment.

        Returns the value of its last line, the error if it raised one, what it wrote on standard
        error, and the exit code.
        """
        answer = self._child.run(f"answer_in_fork({code!r}, {dict(environ)!r})")
        assert not answer.error, answer.text
        (value, error), stderr, status = answer.value
        return value, error, stderr, status

    def ask(self, code: str, environ: Mapping[str, str]) -> Any:
        """Return the value of the last line of the code, run in a fork with that environment."""
        value, error, stderr, _ = self.run(code, environ)
        assert not error, f"{error}\n{stderr}"
        return value

    def cuda(self, environ: Mapping[str, str]) -> list[str]:
        """Return the UUIDs, without `GPU-` or `MIG-`, of what CUDA shows in that environment."""
        uuids: list[str] = self.ask("cuda_devices()", environ)
        return uuids
