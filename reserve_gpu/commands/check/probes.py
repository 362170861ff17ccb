"""Find out which devices a framework sees. This module runs as a script in a child process.

The script's arguments are the framework's key in PROBES, the UUIDs of the devices that the
framework may use, and a value for `sys.path`. At each step, the script writes a line of JSON to
stdout. So even after a crash, the parent process knows the last step and the results so far. To
start quickly, the script imports no other module from this package.
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

NO_CUDA = None  # value of `Framework.build` if the build can't use NVIDIA GPUs
UNNAMED = ""  # value of `Framework.build` if the version of CUDA is unknown
MISSING = -1  # pseudo-CUresult, meaning that libcuda.so.1 was not found
CAPABILITY = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR (cuda.h)
PR_SET_PDEATHSIG, SIGKILL = 1, 9  # values from sys/prctl.h and signal.h


class DriverCallError(Exception):
    """The CUDA driver could not be loaded, or a driver call failed.

    Attributes:
        code: The call's CUresult (cuda.h), or MISSING if libcuda.so.1 was not found. None if the
            library could not be loaded for another reason.
    """

    def __init__(self, text: str, code: int | None) -> None:
        super().__init__(text)
        self.code = code


class Framework(NamedTuple):
    """An imported framework.

    Attributes:
        version: The framework's version.
        build: The CUDA version that the framework was built for, such as `12.4`, or else NO_CUDA
            or UNNAMED.
        devices: A function that initializes CUDA and returns the framework's device numbers.
        targets: A function that returns the architectures that the framework was compiled for,
            such as `sm_90` and `compute_90`. The result is empty if the framework can compile for
            any GPU, or does not list its targets.
    """

    version: str
    build: str | None
    devices: Callable[[], Sequence[int]]
    targets: Callable[[], Sequence[str]] = tuple


class _Driver:
    """The CUDA driver, called directly through ctypes."""

    def __init__(self) -> None:
        self.ctypes: Any = import_module("ctypes")
        try:
            self.cuda = self.ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            is_missing = str(error).startswith("libcuda.so.1: cannot open")  # glibc's wording
            raise DriverCallError(str(error), MISSING if is_missing else None) from error
        self.version = _dotted(self._number("cuDriverGetVersion"))

    def devices(self) -> Sequence[int]:
        self._call("cuInit", 0)
        return range(self._number("cuDeviceGetCount"))

    def uuid(self, number: int) -> str:
        device, data = self._number("cuDeviceGet", number), (self.ctypes.c_ubyte * 16)()
        # For a MIG instance, the first version of this function returns the GPU's UUID.
        has_second = hasattr(self.cuda, "cuDeviceGetUuid_v2")
        function = "cuDeviceGetUuid_v2" if has_second else "cuDeviceGetUuid"
        self._call(function, self.ctypes.byref(data), device)
        return str(uuid.UUID(bytes=bytes(data)))

    def capability(self, number: int) -> list[int]:
        """Return a device's compute capability as a list, such as [12, 0]."""
        return [self._number("cuDeviceGetAttribute", each, number) for each in CAPABILITY]

    def _number(self, function: str, *arguments: int) -> int:
        """Call a driver function that stores an int in its first argument, and return that int."""
        self._call(function, self.ctypes.byref(number := self.ctypes.c_int()), *arguments)
        return int(number.value)

    def _call(self, function: str, *arguments: Any) -> None:
        if code := getattr(self.cuda, function)(*arguments):
            name, text = self.ctypes.c_char_p(), self.ctypes.c_char_p()
            self.cuda.cuGetErrorName(code, self.ctypes.byref(name))
            self.cuda.cuGetErrorString(code, self.ctypes.byref(text))
            reason = ": ".join(part.decode() for part in (name.value, text.value) if part)
            raise DriverCallError(f"{function} returned {code} {reason}".rstrip(), code)


def _driver() -> Framework:
    driver = _Driver()
    return Framework(driver.version, UNNAMED, driver.devices)


def _torch() -> Framework:
    """Import PyTorch (https://docs.pytorch.org/docs/stable/cuda.html)."""
    torch: Any = import_module("torch")

    def devices() -> Sequence[int]:
        torch.cuda.init()  # unlike is_available(), this call raises an error that states the cause
        return range(torch.cuda.device_count())

    targets = getattr(torch.cuda, "get_arch_list", tuple)  # since PyTorch 1.7
    return Framework(str(torch.__version__), torch.version.cuda, devices, targets)


def _tensorflow() -> Framework:
    """Import TensorFlow (https://www.tensorflow.org/guide/gpu). Keras uses the same devices."""
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "1"  # show warnings, which explain missing devices
    tf: Any = import_module("tensorflow")
    info, gpus = tf.sysconfig.get_build_info(), tf.config.list_physical_devices
    build = info.get("cuda_version", UNNAMED) if tf.test.is_built_with_cuda() else NO_CUDA
    targets = info.get("cuda_compute_capabilities", ())
    return Framework(str(tf.__version__), build, lambda: range(len(gpus("GPU"))), lambda: targets)


def _jax() -> Framework:
    """Import JAX (https://docs.jax.dev/en/latest/installation.html)."""
    jax: Any = import_module("jax")

    def devices() -> Sequence[int]:
        return [int(getattr(each, "local_hardware_id", each.id)) for each in jax.devices("cuda")]

    return Framework(str(jax.__version__), _jax_build(), devices)


def _cupy() -> Framework:
    """Import CuPy (https://docs.cupy.dev/en/stable/reference/cuda.html)."""
    cupy: Any = import_module("cupy")
    runtime = cupy.cuda.runtime
    build = NO_CUDA if getattr(runtime, "is_hip", False) else _dotted(runtime.runtimeGetVersion())
    return Framework(str(cupy.__version__), build, lambda: range(runtime.getDeviceCount()))


def _numba() -> Framework:
    """Import Numba (https://numba.readthedocs.io/en/stable/cuda/)."""
    numba: Any = import_module("numba")
    if numba.config.ENABLE_CUDASIM:
        raise RuntimeError("NUMBA_ENABLE_CUDASIM is set, so Numba only simulates CUDA")
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
    """Return whether a module is installed. A namespace package does not count."""
    with suppress(ImportError, ValueError, AttributeError):
        spec = find_spec(module)
        return spec is not None and spec.origin is not None
    return False


def probe(key: str, allowed: Collection[str], report: Callable[..., None]) -> None:
    """Import a framework, initialize CUDA in it, and report the result of each step.

    Args:
        key: The framework's key in PROBES.
        allowed: The UUIDs, without the `GPU-` prefix, of the devices that the framework may use.
            If other devices are visible, the framework does not initialize CUDA, because it could
            allocate memory on them.
        report: A function that receives the results as keyword arguments.
    """
    report(doing="being imported")
    framework = PROBES[key]()
    report(version=framework.version, build=framework.build)
    # Some packages change CUDA_VISIBLE_DEVICES when they are imported.
    report(visible=os.environ.get("CUDA_VISIBLE_DEVICES"))
    if framework.build is NO_CUDA:
        return
    report(doing="starting CUDA")
    driver = _Driver()
    uuids = [driver.uuid(number) for number in driver.devices()]
    if not {*uuids} <= {*allowed}:
        report(devices=uuids)
        return
    numbers = framework.devices()
    report(devices=[uuids[number] if number < len(uuids) else None for number in numbers])
    if targets := framework.targets():
        report(targets=[*map(str, targets)], capabilities=[*map(driver.capability, numbers)])


def main(key: str, allowed: Collection[str], path: list[str]) -> None:
    """Probe a framework, and write the results or the error to stdout.

    Args:
        key: The framework's key in PROBES.
        allowed: The UUIDs, without the `GPU-` prefix, of the devices that the framework may use.
        path: The new value for `sys.path`.
    """
    import ctypes

    sys.path[:] = path
    stdout = os.dup(1)
    os.dup2(2, 1)  # keep the framework's output separate from the results

    def report(**results: Any) -> None:
        # Earlier output might not end with a newline.
        os.write(stdout, f"\n{json.dumps(results)}\n".encode())

    # Kill this process when its parent dies. Linux sends the signal when the thread that started
    # this process exits.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL)
    try:
        probe(key, allowed, report)
    except DriverCallError as error:
        report(error=str(error), driver_code=error.code)
    except Exception as error:  # noqa: BLE001 - every error is reported as a result
        text = next((line for line in str(error).splitlines() if line.strip()), "")
        report(error=": ".join(filter(None, (type(error).__name__, text))))
    report(is_done=True)


def _jax_build() -> str | None:
    """Return the CUDA version that JAX was built for, or NO_CUDA.

    The name of the installed JAX plugin contains the CUDA version. Before JAX 0.4.27, the jaxlib
    version contains it.
    """
    for major in ("13", "12", "11"):
        with suppress(metadata.PackageNotFoundError):
            metadata.version(f"jax-cuda{major}-plugin")
            return major
    match = re.search(r"\+cuda([0-9]+)", str(getattr(import_module("jaxlib"), "__version__", "")))
    return match[1] if match else NO_CUDA


def _dotted(version: int) -> str:
    """Format a CUDA version number: 12040 becomes `12.4`."""
    return f"{version // 1000}.{version % 1000 // 10}"


if __name__ == "__main__":
    main(sys.argv[1], *(json.loads(word) for word in sys.argv[2:]))
    os._exit(0)  # skip the framework's cleanup, which is slow and might hang
