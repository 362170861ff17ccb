"""Asks one framework what it sees and whether it computes, in a process of its own.

Run as a script with the framework's key, the descriptor that the answers go to, the UUIDs of the
devices that may be used, and sys.path. The answer is a line of JSON for each step: so what was
found before a crash is known, and what was being done. Imports nothing of ours, as the process need
not have this package on its path.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
import uuid
from contextlib import suppress
from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

COUNT = 100  # numbers to compute with, few enough that every framework's sum of squares is exact
EXPECTED = float(sum(number * number for number in range(COUNT)))
NO_CUDA = None  # as a build: this one can't use an NVIDIA GPU
UNNAMED = ""  # as a build: for CUDA, whichever
PR_SET_PDEATHSIG, SIGKILL = 1, 9  # sys/prctl.h, signal.h


class Framework(Protocol):
    """What each class below offers; making one imports the framework.

    build: the CUDA version that it was built for, as `12.4`.
    """

    version: str
    build: str | None

    def devices(self) -> list[tuple[int, str | None]]:
        """Start CUDA: each device's number in CUDA, and its UUID or PCI bus id, if it tells."""

    def compute(self, number: int) -> float:
        """The sum of the squares of 0 to COUNT - 1, from the device with that number."""


class Driver:
    """The CUDA driver itself, without a framework."""

    def __init__(self) -> None:
        self.cuda = ctypes.CDLL("libcuda.so.1")
        version = ctypes.c_int()
        self._ask("cuDriverGetVersion", ctypes.byref(version))
        self.version = _dotted(version.value)
        self.build: str | None = UNNAMED

    def devices(self) -> list[tuple[int, str | None]]:
        """See Framework."""
        self._ask("cuInit", 0)
        count = ctypes.c_int()
        self._ask("cuDeviceGetCount", ctypes.byref(count))
        return [(number, None) for number in range(count.value)]

    def compute(self, number: int) -> float:
        """A sum set by the device in its own memory: a kernel would need a compiler."""
        device, context = ctypes.c_int(), ctypes.c_void_p()
        address, result = ctypes.c_uint64(), ctypes.c_uint()
        self._ask("cuDeviceGet", ctypes.byref(device), number)
        self._ask("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._ask("cuCtxSetCurrent", context)
        self._ask("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(4))
        self._ask("cuMemsetD32_v2", address, ctypes.c_uint(int(EXPECTED)), ctypes.c_size_t(1))
        self._ask("cuMemcpyDtoH_v2", ctypes.byref(result), address, ctypes.c_size_t(4))
        return float(result.value)

    def _ask(self, function: str, *arguments: Any) -> None:
        if code := getattr(self.cuda, function)(*arguments):
            name, text = ctypes.c_char_p(), ctypes.c_char_p()
            self.cuda.cuGetErrorName(code, ctypes.byref(name))
            self.cuda.cuGetErrorString(code, ctypes.byref(text))
            told = ": ".join(part.decode() for part in (name.value, text.value) if part)
            raise RuntimeError(f"{function} answers {code}{told and ' '}{told}")


class PyTorch:
    """https://docs.pytorch.org/docs/stable/cuda.html."""

    def __init__(self) -> None:
        self.torch: Any = import_module("torch")
        self.version = str(self.torch.__version__)
        self.build: str | None = self.torch.version.cuda

    def devices(self) -> list[tuple[int, str | None]]:
        """See Framework."""
        self.torch.cuda.init()  # says why, where is_available() is only False
        count = self.torch.cuda.device_count()
        return [(number, self._uuid(number)) for number in range(count)]

    def compute(self, number: int) -> float:
        """See Framework."""
        x = self.torch.arange(COUNT, dtype=self.torch.float32, device=f"cuda:{number}")
        return float(x @ x)

    def _uuid(self, number: int) -> str | None:
        found = getattr(self.torch.cuda.get_device_properties(number), "uuid", None)
        return None if found is None else str(found)  # from 2.4 on


class TensorFlow:
    """https://www.tensorflow.org/guide/gpu; Keras goes by what it sees."""

    def __init__(self) -> None:
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "1"  # warnings say why it sees none
        self.tf: Any = import_module("tensorflow")
        self.version = str(self.tf.__version__)
        with suppress(metadata.PackageNotFoundError):
            self.version += f", Keras {metadata.version('keras')}"
        info = self.tf.sysconfig.get_build_info()
        is_cuda = self.tf.test.is_built_with_cuda()
        self.build: str | None = info.get("cuda_version", UNNAMED) if is_cuda else NO_CUDA

    def devices(self) -> list[tuple[int, str | None]]:
        """See Framework."""
        found = self.tf.config.list_physical_devices("GPU")
        local = import_module("tensorflow.python.client.device_lib").list_local_devices()
        told = [
            re.search("pci bus id: ([0-9a-fA-F:.]+)", device.physical_device_desc)
            for device in local
            if device.device_type == "GPU"
        ]
        ids = [match and match[1] for match in told]
        return [
            (int(device.name.rpartition(":")[2]), ids[place] if len(ids) == len(found) else None)
            for place, device in enumerate(found)
        ]

    def compute(self, number: int) -> float:
        """See Framework."""
        with self.tf.device(f"/GPU:{number}"):
            x = self.tf.range(COUNT, dtype=self.tf.float32)
            result = self.tf.tensordot(x, x, 1)
        if "GPU" not in result.device:  # it may go elsewhere, in silence
            raise RuntimeError(f"computed on {result.device}")
        return float(result)


class Jax:
    """https://docs.jax.dev/en/latest/installation.html."""

    def __init__(self) -> None:
        self.jax: Any = import_module("jax")
        self.version = str(self.jax.__version__)
        self.build = _jax_build()

    def devices(self) -> list[tuple[int, str | None]]:
        """See Framework."""
        self.found = self.jax.devices("cuda")
        return [(self._number(device), None) for device in self.found]

    def compute(self, number: int) -> float:
        """See Framework."""
        (device,) = [device for device in self.found if self._number(device) == number]
        with self.jax.default_device(device):
            x = self.jax.numpy.arange(COUNT, dtype="float32")
            return float(x @ x)

    @staticmethod
    def _number(device: Any) -> int:
        return int(getattr(device, "local_hardware_id", device.id))


class CuPy:
    """https://docs.cupy.dev/en/stable/reference/cuda.html."""

    def __init__(self) -> None:
        self.cupy: Any = import_module("cupy")
        self.version = str(self.cupy.__version__)
        runtime = self.cupy.cuda.runtime
        is_hip = getattr(runtime, "is_hip", False)
        self.build = NO_CUDA if is_hip else _dotted(runtime.runtimeGetVersion())

    def devices(self) -> list[tuple[int, str | None]]:
        """See Framework."""
        count = self.cupy.cuda.runtime.getDeviceCount()
        return [(number, self.cupy.cuda.Device(number).pci_bus_id) for number in range(count)]

    def compute(self, number: int) -> float:
        """See Framework."""
        with self.cupy.cuda.Device(number):
            x = self.cupy.arange(COUNT, dtype="float32")
            return float(x @ x)


class Numba:
    """https://numba.readthedocs.io/en/stable/cuda/."""

    def __init__(self) -> None:
        numba: Any = import_module("numba")
        self.version = str(numba.__version__)
        self.build: str | None = UNNAMED
        if numba.config.ENABLE_CUDASIM:
            raise RuntimeError("NUMBA_ENABLE_CUDASIM is set, so it only simulates CUDA")
        self.cuda: Any = import_module("numba.cuda")

    def devices(self) -> list[tuple[int, str | None]]:
        """See Framework."""
        return [(gpu.id, getattr(gpu, "uuid", None)) for gpu in self.cuda.gpus]

    def compute(self, number: int) -> float:
        """See Framework."""
        with self.cuda.gpus[number]:
            result = self.cuda.device_array(1, "float32")
            self.cuda.jit(_square_sum)[1, 1](result)
            return float(result.copy_to_host()[0])


class MXNet:
    """https://mxnet.apache.org/versions/1.9.1/api/python."""

    def __init__(self) -> None:
        self.mx: Any = import_module("mxnet")
        self.version = str(self.mx.__version__)
        is_cuda = self.mx.runtime.Features().is_enabled("CUDA")
        self.build: str | None = UNNAMED if is_cuda else NO_CUDA

    def devices(self) -> list[tuple[int, str | None]]:
        """See Framework."""
        return [(number, None) for number in range(self.mx.context.num_gpus())]

    def compute(self, number: int) -> float:
        """See Framework."""
        x = self.mx.nd.arange(COUNT, ctx=self.mx.gpu(number))
        return float(self.mx.nd.dot(x, x).asscalar())


PROBES: dict[str, Callable[[], Framework]] = {
    "driver": Driver,
    "torch": PyTorch,
    "tensorflow": TensorFlow,
    "jax": Jax,
    "cupy": CuPy,
    "numba": Numba,
    "mxnet": MXNet,
}


def ask(key: str, allowed: Collection[str], say: Callable[..., None]) -> None:
    """Go through the steps of one framework, and say what comes of each.

    allowed: UUIDs, without `GPU-`, of the devices that it may be started on. Where others are
    visible the framework is not started: it could take memory there that somebody else needs.
    """
    say(doing="being imported")
    framework = PROBES[key]()
    say(version=framework.version, build=framework.build, is_imported=True)
    say(visible=os.environ.get("CUDA_VISIBLE_DEVICES"))  # some packages set it
    if framework.build is NO_CUDA:
        return
    say(doing="starting CUDA")
    visible = _visible()
    if not {device["uuid"] for device in visible} <= set(allowed):
        say(devices=visible)
        return
    found = framework.devices()
    unknown = dict.fromkeys(("uuid", "bus_id"))
    known = dict(enumerate(visible))
    say(devices=[{**known.get(number, unknown), "own": own} for number, own in found])
    say(doing="computing", is_tried=True)
    say(results=[framework.compute(number) for number, _ in found])


def main(key: str, descriptor: int, allowed: Collection[str]) -> None:
    """Ask, and say what went wrong as well."""

    def say(**news: Any) -> None:
        os.write(descriptor, (json.dumps(news) + "\n").encode())

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL)  # whoever asks may be killed meanwhile
    try:
        ask(key, allowed, say)
    except Exception as error:  # noqa: BLE001 - whatever it is, that is the answer
        text = next((line for line in str(error).splitlines() if line.strip()), "")
        say(error=f"{type(error).__name__}: {text}" if text else type(error).__name__)
    say(is_done=True)


def _visible() -> list[dict[str, str | None]]:
    """The devices that the driver shows this process, by their number; they are not touched."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count = ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return []
    return [_identity(cuda, number) for number in range(count.value)]


def _identity(cuda: ctypes.CDLL, number: int) -> dict[str, str | None]:
    found: dict[str, str | None] = {"uuid": None, "bus_id": None}
    device, data, bus = ctypes.c_int(), (ctypes.c_ubyte * 16)(), ctypes.create_string_buffer(32)
    if cuda.cuDeviceGet(ctypes.byref(device), number):
        return found
    # The first version gives a MIG instance the UUID of its GPU.
    ask_uuid = getattr(cuda, "cuDeviceGetUuid_v2", None) or cuda.cuDeviceGetUuid
    if not ask_uuid(ctypes.byref(data), device):
        found["uuid"] = str(uuid.UUID(bytes=bytes(data)))
    if not cuda.cuDeviceGetPCIBusId(bus, len(bus), device):
        found["bus_id"] = bus.value.decode()
    return found


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
    sys.path[:] = json.loads(sys.argv[4])
    main(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]))
    os._exit(0)  # all is said; what a framework does at its end takes time, and may hang
