"""The ways to a GPU that are compared: what each is told to run, as its own documentation shows it.

Each sets CUDA_VISIBLE_DEVICES: to a GPU, or to '' where it finds none.
"""

from __future__ import annotations

FLOOR, OURS, NVITOP, SETGPU = "bare pynvml", "reserve_gpu", "nvitop.select", "setGPU's way"

# What nobody can do without: import the bindings, initialise, look at one GPU after the other until
# one is idle. Without a lock, without a check of what can go wrong.
_FLOOR = """
import os, pynvml
found = ""
pynvml.nvmlInit()
for index in range(pynvml.nvmlDeviceGetCount()):
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    pynvml.nvmlDeviceGetUUID(handle)
    processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    if not processes and memory.used < 1 << 30:
        found = str(index)
        break
pynvml.nvmlShutdown()
os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
os.environ["CUDA_VISIBLE_DEVICES"] = found
"""

# Where nothing is free reserve() has set the variable to '' before it raises.
_OURS = """
import reserve_gpu
try:
    reserve_gpu.reserve()
except reserve_gpu.NoFreeDeviceError:
    pass
"""

# For a part of a GPU: also what PyTorch, JAX and the others are told is found out.
_PART = """
import reserve_gpu
reserve_gpu.reserve(memory="10GB")
"""

# https://nvitop.readthedocs.io/en/latest/select.html
_NVITOP = """
import os
from nvitop import select_devices
found = select_devices(format="index", max_count=1, min_free_memory="40GiB")
os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, found))
"""

# What `import setGPU` does (setGPU 0.0.7): the GPU with the smallest share of its memory in use.
_SETGPU = """
import os, gpustat
gpus = gpustat.GPUStatCollection.new_query()
found = min(gpus, key=lambda gpu: gpu.memory_used / gpu.memory_total)
os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
os.environ["CUDA_VISIBLE_DEVICES"] = str(found.index)
"""

PART = "a part"
MAGIC = "get_ipython().run_line_magic('reserve_gpu', '')"
CODE = {FLOOR: _FLOOR, OURS: _OURS, NVITOP: _NVITOP, SETGPU: _SETGPU, PART: _PART}
SAY = '\nimport os; print(os.environ["CUDA_VISIBLE_DEVICES"], flush=True)'


def check(way: str, answer: str, gpus: int, busy: int) -> None:
    """Fail unless a way has chosen an idle GPU, or none where there is none.

    setGPU's way has no word for "none": it takes the one that is least in use. A part is had also
    beside others, if there is room.
    """
    idle = {str(index) for index in range(busy, gpus)}
    if way in (FLOOR, OURS, PART) and idle:  # the first; others spread over those that are idle
        idle = {str(busy)}
    if way in (SETGPU, PART) and not idle:
        idle = {str(index) for index in range(gpus)}
    if answer not in (idle or {""}):
        raise RuntimeError(f"{way} chose {answer!r}, not one of {sorted(idle)}")
