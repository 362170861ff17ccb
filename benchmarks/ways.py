"""The compared methods of choosing a GPU, each with the code that its documentation shows.

Each method sets CUDA_VISIBLE_DEVICES to a GPU, or to '' if it finds none.
"""

from __future__ import annotations

FLOOR, OURS, NVITOP, SETGPU = "bare pynvml", "reserve_gpu", "nvitop.select", "setGPU's way"

# The minimum that every program needs: import the bindings, initialize NVML, and read one GPU after
# the other until one is idle. There is no lock and no error handling.
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

# If no GPU is free, reserve() sets the variable to '' before it raises.
_OURS = """
import reserve_gpu
try:
    reserve_gpu.reserve()
except reserve_gpu.NoFreeDeviceError:
    pass
"""

# A part of a GPU, for which reserve() also determines the memory limits of PyTorch, JAX and others.
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

# The code of `import setGPU` (0.0.7): it chooses the GPU with the smallest share of memory in use.
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

    setGPU's method always chooses a GPU, the least used one. A part of a GPU can be on a busy GPU
    with enough memory.

    Args:
        way: The name of the method.
        answer: The value of CUDA_VISIBLE_DEVICES.
        gpus: The number of GPUs.
        busy: The number of busy GPUs, which are the first ones.

    Raises:
        RuntimeError: The choice is wrong.
    """
    idle = {str(index) for index in range(busy, gpus)}
    if way in (FLOOR, OURS, PART) and idle:  # they choose the first idle GPU; others any idle GPU
        idle = {str(busy)}
    if way in (SETGPU, PART) and not idle:
        idle = {str(index) for index in range(gpus)}
    if answer not in (idle or {""}):
        raise RuntimeError(f"{way} chose {answer!r}, not one of {sorted(idle)}")
