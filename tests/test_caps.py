"""What keeps frameworks within a part of a GPU: the variables, and lines for people to type."""

from __future__ import annotations

import ast
import os
import sys
from importlib.util import find_spec
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import reserve_gpu
from reserve_gpu.gpus import cuda_environment, memory_caps
from reserve_gpu.gpus.cuda_environment import (
    CUPY_LIMIT,
    OLD_TORCH_ALLOCATOR,
    OLD_XLA_FRACTION,
    TF_GROWTH,
    TORCH_ALLOCATOR,
    XLA_FRACTION,
)
from reserve_gpu.model import errors
from reserve_gpu.model.devices import MIB, Device
from reserve_gpu.reservation.environment_changes import memory_limit_notices
from tests.locked import held

if TYPE_CHECKING:
    from pathlib import Path

    from tests.here import Here
    from tests.machine import Machine

BIG = Device(2, "GPU-a", memory_mib=81920)
SMALL = Device(3, "GPU-b", memory_mib=40960)
INSTANCE = Device(1, "MIG-d", memory_mib=20096, instance=0)
PART_MIB = 11_008.0  # which leaves 10 GiB beside the context
ROOM = str(10_240 * MIB)
NO_CAPS: dict[str, str | None] = dict.fromkeys(cuda_environment.CAPS)


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let this Python have these packages and no others, by the folders beside them alone."""

    def install(*names: str) -> None:
        folder = tmp_path / "packages"
        folder.mkdir()
        for name in names:
            (folder / name).mkdir()
        monkeypatch.setattr(sys, "path", [str(folder)])

    monkeypatch.delenv("RESERVE_GPU_CONTEXT_MEMORY", raising=False)
    return install


TORCH, OLD_TORCH = "torch-2.10.0.dist-info", "torch-2.9.1+cu128.dist-info"
TENSORFLOW = "tensorflow-2.19.0.dist-info"
SEGMENTS = "expandable_segments:True"


# -- the variables ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("devices", "fraction"),
    [
        ([BIG], "0.125000"),
        ([BIG, SMALL], "0.125000"),
        ([SMALL], "0.250000"),
        ([INSTANCE], "0.509554"),
    ],
)
def test_each_framework_in_its_own_unit(
    packages: Any, devices: list[Device], fraction: str
) -> None:
    """JAX and PyTorch get a fraction of the largest device, rounded down, and CuPy bytes."""
    packages(TORCH)
    assert memory_caps.variables(devices, PART_MIB, NO_CAPS) == {
        XLA_FRACTION: fraction,
        CUPY_LIMIT: ROOM,
        TORCH_ALLOCATOR: f"per_process_memory_fraction:{fraction}",
        TF_GROWTH: "true",
    }


@pytest.mark.parametrize(
    ("version", "knows"),
    [
        ("2.9.1+cu128", False),
        ("1.13.1", False),
        ("2.10.0", True),
        ("2.10.0a0+git1", True),
        ("2.13.0+cpu", True),
        ("3.0", True),
        ("unknown", False),
    ],
)
def test_pytorch_that_would_raise_gets_no_word(packages: Any, version: str, *, knows: bool) -> None:
    """A PyTorch that raises on a word that it does not know is not given it."""
    packages(f"torch-{version}.dist-info")
    assert (TORCH_ALLOCATOR in memory_caps.variables([BIG], PART_MIB, NO_CAPS)) is knows


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ([OLD_TORCH, TENSORFLOW], {"torch": "2.9.1+cu128", "tensorflow": "2.19.0"}),
        (["torch-1.13.1.egg-info"], {"torch": "1.13.1"}),
        (["torch-2.5.1-py3.12.egg-info"], {"torch": "2.5.1"}),
        (["torch-2.10.0a0+b558c986e8.nv25.11.dist-info"], {"torch": "2.10.0a0+b558c986e8.nv25.11"}),
        (["torch", "torch_geometric-2.6.1.dist-info", "~orch-2.9.1.dist-info"], {}),
        (["tensorflow_cpu-2.19.0.dist-info", "tensorflow-estimator-2.15.dist-info"], {}),
    ],
)
def test_what_is_installed(packages: Any, names: list[str], found: dict[str, str]) -> None:
    """PyTorch and TensorFlow are known by the folders beside them, whoever has installed them."""
    packages(*names)
    assert memory_caps.installed() == found


def test_the_first_on_the_path_counts(
    packages: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two versions that one counts which Python imports; odd entries of the path none."""
    packages(TORCH)
    (tmp_path / OLD_TORCH).mkdir()
    monkeypatch.chdir(tmp_path)
    odd: list[Any] = [tmp_path, 7, b".", "\udcff", "a\0b", str(tmp_path / "none")]
    monkeypatch.setattr(sys, "path", [*odd, *sys.path, ""])
    assert memory_caps.installed() == {"torch": "2.10.0"}
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    assert memory_caps.installed() == {"torch": "2.9.1+cu128"}


@pytest.mark.parametrize(
    ("theirs", "missing", "stands"),
    [
        ({XLA_FRACTION: ".5"}, {XLA_FRACTION}, [XLA_FRACTION]),
        ({OLD_XLA_FRACTION: ".5"}, {XLA_FRACTION}, [OLD_XLA_FRACTION]),
        ({CUPY_LIMIT: "50%"}, {CUPY_LIMIT}, [CUPY_LIMIT]),
        ({TF_GROWTH: "false"}, {TF_GROWTH}, []),
        (
            {TORCH_ALLOCATOR: "backend:native,per_process_memory_fraction:0.5"},
            {TORCH_ALLOCATOR},
            [TORCH_ALLOCATOR],
        ),
        (
            {OLD_TORCH_ALLOCATOR: "per_process_memory_fraction:0.5"},
            {TORCH_ALLOCATOR},
            [OLD_TORCH_ALLOCATOR],
        ),
        ({XLA_FRACTION: "", CUPY_LIMIT: ""}, set(), []),
    ],
)
def test_what_the_user_set_stays(
    packages: Any, theirs: dict[str, str], missing: set[str], stands: list[str]
) -> None:
    """No value that the user has set is replaced, by either of its names, and it is named."""
    packages(TORCH)
    inherited = {**NO_CAPS, **theirs}
    everything = {XLA_FRACTION, CUPY_LIMIT, TORCH_ALLOCATOR, TF_GROWTH}
    assert memory_caps.variables([BIG], PART_MIB, inherited).keys() == everything - missing
    assert [*memory_caps.capped_by(inherited).values()] == stands


def test_pytorchs_other_words_stay(packages: Any) -> None:
    """The fraction is appended to what PyTorch would have read."""
    packages(TORCH)
    written = memory_caps.variables([BIG], PART_MIB, {**NO_CAPS, TORCH_ALLOCATOR: f"{SEGMENTS},"})
    assert written[TORCH_ALLOCATOR] == f"{SEGMENTS},per_process_memory_fraction:0.125000"


@pytest.mark.parametrize("beside", [{}, {TORCH_ALLOCATOR: "ignored:1"}])
def test_pytorchs_older_name_stands(packages: Any, beside: dict[str, str]) -> None:
    """Where the user has set the name that PyTorch reads first, the line to type is left."""
    packages(TORCH)
    theirs = {OLD_TORCH_ALLOCATOR: SEGMENTS, **beside}
    written = memory_caps.variables([BIG], PART_MIB, {**NO_CAPS, **theirs})
    assert written.keys() == {XLA_FRACTION, CUPY_LIMIT, TF_GROWTH}
    assert lines([BIG], theirs) == [TORCH_LINE]


def test_the_allowance_can_be_set(packages: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The allowance for the CUDA context is a setting."""
    monkeypatch.setenv("RESERVE_GPU_CONTEXT_MEMORY", "1008MiB")
    assert memory_caps.variables([BIG], PART_MIB, NO_CAPS)[CUPY_LIMIT] == str(10_000 * MIB)


# -- with a reservation ----------------------------------------------------------------------------


def _set() -> dict[str, str]:
    now = cuda_environment.read(cuda_environment.CAPS)
    return {name: value for name, value in now.items() if value is not None}


def test_set_and_given_back(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caps come with a part, change with its size, and go with it; the user's own stays."""
    monkeypatch.setenv(TORCH_ALLOCATOR, "expandable_segments:True")
    monkeypatch.setenv(CUPY_LIMIT, "")
    before = _set()
    reserve_gpu.reserve(memory="3GB")
    assert _set()[CUPY_LIMIT] == str(int(3e9) - 768 * MIB)
    reserve_gpu.reserve(memory="2GB")
    assert _set()[CUPY_LIMIT] == str(int(2e9) - 768 * MIB)
    reserve_gpu.release()
    assert _set() == before


def test_one_fraction_for_gpus_of_different_sizes(here: Here) -> None:
    """Where one number has to do for several GPUs it is that of the largest."""
    here.write("gpu\n memory 8192\ngpu\n memory 16384\n")
    reserve_gpu.reserve("0,1", memory="4864MiB")
    assert os.environ[XLA_FRACTION] == "0.250000"


def test_a_users_cap_is_said(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has set a cap is told that it stands."""
    monkeypatch.setenv(CUPY_LIMIT, "1000")
    said = "CUPY_GPU_MEMORY_LIMIT is already set"
    with pytest.warns(reserve_gpu.ReserveGPUWarning, match=said) as caught:
        reserve_gpu.reserve(memory="3GB")
    assert {each.filename for each in caught} == {__file__}  # where it was asked for
    assert os.environ[CUPY_LIMIT] == "1000"


def test_a_cap_that_the_user_changes_is_theirs(here: Here) -> None:
    """A cap that the user sets after the reservation stays over the next call and the release."""
    reserve_gpu.reserve(memory="3GB")
    os.environ[XLA_FRACTION] = "0.01"
    with pytest.warns(reserve_gpu.ReserveGPUWarning, match=XLA_FRACTION):
        reserve_gpu.reserve(memory="2GB")
    assert os.environ[XLA_FRACTION] == "0.01"
    reserve_gpu.release()
    assert os.environ[XLA_FRACTION] == "0.01"
    del os.environ[XLA_FRACTION]


def test_caps_that_were_changed_are_mended(here: Here) -> None:
    """Asked for the same again, caps that are gone are set; what is said to be set is there.

    JAX raises where both of its names are set, so the user's own goes before.
    """
    first = reserve_gpu.reserve(memory="3GB")
    del os.environ[CUPY_LIMIT]
    os.environ[OLD_XLA_FRACTION] = "0.01"
    os.environ[TORCH_ALLOCATOR] = "expandable_segments:True"
    with pytest.warns(reserve_gpu.ReserveGPUWarning, match=OLD_XLA_FRACTION):
        assert reserve_gpu.reserve(memory="3GB") is first
    assert _set()[CUPY_LIMIT] == str(int(3e9) - 768 * MIB)
    assert XLA_FRACTION not in _set()
    assert {**os.environ, **first.environ} == os.environ
    assert XLA_FRACTION not in str(first)
    assert reserve_gpu.reserve(memory="3GB") is first
    reserve_gpu.release()
    assert _set() == {OLD_XLA_FRACTION: "0.01", TORCH_ALLOCATOR: "expandable_segments:True"}
    del os.environ[OLD_XLA_FRACTION], os.environ[TORCH_ALLOCATOR]


def test_a_small_part(here: Here) -> None:
    """Of a part that a CUDA context might fill half is the cap."""
    reserve_gpu.reserve(memory="512MiB")
    assert _set()[CUPY_LIMIT] == str(256 * MIB)


def test_an_allowance_that_is_no_size(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """A setting that is no size is said before anything is reserved or changed."""
    monkeypatch.setenv("RESERVE_GPU_CONTEXT_MEMORY", "much")
    before = dict(os.environ)
    with pytest.raises(errors.RequestError, match="CONTEXT_MEMORY: 'much' is not a valid size"):
        reserve_gpu.reserve(memory="2GB")
    assert (dict(os.environ), held(here)) == (before, [])


def test_a_whole_gpu_has_no_cap(here: Here) -> None:
    """Without a size no cap is set."""
    reservation = reserve_gpu.reserve()
    assert _set() == {}
    assert reservation.environ.keys() == {*cuda_environment.CUDA}


# -- what there is to type -------------------------------------------------------------------------

TORCH_LINE = "torch.cuda.set_per_process_memory_fraction(0.125000)"
TENSORFLOW_LINE = (
    'for gpu in tf.config.list_physical_devices("GPU"): '
    "tf.config.set_logical_device_configuration(gpu, "
    "[tf.config.LogicalDeviceConfiguration(memory_limit=10240)])"
)


LATE = (
    "CUDA is already running: JAX, TensorFlow and CuPy keep the limit that they started with until "
    "you restart."
)


def lines(
    devices: list[Device], inherited: dict[str, str] | None = None, *, is_late: bool = False
) -> list[str]:
    """Return the notes of a part of these devices; of those with a line to type, the line alone."""
    values = {**NO_CAPS, **(inherited or {})}
    written = memory_caps.variables(devices, PART_MIB, values)
    told = memory_limit_notices(devices, PART_MIB, values, written, is_late=is_late)
    return [note.partition("\n")[2] or note for note in told]


@pytest.mark.parametrize(
    ("names", "typed"),
    [
        ([], []),
        ([TORCH], []),
        ([OLD_TORCH], [TORCH_LINE]),
        ([TENSORFLOW], [TENSORFLOW_LINE]),
        ([OLD_TORCH, TENSORFLOW], [TENSORFLOW_LINE, TORCH_LINE]),
    ],
)
def test_a_line_to_type(packages: Any, names: list[str], typed: list[str]) -> None:
    """Where a framework is installed that no variable caps, the user reads what to type."""
    packages(*names)
    assert lines([BIG]) == typed


def test_lines_for_several_gpus(packages: Any) -> None:
    """What is typed caps each of several GPUs, PyTorch by the fraction of the largest."""
    packages(OLD_TORCH, TENSORFLOW)
    line = "for n in range(2): torch.cuda.set_per_process_memory_fraction(0.125000, n)"
    assert lines([BIG, SMALL]) == [TENSORFLOW_LINE, line]


def test_what_is_typed_caps(packages: Any) -> None:
    """The lines are Python, and call PyTorch and TensorFlow with the right numbers."""
    packages(OLD_TORCH, TENSORFLOW)
    calls: list[Any] = []

    def note(*arguments: Any) -> None:
        calls.append(arguments)

    names = {
        "torch": SimpleNamespace(cuda=SimpleNamespace(set_per_process_memory_fraction=note)),
        "tf": SimpleNamespace(
            config=SimpleNamespace(
                list_physical_devices=lambda kind: [f"{kind}:0", f"{kind}:1"],
                set_logical_device_configuration=note,
                LogicalDeviceConfiguration=lambda memory_limit: memory_limit,
            )
        ),
    }
    for line in (*lines([BIG]), *lines([BIG, BIG])):
        exec(line, names)
    gpus = [("GPU:0", [10240]), ("GPU:1", [10240])]
    assert calls == [*gpus, (0.125,), *gpus, (0.125, 0), (0.125, 1)]


def test_no_line_beside_a_cap_of_the_users(packages: Any) -> None:
    """Who has capped PyTorch by its variable is told that it stands, and gets nothing to type."""
    packages(OLD_TORCH)
    (told,) = lines([BIG], {OLD_TORCH_ALLOCATOR: "per_process_memory_fraction:0.5"})
    assert told.startswith(f"{OLD_TORCH_ALLOCATOR} is already set, and keeps its value")


def test_no_fraction_without_a_size(packages: Any) -> None:
    """Where the memory of a GPU is not known there is no fraction to type either."""
    packages(OLD_TORCH)
    assert lines([Device(0, "GPU-c")]) == []


def test_once_cuda_runs(packages: Any) -> None:
    """What runs reads no variable any more: that is said, and what to type for any PyTorch."""
    packages(TORCH)
    assert lines([BIG], is_late=True) == [LATE, TORCH_LINE]
    (stands, late) = lines(
        [BIG], {TORCH_ALLOCATOR: "per_process_memory_fraction:0.5"}, is_late=True
    )
    assert (stands.split()[0], late) == (TORCH_ALLOCATOR, LATE)


GROW = """
import ctypes, warnings
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter('always')
    reserve_gpu.reserve(memory='2GB')
    before = len(told)
    ctypes.CDLL('libcuda.so.1').cuInit(0)
    reserve_gpu.reserve(memory='3GB')
[[str(each.message) for each in some] for some in (told[:before], told[before:])]
"""


@pytest.mark.process
def test_a_part_that_grows_once_cuda_runs(machine: Machine) -> None:
    """A part that is changed after CUDA has started comes with the word that little follows it."""
    with machine.child() as child:
        before, after = child.run(GROW).value
    assert LATE not in before
    assert LATE in after


@pytest.mark.parametrize("is_notebook", [True, False], ids=["notebook", "terminal"])
def test_a_line_to_type_is_shown(here: Here, packages: Any, *, is_notebook: bool) -> None:
    """What is to be typed stands on a line of its own, in a notebook and in a terminal."""
    path = [*sys.path]
    packages(TENSORFLOW)
    sys.path += path
    shell = here.shell(is_notebook=is_notebook)
    cell = shell.run("%reserve_gpu --memory 3GB")
    assert cell.error is None
    shown = cell.values[0]["text/html"] if is_notebook else cell.stderr
    start = "<div>" if is_notebook else "\n"
    end = "</div>" if is_notebook else ""
    assert f"right after importing it:{end}{start}for gpu in tf." in shown
    assert "memory_limit=2093)" in shown


# -- the frameworks themselves ---------------------------------------------------------------------

READ_TORCH = """
import os, reserve_gpu
reserve_gpu.reserve(memory='3GB')
import torch
[torch._C._accelerator_getAllocatorSettings(), os.environ['PYTORCH_ALLOC_CONF']]
"""


@pytest.mark.full
@pytest.mark.process
def test_real_pytorch(machine: Machine) -> None:
    """PyTorch itself takes the variable as it was set, and what the user sets later."""
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
@pytest.mark.process
def test_real_jax(machine: Machine) -> None:
    """JAX itself reads the fraction from the variable as it was set, and what is set later."""
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
# Without a GPU for CUDA it has none, so it is given the name of one.
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
@pytest.mark.process
def test_real_tensorflow(machine: Machine) -> None:
    """TensorFlow itself takes the limit by the line that users get to type."""
    if find_spec("tensorflow") is None:
        pytest.skip("TensorFlow is not installed")
    with machine.child(TF_CPP_MIN_LOG_LEVEL="3") as child:
        answer = child.run(READ_TENSORFLOW)
        assert answer.value == [[2349]], answer.text


# -- processes below -------------------------------------------------------------------------------

BELOW = """
import os, sys, reserve_gpu
from reserve_gpu.gpus import cuda_environment
os.environ.pop("CUDA_VISIBLE_DEVICES")  # or nothing but the GPU of the part could be had
before = cuda_environment.read(cuda_environment.CAPS)
held = reserve_gpu.reserve(1, memory=None if sys.argv[1] == "whole" else sys.argv[1])
caps = cuda_environment.read(cuda_environment.CAPS)
print({name: value for name, value in caps.items() if value and "XLA" not in name})
held.release()
assert cuda_environment.read(cuda_environment.CAPS) == before
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("memory", "limit"), [("whole", None), ("1GiB", "536870912"), ("4GiB", "3489660928")]
)
def test_a_process_below_has_caps_of_its_own(
    machine: Machine, memory: str, limit: str | None
) -> None:
    """What a process above has set for its part is nobody's own: a new reservation replaces it.

    What the user had set before that stands again, and the release gives back what was inherited.
    """
    machine.write("gpu\n memory 8192\n" * 2)
    command = ("sh", "-c", '"$@"; exit $?', "sh", sys.executable, "-c", BELOW, memory)
    done = machine.command(
        sys.executable, "-m", "reserve_gpu", "run", "--memory", "2GiB", "0", "--",
        *command, PYTORCH_ALLOC_CONF="backend:native",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "already set" not in done.stderr
    expected = {CUPY_LIMIT: limit, TF_GROWTH: "true"} if limit else {}
    said = ast.literal_eval(done.stdout.splitlines()[-1])
    words = said.pop(TORCH_ALLOCATOR).split(",")
    assert said == expected
    assert words[0] == "backend:native"
    assert len(words) <= (2 if limit else 1)


@pytest.mark.parametrize("allocator", ["platform", "cuda_async", "default"])
def test_an_allocator_that_keeps_to_no_limit(packages: Any, allocator: str) -> None:
    """With some of JAX's allocators its cap is none."""
    packages()
    values = {XLA_FRACTION: "0.1", CUPY_LIMIT: "1", "XLA_PYTHON_CLIENT_ALLOCATOR": allocator}
    kept = {"cupy": CUPY_LIMIT} | ({"jax": XLA_FRACTION} if allocator == "default" else {})
    assert memory_caps.limiting_variables(values) == kept
