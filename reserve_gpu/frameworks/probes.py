"""Ask one framework what it sees and whether it computes, in a process of its own.

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
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

COUNT = 100  # numbers to compute with, few enough that every framework's sum of squares is exact
EXPECTED = float(sum(number * number for number in range(COUNT)))
NO_CUDA = None  # as a build: this one can't use an NVIDIA GPU
UNNAMED = ""  # as a build: for CUDA, but it does not say which version
PR_SET_PDEATHSIG, SIGKILL = 1, 9  # sys/prctl.h, signal.h


class DriverCallError(Exception):
    """A function of the CUDA driver failed. code: its CUresult (cuda.h)."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


class Framework(Protocol):
    """What each class below offers; making one imports the framework.

    build: the CUDA version that it was built for, as `12.4`.
    """

    version: str
    build: str | None

    def devices(self) -> list[int]:
        """Start CUDA, and list its devices by their numbers there."""

    def compute(self, number: int) -> float:
        """The sum of the squares of 0 to COUNT - 1, from the device with that number."""


class _Driver:
    """The CUDA driver itself, without a framework."""

    def __init__(self) -> None:
        self.ctypes: Any = import_module("ctypes")
        self.cuda = self.ctypes.CDLL("libcuda.so.1")
        version = self.ctypes.c_int()
        self._ask("cuDriverGetVersion", self.ctypes.byref(version))
        self.version = _dotted(version.value)
        self.build: str | None = UNNAMED

    def devices(self) -> list[int]:
        self._ask("cuInit", 0)
        self._ask("cuDeviceGetCount", self.ctypes.byref(count := self.ctypes.c_int()))
        return [*range(count.value)]

    def uuid(self, number: int) -> str:
        device, data = self.ctypes.c_int(), (self.ctypes.c_ubyte * 16)()
        self._ask("cuDeviceGet", self.ctypes.byref(device), number)
        # The first version gives a MIG instance the UUID of its GPU.
        has_second = hasattr(self.cuda, "cuDeviceGetUuid_v2")
        function = "cuDeviceGetUuid_v2" if has_second else "cuDeviceGetUuid"
        self._ask(function, self.ctypes.byref(data), device)
        return str(uuid.UUID(bytes=bytes(data)))

    def compute(self, number: int) -> float:
        """A sum set by the device in its own memory: a kernel would need a compiler."""
        result, address = self.ctypes.c_uint(), self.ctypes.c_uint64()
        device, context = self.ctypes.c_int(), self.ctypes.c_void_p()
        self._ask("cuDeviceGet", self.ctypes.byref(device), number)
        self._ask("cuDevicePrimaryCtxRetain", self.ctypes.byref(context), device)
        self._ask("cuCtxSetCurrent", context)
        self._ask("cuMemAlloc_v2", self.ctypes.byref(address), self.ctypes.c_size_t(4))
        self._ask(
            "cuMemsetD32_v2", address, self.ctypes.c_uint(int(EXPECTED)), self.ctypes.c_size_t(1)
        )
        self._ask("cuMemcpyDtoH_v2", self.ctypes.byref(result), address, self.ctypes.c_size_t(4))
        return float(result.value)

    def _ask(self, function: str, *arguments: Any) -> None:
        if code := getattr(self.cuda, function)(*arguments):
            name, text = self.ctypes.c_char_p(), self.ctypes.c_char_p()
            self.cuda.cuGetErrorName(code, self.ctypes.byref(name))
            self.cuda.cuGetErrorString(code, self.ctypes.byref(text))
            reason = ": ".join(part.decode() for part in (name.value, text.value) if part)
            raise DriverCallError(f"{function} answers {code} {reason}".rstrip(), code)


class _PyTorch:
    """https://docs.pytorch.org/docs/stable/cuda.html."""

    def __init__(self) -> None:
        self.torch: Any = import_module("torch")
        self.version = str(self.torch.__version__)
        self.build: str | None = self.torch.version.cuda

    def devices(self) -> list[int]:
        self.torch.cuda.init()  # its error says why, while is_available() is only False
        return [*range(self.torch.cuda.device_count())]

    def compute(self, number: int) -> float:
        x = self.torch.arange(COUNT, dtype=self.torch.float32, device=f"cuda:{number}")
        return float(x @ x)


class _TensorFlow:
    """https://www.tensorflow.org/guide/gpu; Keras goes by what it sees."""

    def __init__(self) -> None:
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "1"  # its warnings say why it sees no device
        self.tf: Any = import_module("tensorflow")
        self.version = str(self.tf.__version__)
        with suppress(metadata.PackageNotFoundError):
            self.version += f", Keras {metadata.version('keras')}"
        info = self.tf.sysconfig.get_build_info()
        is_cuda = self.tf.test.is_built_with_cuda()
        self.build: str | None = info.get("cuda_version", UNNAMED) if is_cuda else NO_CUDA

    def devices(self) -> list[int]:
        return [*range(len(self.tf.config.list_physical_devices("GPU")))]

    def compute(self, number: int) -> float:
        with self.tf.device(f"/GPU:{number}"):
            x = self.tf.range(COUNT, dtype=self.tf.float32)
            result = self.tf.tensordot(x, x, 1)
        if "GPU" not in result.device:  # TensorFlow may fall back to the CPU without a word
            raise RuntimeError(f"computed on {result.device}")
        return float(result)


class _Jax:
    """https://docs.jax.dev/en/latest/installation.html."""

    def __init__(self) -> None:
        self.jax: Any = import_module("jax")
        self.version = str(self.jax.__version__)
        self.build = _jax_build()

    def devices(self) -> list[int]:
        self.cuda_devices = self.jax.devices("cuda")
        return [self._number(device) for device in self.cuda_devices]

    def compute(self, number: int) -> float:
        with self.jax.default_device(self._device(number)):
            x = self.jax.numpy.arange(COUNT, dtype="float32")
            return float(x @ x)

    def _device(self, number: int) -> Any:
        (device,) = [device for device in self.cuda_devices if self._number(device) == number]
        return device

    @staticmethod
    def _number(device: Any) -> int:
        return int(getattr(device, "local_hardware_id", device.id))


class _CuPy:
    """https://docs.cupy.dev/en/stable/reference/cuda.html."""

    def __init__(self) -> None:
        self.cupy: Any = import_module("cupy")
        self.version = str(self.cupy.__version__)
        runtime = self.cupy.cuda.runtime
        is_hip = getattr(runtime, "is_hip", False)
        self.build = NO_CUDA if is_hip else _dotted(runtime.runtimeGetVersion())

    def devices(self) -> list[int]:
        return [*range(self.cupy.cuda.runtime.getDeviceCount())]

    def compute(self, number: int) -> float:
        with self.cupy.cuda.Device(number):
            x = self.cupy.arange(COUNT, dtype="float32")
            return float(x @ x)


class _Numba:
    """https://numba.readthedocs.io/en/stable/cuda/."""

    def __init__(self) -> None:
        numba: Any = import_module("numba")
        self.version = str(numba.__version__)
        self.build: str | None = UNNAMED
        if numba.config.ENABLE_CUDASIM:
            raise RuntimeError("NUMBA_ENABLE_CUDASIM is set, so it only simulates CUDA")
        self.cuda: Any = import_module("numba.cuda")

    def devices(self) -> list[int]:
        return [gpu.id for gpu in self.cuda.gpus]

    def compute(self, number: int) -> float:
        with self.cuda.gpus[number]:
            result = self.cuda.device_array(1, "float32")
            self.cuda.jit(_square_sum)[1, 1](result)
            return float(result.copy_to_host()[0])


class _MXNet:
    """https://mxnet.apache.org/versions/1.9.1/api/python."""

    def __init__(self) -> None:
        self.mx: Any = import_module("mxnet")
        self.version = str(self.mx.__version__)
        is_cuda = self.mx.runtime.Features().is_enabled("CUDA")
        self.build: str | None = UNNAMED if is_cuda else NO_CUDA

    def devices(self) -> list[int]:
        return [*range(self.mx.context.num_gpus())]

    def compute(self, number: int) -> float:
        x = self.mx.nd.arange(COUNT, ctx=self.mx.gpu(number))
        return float(self.mx.nd.dot(x, x).asscalar())


PROBES: dict[str, Callable[[], Framework]] = {
    "driver": _Driver,
    "torch": _PyTorch,
    "tensorflow": _TensorFlow,
    "jax": _Jax,
    "cupy": _CuPy,
    "numba": _Numba,
    "mxnet": _MXNet,
}


def is_installed(module: str) -> bool:
    """Whether it could be imported; a folder of that name beside a notebook is no framework."""
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
    say(doing="computing")
    say(results=[framework.compute(number) for number in numbers])


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
    except Exception as error:  # noqa: BLE001 - whatever it is, that is the answer
        text = next((line for line in str(error).splitlines() if line.strip()), "")
        code = error.code if isinstance(error, DriverCallError) else None
        say(error=": ".join(filter(None, (type(error).__name__, text))), driver_code=code)
    say(is_done=True)


def _jax_build() -> str | None:
    """CUDA comes as a plugin; before 0.4.27 the version of jaxlib named it."""
    for major in ("13", "12", "11"):
        with suppress(metadata.PackageNotFoundError):
            metadata.version(f"jax-cuda{major}-plugin")
            return major
    match = re.search(r"\+cuda([0-9]+)", str(getattr(import_module("jaxlib"), "__version__", "")))
    return match[1] if match else NO_CUDA


def _dotted(version: int) -> str:
    """`12.4` for 12040, as CUDA numbers its versions."""
    return f"{version // 1000}.{version % 1000 // 10}"


def _square_sum(result: Any) -> None:
    """What Numba compiles."""
    total = 0.0
    for number in range(COUNT):
        total += number * number
    result[0] = total


if __name__ == "__main__":
    main(sys.argv[1], *(json.loads(word) for word in sys.argv[2:]))
    os._exit(0)  # a framework's own clean-up takes time, and may hang
