"""Tests of memory limits in real frameworks, after CUDA has started, and in child processes."""

from __future__ import annotations

import ast
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

from reserve_gpu.gpus import memory_caps
from reserve_gpu.gpus.cuda_environment import CUPY_LIMIT, TF_GROWTH, TORCH_ALLOCATOR
from reserve_gpu.render.notices import CAPS_ARE_LATE

if TYPE_CHECKING:
    from tests.support.machine import Machine


GROW = """
import ctypes, warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter('always')
    reserve_gpu.reserve(memory='2GB')
    count = len(caught)
    ctypes.CDLL('libcuda.so.1').cuInit(0)
    reserve_gpu.reserve(memory='3GB')
[[str(each.message) for each in some] for some in (caught[:count], caught[count:])]
"""


def test_a_part_that_grows_after_cuda_has_started(machine: Machine) -> None:
    """A change of the part after CUDA has started warns that it has little effect."""
    with machine.child() as child:
        before, after = child.run(GROW).value
    assert CAPS_ARE_LATE not in before
    assert CAPS_ARE_LATE in after


READ_TORCH = """
import os, reserve_gpu
reserve_gpu.reserve(memory='3GB')
import torch
[torch._C._accelerator_getAllocatorSettings(), os.environ['PYTORCH_ALLOC_CONF']]
"""


@pytest.mark.full
def test_real_pytorch(machine: Machine) -> None:
    """PyTorch reads the variable that a reservation sets, or what the user sets afterwards."""
    torch = pytest.importorskip("torch", reason="needs the extra `frameworks`")
    assert memory_caps.knows_fraction(torch.__version__)
    with machine.child() as child:
        settings, value = child.run(READ_TORCH).value
        assert settings == value
        assert value.startswith("per_process_memory_fraction:0.")
    later = READ_TORCH.replace(
        "import torch", "os.environ['PYTORCH_ALLOC_CONF'] = OWN\nimport torch"
    )
    with machine.child() as child:
        settings, _ = child.run(later.replace("OWN", "'expandable_segments:True'")).value
        assert settings == "expandable_segments:True"


READ_JAX = """
import reserve_gpu
reserve_gpu.reserve(memory='3GB')
from jaxlib import xla_client
xla_client.generate_pjrt_gpu_plugin_options()['memory_fraction']
"""


@pytest.mark.full
def test_real_jax(machine: Machine) -> None:
    """JAX reads the fraction that a reservation sets, or what the user sets afterwards."""
    pytest.importorskip("jaxlib", reason="needs the extra `frameworks`")
    with machine.child(XLA_CLIENT_MEM_FRACTION="0.25") as child:
        assert child.run(READ_JAX).value == 0.25
    with machine.child() as child:
        assert 0.5 < child.run(READ_JAX).value < 0.6
        read = READ_JAX.strip().splitlines()[-1]
        own = "import os; os.environ['XLA_CLIENT_MEM_FRACTION'] = '0.25'\n"
        assert child.run(own + read).value == 0.25
        old = "os.environ['XLA_PYTHON_CLIENT_MEM_FRACTION'] = '0.25'\n"
        assert "specified together" in child.run(old + read).text
        assert child.run(f"del os.environ['XLA_CLIENT_MEM_FRACTION']\n{read}").value == 0.25


READ_TENSORFLOW = """
import sys, reserve_gpu
from reserve_gpu.gpus import memory_caps
held = reserve_gpu.reserve(memory='3GB')
import tensorflow as tf
context = sys.modules['tensorflow.python.eager.context'].context()
# Without a GPU, TensorFlow has no device to configure, so add one by name.
context._initialize_physical_devices()
gpu = tf.config.PhysicalDevice('/physical_device:GPU:0', 'GPU')
context._physical_devices.append(gpu)
context._visible_device_list.append(gpu)
context._memory_growth_map[gpu] = None
context._physical_device_to_index[gpu] = len(context._physical_devices) - 1
exec(memory_caps.code_lines(held.devices, held.memory_mib)['tensorflow'])
virtual = context.config.gpu_options.experimental.virtual_devices
[list(each.memory_limit_mb) for each in virtual]
"""


@pytest.mark.full
def test_real_tensorflow(machine: Machine) -> None:
    """TensorFlow is limited by the line of code that users get."""
    if find_spec("tensorflow") is None:
        pytest.skip("TensorFlow is not installed")
    with machine.child(TF_CPP_MIN_LOG_LEVEL="3") as child:
        answer = child.run(READ_TENSORFLOW)
        assert answer.value == [[2349]], answer.text


IN_CHILD = """
import os, sys, reserve_gpu
from reserve_gpu.gpus import cuda_environment
os.environ.pop("CUDA_VISIBLE_DEVICES")  # else only the parent's GPU could be reserved
before = cuda_environment.read(cuda_environment.CAPS)
held = reserve_gpu.reserve(1, memory=None if sys.argv[1] == "whole" else sys.argv[1])
caps = cuda_environment.read(cuda_environment.CAPS)
print({name: value for name, value in caps.items() if value and "XLA" not in name})
held.release()
assert cuda_environment.read(cuda_environment.CAPS) == before
"""


@pytest.mark.parametrize(
    ("memory", "limit"), [("whole", None), ("1GiB", "536870912"), ("4GiB", "3489660928")]
)
def test_a_child_replaces_the_limits_of_its_parent(
    machine: Machine, memory: str, limit: str | None
) -> None:
    """A child's reservation replaces its parent's limits, and its release restores them.

    The user's values from before the parent's reservation are kept.
    """
    machine.write("gpu\n memory 8192\n" * 2)
    command = ("sh", "-c", '"$@"; exit $?', "sh", sys.executable, "-c", IN_CHILD, memory)
    done = machine.command(
        sys.executable, "-m", "reserve_gpu", "run", "--memory", "2GiB", "0", "--",
        *command, PYTORCH_ALLOC_CONF="backend:native",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    expected = {CUPY_LIMIT: limit, TF_GROWTH: "true"} if limit else {}
    limits = ast.literal_eval(done.stdout.splitlines()[-1])
    words = limits.pop(TORCH_ALLOCATOR).split(",")
    assert limits == expected
    assert words[0] == "backend:native"
    assert len(words) <= (2 if limit else 1)
