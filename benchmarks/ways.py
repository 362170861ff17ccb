"""The GPU selection methods that are compared, with the code from their documentation.

Each method sets CUDA_VISIBLE_DEVICES to the chosen GPU, or to '' if it finds no GPU.
"""

from __future__ import annotations

FLOOR, OURS, NVITOP, SETGPU = "bare pynvml", "reserve_gpu", "nvitop.select", "setGPU's way"

# The minimum that every program has to do: import the bindings, initialize NVML, and read one GPU
# after another until one is idle. The code uses no locks and handles no errors.
_FLOOR = """
import os, pynvml
choice = ""
pynvml.nvmlInit()
for index in range(pynvml.nvmlDeviceGetCount()):
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    pynvml.nvmlDeviceGetUUID(handle)
    processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    if not processes and memory.used < 1 << 30:
        choice = str(index)
        break
pynvml.nvmlShutdown()
os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
os.environ["CUDA_VISIBLE_DEVICES"] = choice
"""

# If no GPU is free, reserve() sets CUDA_VISIBLE_DEVICES to '' before it raises an exception.
_OURS = """
import reserve_gpu
try:
    reserve_gpu.reserve()
except reserve_gpu.NoFreeDeviceError:
    pass
"""

# To reserve a part of a GPU, reserve() also determines the memory limits of PyTorch, JAX and other
# frameworks.
_PART = """
import reserve_gpu
reserve_gpu.reserve(memory="10GB")
"""

# https://nvitop.readthedocs.io/en/latest/select.html
_NVITOP = """
import os
from nvitop import select_devices
choice = select_devices(format="index", max_count=1, min_free_memory="40GiB")
os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, choice))
"""

# The code that `import setGPU` (0.0.7) runs. It chooses the GPU with the smallest share of memory
# in use.
_SETGPU = """
import os, gpustat
gpus = gpustat.GPUStatCollection.new_query()
choice = min(gpus, key=lambda gpu: gpu.memory_used / gpu.memory_total)
os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
os.environ["CUDA_VISIBLE_DEVICES"] = str(choice.index)
"""

PART = "a part"
MAGIC = "get_ipython().run_line_magic('reserve_gpu', '')"
CODE = {FLOOR: _FLOOR, OURS: _OURS, NVITOP: _NVITOP, SETGPU: _SETGPU, PART: _PART}
PRINT_CHOICE = '\nimport os; print(os.environ["CUDA_VISIBLE_DEVICES"], flush=True)'


def check(way: str, answer: str, gpus: int, busy: int) -> None:
    """Check that a method has chosen an idle GPU, or none if no GPU is idle.

    setGPU's method always chooses the least used GPU, even if that GPU is busy. A partial
    reservation can be on a busy GPU that has enough free memory.

    Args:
        way: The name of the method.
        answer: The value of CUDA_VISIBLE_DEVICES.
        gpus: The number of GPUs.
        busy: The number of busy GPUs, which come before the idle ones.

    Raises:
        RuntimeError: The method chose the wrong GPU.
    """
    idle = {str(index) for index in range(busy, gpus)}
    if way in (FLOOR, OURS, PART) and idle:  # these methods choose the first idle GPU
        idle = {str(busy)}
    if way in (SETGPU, PART) and not idle:
        idle = {str(index) for index in range(gpus)}
    if answer not in (idle or {""}):
        raise RuntimeError(f"{way} chose {answer!r}, not one of {sorted(idle)}")
