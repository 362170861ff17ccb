"""A Python process that runs each piece of code in a fork of its own.

CUDA can be started only once in a process, so each such test needs a new process. A fork takes
5 ms, and a new Python 150 ms.
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
    '''Return the value, error and standard error of the code, and its exit status.'''
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
    '''Start CUDA, and return the UUIDs of its devices without GPU- or MIG-.'''
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
    """A context manager that starts the process.

    The process has loaded the stand-in driver, but has not started CUDA.
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
        """Run code in a fork with this environment.

        Returns:
            The value of the last line, the error, the standard error, and the exit code.
        """
        answer = self._child.run(f"answer_in_fork({code!r}, {dict(environ)!r})")
        assert not answer.error, answer.text
        (value, error), stderr, status = answer.value
        return value, error, stderr, status

    def ask(self, code: str, environ: Mapping[str, str]) -> Any:
        """Run code in a fork with this environment, and return the value of its last line."""
        value, error, stderr, _ = self.run(code, environ)
        assert not error, f"{error}\n{stderr}"
        return value

    def cuda(self, environ: Mapping[str, str]) -> list[str]:
        """Return the UUIDs, without `GPU-` or `MIG-`, of the devices that CUDA sees."""
        uuids: list[str] = self.ask("cuda_devices()", environ)
        return uuids
