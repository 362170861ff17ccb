"""Ask one framework which devices it sees, in a process of its own.

Run as a script with the framework's key, the UUIDs of the devices that may be used, and sys.path.
It answers on stdout with a line of JSON at each step: after a crash it is known what the framework
did last, and what it had found by then. Imports nothing of ours, which would be slower.
"""

from __future__ import annotations

import json
import os
import re
import sys
import uuid
from contextlib import suppress
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

NO_CUDA = None  # as a build: this one can't use an NVIDIA GPU
UNNAMED = ""  # as a build: for CUDA, but it does not say which version
MISSING = -1  # as a CUresult: there is no libcuda.so.1
CAPABILITY = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, and _MINOR (cuda.h)
PR_SET_PDEATHSIG, SIGKILL = 1, 9  # sys/prctl.h, signal.h


class DriverCallError(Exception):
    """The CUDA driver failed. code: the CUresult of the call (cuda.h), or MISSING."""

    def __init__(self, text: str, code: int | None) -> None:
        super().__init__(text)
        self.code = code


class Framework(NamedTuple):
    """A framework that has been imported.

    build: the CUDA version that it was built for, as `12.4`. devices: starts CUDA, and lists its
    devices by their numbers there. targets: then lists what it has code for, as `sm_90` and
    `compute_90`; empty where it compiles for any GPU, or doesn't say.
    """

    version: str
    build: str | None
    devices: Callable[[], Sequence[int]]
    targets: Callable[[], Sequence[str]] = tuple


class _Driver:
    """The CUDA driver itself, without a framework."""

    def __init__(self) -> None:
        self.ctypes: Any = import_module("ctypes")
        try:
            self.cuda = self.ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            is_missing = str(error).startswith("libcuda.so.1: cannot open")  # the words of glibc
            raise DriverCallError(str(error), MISSING if is_missing else None) from error
        self.version = _dotted(self._number("cuDriverGetVersion"))

    def devices(self) -> Sequence[int]:
        self._ask("cuInit", 0)
        return range(self._number("cuDeviceGetCount"))

    def uuid(self, number: int) -> str:
        device, data = self._number("cuDeviceGet", number), (self.ctypes.c_ubyte * 16)()
        # The first version gives a MIG instance the UUID of its GPU.
        has_second = hasattr(self.cuda, "cuDeviceGetUuid_v2")
        function = "cuDeviceGetUuid_v2" if has_second else "cuDeviceGetUuid"
        self._ask(function, self.ctypes.byref(data), device)
        return str(uuid.UUID(bytes=bytes(data)))

    def capability(self, number: int) -> list[int]:
        """Return the compute capability, as [12, 0]."""
        return [self._number("cuDeviceGetAttribute", which, number) for which in CAPABILITY]

    def _number(self, function: str, *arguments: int) -> int:
        """Return the int that the function writes to where its first argument points."""
        self._ask(function, self.ctypes.byref(number := self.ctypes.c_int()), *arguments)
        return int(number.value)

    def _ask(self, function: str, *arguments: Any) -> None:
        if code := getattr(self.cuda, function)(*arguments):
            name, text = self.ctypes.c_char_p(), self.ctypes.c_char_p()
            self.cuda.cuGetErrorName(code, self.ctypes.byref(name))
            self.cuda.cuGetErrorString(code, self.ctypes.byref(text))
            reason = ": ".join(part.decode() for part in (name.value, text.value) if part)
            raise DriverCallError(f"{function} answers {code} {reason}".rstrip(), code)


def _driver() -> Framework:
    driver = _Driver()
    return Framework(driver.version, UNNAMED, driver.devices)


def _torch() -> Framework:
    """Ask PyTorch (https://docs.pytorch.org/docs/stable/cuda.html)."""
    torch: Any = import_module("torch")

    def devices() -> Sequence[int]:
        torch.cuda.init()  # its error says why, while is_available() is only False
        return range(torch.cuda.device_count())

    targets = getattr(torch.cuda, "get_arch_list", tuple)  # from PyTorch 1.7 on
    return Framework(str(torch.__version__), torch.version.cuda, devices, targets)


def _tensorflow() -> Framework:
    """Ask TensorFlow (https://www.tensorflow.org/guide/gpu); Keras goes by what it sees."""
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "1"  # its warnings say why it sees no device
    tf: Any = import_module("tensorflow")
    info, gpus = tf.sysconfig.get_build_info(), tf.config.list_physical_devices
    build = info.get("cuda_version", UNNAMED) if tf.test.is_built_with_cuda() else NO_CUDA
    targets = info.get("cuda_compute_capabilities", ())
    return Framework(str(tf.__version__), build, lambda: range(len(gpus("GPU"))), lambda: targets)


def _jax() -> Framework:
    """Ask JAX (https://docs.jax.dev/en/latest/installation.html)."""
    jax: Any = import_module("jax")

    def devices() -> Sequence[int]:
        return [int(getattr(each, "local_hardware_id", each.id)) for each in jax.devices("cuda")]

    return Framework(str(jax.__version__), _jax_build(), devices)


def _cupy() -> Framework:
    """Ask CuPy (https://docs.cupy.dev/en/stable/reference/cuda.html)."""
    cupy: Any = import_module("cupy")
    runtime = cupy.cuda.runtime
    build = NO_CUDA if getattr(runtime, "is_hip", False) else _dotted(runtime.runtimeGetVersion())
    return Framework(str(cupy.__version__), build, lambda: range(runtime.getDeviceCount()))


def _numba() -> Framework:
    """Ask Numba (https://numba.readthedocs.io/en/stable/cuda/)."""
    numba: Any = import_module("numba")
    if numba.config.ENABLE_CUDASIM:
        raise RuntimeError("NUMBA_ENABLE_CUDASIM is set, so it only simulates CUDA")
    cuda: Any = import_module("numba.cuda")
    return Framework(str(numba.__version__), UNNAMED, lambda: [gpu.id for gpu in cuda.gpus])


PROBES = {
    "driver": _driver,
    "torch": _torch,
    "tensorflow": _tensorflow,
    "jax": _jax,
    "cupy": _cupy,
    "numba": _numba,
}


def is_installed(module: str) -> bool:
    """Tell whether it could be imported; a folder of that name beside a notebook is none."""
    with suppress(ImportError, ValueError, AttributeError):
        spec = find_spec(module)
        return spec is not None and spec.origin is not None
    return False


def ask(key: str, allowed: Collection[str], say: Callable[..., None]) -> None:
    """Go through the steps of one framework, and say what comes of each.

    allowed: UUIDs, without `GPU-`, of the devices that it may be started on. Where others are
        visible the framework is not started: it could take memory that somebody else needs.
    """
    say(doing="being imported")
    framework = PROBES[key]()
    say(version=framework.version, build=framework.build)
    say(visible=os.environ.get("CUDA_VISIBLE_DEVICES"))  # some packages set it
    if framework.build is NO_CUDA:
        return
    say(doing="starting CUDA")
    driver = _Driver()
    uuids = [driver.uuid(number) for number in driver.devices()]
    if not {*uuids} <= {*allowed}:
        say(devices=uuids)
        return
    numbers = framework.devices()
    say(devices=[uuids[number] if number < len(uuids) else None for number in numbers])
    if targets := framework.targets():
        say(targets=[*map(str, targets)], capabilities=[*map(driver.capability, numbers)])


def main(key: str, allowed: Collection[str], path: list[str]) -> None:
    """Ask, and say what went wrong as well. path: becomes sys.path."""
    import ctypes

    sys.path[:] = path
    answers = os.dup(1)
    os.dup2(2, 1)  # what a framework prints is no answer

    def say(**news: Any) -> None:
        # What was printed before may have no end of line.
        os.write(answers, f"\n{json.dumps(news)}\n".encode())

    # The asking process may be killed meanwhile: then this one ends too. The kernel sends the
    # signal when the thread that started this process ends.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL)
    try:
        ask(key, allowed, say)
    except DriverCallError as error:
        say(error=str(error), driver_code=error.code)
    except Exception as error:  # noqa: BLE001 - whatever it is, that is the answer
        text = next((line for line in str(error).splitlines() if line.strip()), "")
        say(error=": ".join(filter(None, (type(error).__name__, text))))
    say(is_done=True)


def _jax_build() -> str | None:
    """Return the CUDA of JAX: a plugin's; before 0.4.27 the version of jaxlib named it."""
    for major in ("13", "12", "11"):
        with suppress(metadata.PackageNotFoundError):
            metadata.version(f"jax-cuda{major}-plugin")
            return major
    match = re.search(r"\+cuda([0-9]+)", str(getattr(import_module("jaxlib"), "__version__", "")))
    return match[1] if match else NO_CUDA


def _dotted(version: int) -> str:
    """Return `12.4` for 12040, as CUDA numbers its versions."""
    return f"{version // 1000}.{version % 1000 // 10}"


if __name__ == "__main__":
    main(sys.argv[1], *(json.loads(word) for word in sys.argv[2:]))
    os._exit(0)  # a framework's own clean-up takes time, and may hang
