"""Code of all stand-in frameworks: the use of libcuda, and the simulated faults.

`STAND_IN_TROUBLE=torch=cpu,cupy=hangs` sets the faults.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import subprocess
import sys
import time

TARGETS = ["sm_50", "sm_60", "sm_70", "sm_80", "sm_90"]  # the architectures of a build


def trouble(name: str) -> str:
    """Return the simulated fault of this framework, or an empty string."""
    faults = os.environ.get("STAND_IN_TROUBLE", "").split(",")
    return dict(fault.split("=") for fault in faults if fault).get(name, "")


def arrive(name: str) -> None:
    """Simulate the fault of the import."""
    what = trouble(name)
    if what == "noise":
        print('{"version": "noise", "is_done": true}', flush=True)
        os.write(1, b"\xff\x00 noise\n" * 20_000)
        os.write(2, b"\x1b[31m noise\n" * 20_000)
    elif what == "ignores":  # like packages that set the variable when they are imported
        os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    elif what == "hides":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif what == "hangs":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]):
            _say_ready()
            time.sleep(600)
    elif what == "lingers":
        atexit.register(time.sleep, 600)
    elif what == "waits":
        _say_ready()
        time.sleep(600)
    elif what == "crashes":
        os.write(2, b"first\nterminate called: <b>boom</b>\x1b[31m\n\n")
        os.kill(os.getpid(), signal.SIGSEGV)
    elif what == "exits":
        os._exit(3)
    elif what == "raises":
        raise ImportError("libcudnn.so.9: cannot open shared object file\nand more\n")


def _say_ready() -> None:
    if path := os.environ.get("STAND_IN_READY"):
        with open(path, "w", encoding="ascii"):
            pass


class Cuda:
    """The devices that CUDA shows this process."""

    def __init__(self, name: str) -> None:
        self.name = name

    def start(self) -> int:
        """Return the number of devices."""
        if trouble(self.name) == "old":
            raise RuntimeError("The NVIDIA driver on your system is too old\nPlease update")
        library = ctypes.CDLL("libcuda.so.1")
        if code := library.cuInit(0):
            raise RuntimeError(f"No CUDA GPUs are available ({code})")
        count = ctypes.c_int()
        library.cuDeviceGetCount(ctypes.byref(count))
        return 1 if trouble(self.name) == "fewer" else count.value

    def take_context(self, number: int) -> None:
        """Create a context on a device."""
        context = ctypes.byref(ctypes.c_void_p())
        ctypes.CDLL("libcuda.so.1").cuDevicePrimaryCtxRetain(context, number)
