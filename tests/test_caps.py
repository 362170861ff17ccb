"""What keeps frameworks within a part of a GPU: the variables, and what a variable can't do."""

from __future__ import annotations

import ast
import os
import sys
from copy import copy, deepcopy
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import reserve_gpu
from reserve_gpu import errors, host
from reserve_gpu.model import MIB, Device
from reserve_gpu.reservation import caps, environment, hooks
from reserve_gpu.reservation.environment import (
    CUPY_LIMIT,
    MPS_LIMIT,
    TF_GROWTH,
    TORCH_ALLOCATOR,
    TORCH_ALLOCATOR_TOO,
    XLA_FRACTION,
    XLA_FRACTION_TOO,
)
from tests.locked import held

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.here import Here
    from tests.machine import Machine

BIG = Device(2, "GPU-a", memory_mib=81920)
SMALL = Device(3, "GPU-b", memory_mib=40960)
INSTANCE = Device(1, "MIG-d", memory_mib=20096, instance=0)
PART_MIB = 10_752.0  # which leaves 10 GiB beside the context
ROOM = str(10_240 * MIB)
NO_CAPS: dict[str, str | None] = dict.fromkeys(environment.CAPS)


@pytest.fixture
def versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lets this Python have another PyTorch, by its metadata alone."""

    def become(version: str) -> None:
        folder = tmp_path / f"torch-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n"
        )
        monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path / "none"))
    monkeypatch.delenv("RESERVE_GPU_CONTEXT_MEMORY", raising=False)
    return become


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
    versions: Any, devices: list[Device], fraction: str
) -> None:
    """JAX and PyTorch get a fraction of the largest device, rounded down, and CuPy bytes."""
    versions("2.10.0")
    assert caps.variables(devices, PART_MIB, NO_CAPS) == {
        XLA_FRACTION: fraction,
        CUPY_LIMIT: ROOM,
        TORCH_ALLOCATOR: f"per_process_memory_fraction:{fraction}",
        TF_GROWTH: "true",
    }


def test_nothing_for_a_whole_gpu(versions: Any) -> None:
    """Who reserves all of a GPU gets no cap."""
    versions("2.10.0")
    assert caps.variables([BIG], None, NO_CAPS) == {}


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
def test_pytorch_that_would_raise_gets_no_word(versions: Any, version: str, *, knows: bool) -> None:
    """A PyTorch that raises on a word that it does not know is not given it."""
    versions(version)
    assert (TORCH_ALLOCATOR in caps.variables([BIG], PART_MIB, NO_CAPS)) is knows


def test_metadata_that_can_not_be_read(
    here: Here, versions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken metadata and finders of others hinder nobody: PyTorch's version is not known then."""
    versions("2.10.0")
    metadata = next(Path(sys.path[0]).glob("*/METADATA"))
    metadata.write_bytes(b"Name: torch\nVersion: 2.10.0\nAuthor: M\xfcller\n")
    assert TORCH_ALLOCATOR not in reserve_gpu.reserve(memory="2GB").environ
    reserve_gpu.release()
    monkeypatch.setitem(sys.modules, "importlib.metadata", None)
    assert TORCH_ALLOCATOR not in reserve_gpu.reserve(memory="2GB").environ


@pytest.mark.parametrize("content", [b"Version: \xff\xfe", b""], ids=["not UTF-8", "empty"])
def test_broken_metadata_of_pytorch(
    here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    """A PyTorch whose metadata is broken gets no word, and is no reason to reserve nothing."""
    folder = tmp_path / "torch-9.9.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_bytes(content)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    reserve_gpu.reserve(memory="2GB")
    assert TORCH_ALLOCATOR not in _set()
    reserve_gpu.release()
    assert held(here) == []


@pytest.mark.parametrize(
    ("theirs", "missing", "stands"),
    [
        ({XLA_FRACTION: ".5"}, {XLA_FRACTION}, [XLA_FRACTION]),
        ({XLA_FRACTION_TOO: ".5"}, {XLA_FRACTION}, [XLA_FRACTION_TOO]),
        ({CUPY_LIMIT: "50%"}, {CUPY_LIMIT}, [CUPY_LIMIT]),
        ({TF_GROWTH: "false"}, {TF_GROWTH}, []),
        (
            {TORCH_ALLOCATOR: "backend:native,per_process_memory_fraction:0.5"},
            {TORCH_ALLOCATOR},
            [TORCH_ALLOCATOR],
        ),
        (
            {TORCH_ALLOCATOR_TOO: "per_process_memory_fraction:0.5"},
            {TORCH_ALLOCATOR},
            [TORCH_ALLOCATOR_TOO],
        ),
        ({XLA_FRACTION: "", CUPY_LIMIT: ""}, set(), []),
    ],
)
def test_what_the_user_set_stays(
    versions: Any, theirs: dict[str, str], missing: set[str], stands: list[str]
) -> None:
    """No value that the user has set is replaced, by either of its names, and it is named."""
    versions("2.10.0")
    outside = {**NO_CAPS, **theirs}
    everything = {XLA_FRACTION, CUPY_LIMIT, TORCH_ALLOCATOR, TF_GROWTH}
    assert caps.variables([BIG], PART_MIB, outside).keys() == everything - missing
    assert caps.standing(outside) == stands


@pytest.mark.parametrize(
    "theirs",
    [
        {TORCH_ALLOCATOR: "expandable_segments:True,"},
        {TORCH_ALLOCATOR_TOO: "expandable_segments:True"},
        {TORCH_ALLOCATOR: "expandable_segments:True", TORCH_ALLOCATOR_TOO: "ignored:1"},
    ],
)
def test_pytorchs_other_words_stay(versions: Any, theirs: dict[str, str]) -> None:
    """The fraction is appended to what PyTorch would have read, whichever name that had."""
    versions("2.10.0")
    value = caps.variables([BIG], PART_MIB, {**NO_CAPS, **theirs})[TORCH_ALLOCATOR]
    assert value == "expandable_segments:True,per_process_memory_fraction:0.125000"


def test_mps_where_its_daemon_runs(
    versions: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a control daemon the driver is told too, each device by its number in this process."""
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert MPS_LIMIT not in caps.variables([BIG, SMALL], PART_MIB, NO_CAPS)
    (tmp_path / "nvidia-cuda-mps-control.pid").write_text("17")
    assert caps.variables([BIG, SMALL], PART_MIB, NO_CAPS)[MPS_LIMIT] == "0=10240M,1=10240M"
    outside = {**NO_CAPS, MPS_LIMIT: "0=1G"}
    assert MPS_LIMIT not in caps.variables([BIG], PART_MIB, outside)
    assert caps.standing(outside) == [MPS_LIMIT]


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to somebody else")
@pytest.mark.parametrize("whose", ["folder", "file"])
def test_mps_of_a_stranger(
    versions: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whose: str
) -> None:
    """A directory, or a file in it, that another user made says nothing of MPS."""
    folder = tmp_path / "mps"
    folder.mkdir()
    file = folder / "nvidia-cuda-mps-control.pid"
    file.write_text("17")
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(folder))
    assert caps.mps_runs()
    os.chown({"folder": folder, "file": file}[whose], 12345, 12345)
    assert not caps.mps_runs()


def test_the_allowance_can_be_set(versions: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The allowance for the CUDA context is a setting."""
    monkeypatch.setenv("RESERVE_GPU_CONTEXT_MEMORY", "752MiB")
    assert caps.variables([BIG], PART_MIB, NO_CAPS)[CUPY_LIMIT] == str(10_000 * MIB)


# -- with a reservation ----------------------------------------------------------------------------


def _set() -> dict[str, str]:
    now = environment.read(environment.CAPS)
    return {name: value for name, value in now.items() if value is not None}


def test_set_and_given_back(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caps come with a part, change with its size, and go with it; the user's own stays."""
    monkeypatch.setenv(TORCH_ALLOCATOR, "expandable_segments:True")
    monkeypatch.setenv(CUPY_LIMIT, "")
    before = _set()
    reserve_gpu.reserve(memory="3GB")
    assert _set()[CUPY_LIMIT] == str(int(3e9) - 512 * MIB)
    reserve_gpu.reserve(memory="2GB")
    assert _set()[CUPY_LIMIT] == str(int(2e9) - 512 * MIB)
    reserve_gpu.release()
    assert _set() == before


def test_one_fraction_for_gpus_of_different_sizes_is_said(here: Here) -> None:
    """Where one number has to do for several GPUs it is that of the largest, and that is said."""
    here.write("gpu\n memory 8192\ngpu\n memory 16384\ngpu\n memory 16384")
    with pytest.warns(reserve_gpu.ReserveGPUWarning, match="one fraction for all: that"):
        reserve_gpu.reserve("0,1", memory="4608MiB")
    assert os.environ[XLA_FRACTION] == "0.250000"
    reserve_gpu.release()
    reserve_gpu.reserve("1,2", memory="4608MiB")


def test_a_users_cap_is_said(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has set a cap is told that it stands."""
    monkeypatch.setenv(CUPY_LIMIT, "1000")
    with pytest.warns(reserve_gpu.ReserveGPUWarning, match="CUPY_GPU_MEMORY_LIMIT is set already"):
        reserve_gpu.reserve(memory="3GB")
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
    os.environ[XLA_FRACTION_TOO] = "0.01"
    os.environ[TORCH_ALLOCATOR] = "expandable_segments:True"
    with pytest.warns(reserve_gpu.ReserveGPUWarning, match=XLA_FRACTION_TOO):
        assert reserve_gpu.reserve(memory="3GB") is first
    assert _set()[CUPY_LIMIT] == str(int(3e9) - 512 * MIB)
    assert XLA_FRACTION not in _set()
    assert {**os.environ, **first.environ} == os.environ
    assert XLA_FRACTION not in str(first)
    assert reserve_gpu.reserve(memory="3GB") is first
    reserve_gpu.release()
    assert _set() == {XLA_FRACTION_TOO: "0.01", TORCH_ALLOCATOR: "expandable_segments:True"}
    del os.environ[XLA_FRACTION_TOO], os.environ[TORCH_ALLOCATOR]


def test_a_small_part(here: Here) -> None:
    """Of a part that a CUDA context might fill half is the cap."""
    reserve_gpu.reserve(memory="512MiB")
    assert _set()[CUPY_LIMIT] == str(256 * MIB)


def test_an_allowance_that_is_no_size(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """A setting that is no size is said before anything is reserved or changed."""
    monkeypatch.setenv("RESERVE_GPU_CONTEXT_MEMORY", "much")
    before = dict(os.environ)
    with pytest.raises(errors.RequestError, match="RESERVE_GPU_CONTEXT_MEMORY: 'much' is no size"):
        reserve_gpu.reserve(memory="2GB")
    assert (dict(os.environ), held(here)) == (before, [])


def test_a_whole_gpu_is_as_ever(here: Here) -> None:
    """Without a size no cap is set, and nothing listens to imports."""
    finders = [*sys.meta_path]
    reservation = reserve_gpu.reserve()
    assert _set() == {}
    assert reservation.environ.keys() == {*environment.CUDA}
    assert [*sys.meta_path] == finders


# -- hooks, on small packages that do what the frameworks do ---------------------------------------

TORCH = """
__version__ = "2.9.1"
class _Cuda:
    started = broken = False
    calls, fractions = [], {}
    def is_initialized(self): return self.started
    def device_count(self): return 2
    def _lazy_call(self, call): self.calls.append(call)
    def get_per_process_memory_fraction(self, number): return self.fractions.get(number, 1.0)
    def set_per_process_memory_fraction(self, fraction, number):
        if self.broken: raise TypeError("moved elsewhere")
        self.fractions[number] = fraction
    def init(self):
        for call in self.calls: call()
        self.started = True
cuda = _Cuda()
"""
TENSORFLOW = """
import sys
from types import SimpleNamespace
class _Context:
    _context_handle = None
    limits = None
    def ensure_initialized(self):
        if self._context_handle is None:
            self.limits, self._context_handle = dict(config.limits), object()
_context = _Context()
eager = SimpleNamespace(context=lambda: _context)
sys.modules["tensorflow.python.eager.context"] = eager
class config:
    limits, is_listed = {}, False
    @classmethod
    def list_physical_devices(cls, kind):
        cls.is_listed = True
        return ["GPU:0", "GPU:1"]
    @classmethod
    def get_logical_device_configuration(cls, gpu): return cls.limits.get(gpu)
    @classmethod
    def set_logical_device_configuration(cls, gpu, limits):
        if _context._context_handle: raise RuntimeError("cannot be modified")
        cls.limits[gpu] = limits
    LogicalDeviceConfiguration = staticmethod(lambda memory_limit: memory_limit)
"""


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Lets this process have these packages, and a hook of its own."""
    folder = tmp_path / "packages"
    folder.mkdir()
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    names = ("torch", "tensorflow", "tensorflow.python.eager.context", "cupy")
    kept = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    hook = host.kept("hook", hooks.Hook)
    store = vars(sys.modules["reserve_gpu.kept"])
    del store["hook"]

    def write(**texts: str) -> None:
        for name, text in texts.items():
            (folder / f"{name}.py").write_text(text)

    yield write
    hooks.remove()
    for name in names:
        sys.modules.pop(name, None)
    sys.modules.update(kept)
    store["hook"] = hook


def _torch() -> Any:
    return import_module("torch")


def _tensorflow() -> Any:
    return import_module("tensorflow")


ROOMS = (0.125, 0.25)  # of BIG and SMALL


@pytest.mark.parametrize("is_first", [True, False], ids=["imported before", "imported after"])
def test_pytorch_is_capped_when_it_starts(packages: Any, *, is_first: bool) -> None:
    """PyTorch gets each device's own fraction once the user's code starts CUDA, not before."""
    packages(torch=TORCH)
    if is_first:
        _torch()
    assert hooks.install([BIG, SMALL], PART_MIB, []) == []
    torch = _torch()
    assert torch.cuda.fractions == {}
    torch.cuda.init()
    assert tuple(torch.cuda.fractions.values()) == ROOMS
    assert type(torch.__spec__.loader).__module__ == "_frozen_importlib_external"


def test_pytorch_is_capped_anew_in_place(packages: Any) -> None:
    """A new size is set at once where CUDA runs, and the release takes the cap away."""
    packages(torch=TORCH)
    hooks.install([BIG, SMALL], PART_MIB, [])
    torch = _torch()
    torch.cuda.init()
    assert hooks.install([BIG, SMALL], 2 * PART_MIB - 512, []) == []
    assert tuple(torch.cuda.fractions.values()) == (0.25, 0.5)
    assert len(torch.cuda.calls) == 1
    hooks.remove()
    assert torch.cuda.fractions == {0: 1.0, 1: 1.0}


def test_pytorchs_limit_by_the_user_stays(packages: Any) -> None:
    """A fraction that the user has set, by call or by variable, is neither changed nor lifted."""
    packages(torch=TORCH)
    hooks.install([BIG, SMALL], PART_MIB, [])
    torch = _torch()
    torch.cuda.init()
    torch.cuda.fractions[1] = 0.01
    hooks.install([BIG, SMALL], 2 * PART_MIB - 512, [])
    assert torch.cuda.fractions == {0: 0.25, 1: 0.01}
    hooks.install([BIG, SMALL], PART_MIB, [TORCH_ALLOCATOR_TOO])
    assert torch.cuda.fractions == {0: 0.25, 1: 0.01}
    hooks.remove()
    assert torch.cuda.fractions[1] == 0.01


def test_after_the_release_nothing_is_capped(packages: Any) -> None:
    """What was to be done once a framework starts is not done after the release."""
    packages(torch=TORCH, tensorflow=TENSORFLOW)
    finders = [*sys.meta_path]
    hooks.install([BIG, SMALL], PART_MIB, [])
    torch, tensorflow = _torch(), _tensorflow()
    hooks.remove()
    torch.cuda.init()
    tensorflow.eager.context().ensure_initialized()
    assert torch.cuda.fractions == {}
    assert tensorflow.config.limits == {}
    assert [*sys.meta_path] == finders


class Importer:
    """A finder as other packages have them: it changes what all the others find."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch":
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(name, path, target) for finder in others)
        return next(filter(None, specs), None)


@pytest.mark.parametrize("is_first", [True, False], ids=["before ours", "behind ours"])
def test_beside_an_importer_like_ours(
    packages: Any, monkeypatch: pytest.MonkeyPatch, *, is_first: bool
) -> None:
    """Two finders that each ask all others do not go round in circles, and PyTorch is capped."""
    packages(torch=TORCH)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    hooks.install([BIG, SMALL], PART_MIB, [])
    sys.meta_path.insert(0 if is_first else 1, Importer())
    torch = _torch()
    torch.cuda.init()
    assert tuple(torch.cuda.fractions.values()) == ROOMS


def test_an_import_while_the_cap_goes(packages: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another thread imports just as a part is let go of is found all the same."""
    packages(cupy="ours = True")
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    hooks.install([BIG], PART_MIB, [])
    meanwhile = SimpleNamespace(find_spec=lambda *_: hooks.remove())
    sys.meta_path.insert(sys.meta_path.index(PathFinder), meanwhile)
    assert import_module("cupy").ours


def test_a_search_without_an_import(packages: Any) -> None:
    """Who only looks for PyTorch imports nothing, and can do with the answer what is usual."""
    packages(torch="raise OSError('imported')")
    hooks.install([BIG], PART_MIB, [])
    spec = find_spec("torch")
    assert spec is not None
    assert spec.loader is not None
    assert spec.loader.is_package("torch") is False  # type: ignore[attr-defined]
    assert deepcopy(spec).origin == spec.origin


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (TORCH.replace("_lazy_call", "_later"), "AttributeError"),
        (TORCH.replace("broken = False", "broken = True"), "TypeError: moved elsewhere"),
        ("class cuda: init = staticmethod(lambda: None)", "AttributeError"),
    ],
    ids=["no list of calls", "no such call", "nothing as it was"],
)
def test_a_framework_that_changed_is_said(packages: Any, text: str, reason: str) -> None:
    """Where PyTorch's own parts are others the import and CUDA's start go on, with a warning."""
    packages(torch=text)
    hooks.install([BIG, SMALL], PART_MIB, [])
    with pytest.warns(UserWarning, match=f"Nothing keeps PyTorch within the part here.*{reason}"):
        _torch().cuda.init()


def test_a_framework_that_changed_is_said_at_once(packages: Any) -> None:
    """Where PyTorch is imported already, the reservation itself says that nothing caps it."""
    packages(torch="class cuda: pass")
    _torch()
    (said,) = hooks.install([BIG], PART_MIB, [])
    assert said.startswith("Nothing keeps PyTorch within the part here (AttributeError: ")


def test_a_spec_can_be_copied(packages: Any) -> None:
    """What looks at a framework's spec without an import can copy it, as its own one."""
    packages(torch=TORCH)
    hooks.install([BIG], PART_MIB, [])
    loader = find_spec("torch").loader  # type: ignore[union-attr]
    assert copy(loader).get_filename("torch") == loader.get_filename("torch")  # type: ignore[union-attr]


def test_an_import_that_fails_fails_as_ever(packages: Any) -> None:
    """An error of the framework's own import reaches the user as it is, and the next one works."""
    packages(torch="raise OSError('libcudnn')")
    hooks.install([BIG], PART_MIB, [])
    with pytest.raises(OSError, match="libcudnn"):
        _torch()
    packages(torch=TORCH.replace("2.9.1", "2.9.10"))
    _torch().cuda.init()
    assert _torch().cuda.fractions[0] == ROOMS[0]


def test_tensorflow_is_capped_when_it_starts(packages: Any) -> None:
    """TensorFlow gets a limit in MB for each device as the first thing when it starts."""
    packages(tensorflow=TENSORFLOW)
    hooks.install([BIG, SMALL], PART_MIB, [])
    tensorflow = _tensorflow()
    context = tensorflow.eager.context()
    assert not tensorflow.config.is_listed
    tensorflow.config.limits["GPU:1"] = [77]  # the user's own
    context.ensure_initialized()
    assert context.limits == {"GPU:0": [10_240], "GPU:1": [77]}
    assert "ensure_initialized" not in vars(context)
    assert hooks.install([BIG, SMALL], PART_MIB, []) == []


def test_tensorflow_that_runs_is_said(packages: Any) -> None:
    """A TensorFlow that runs already keeps its limit, and that is said."""
    packages(tensorflow=TENSORFLOW)
    _tensorflow().eager.context().ensure_initialized()
    (said,) = hooks.install([BIG], PART_MIB, [])
    assert said.startswith("TensorFlow runs already and keeps the limit that it started with")


@pytest.mark.process
def test_cupy_is_capped_anew_in_place(machine: Machine, tmp_path: Path) -> None:
    """Once CUDA runs CuPy's pool gets the new limit; one that the user has set stays."""
    (tmp_path / "cupy.py").write_text(
        "from types import SimpleNamespace\n"
        "limits, at = {0: 0, 1: 5}, []\n"
        "class Device:\n"
        "    def __init__(self, number): self.number = number\n"
        "    def __enter__(self): at.append(self.number)\n"
        "    def __exit__(self, *_): at.pop()\n"
        "class pool:\n"
        "    get_limit = staticmethod(lambda: limits[at[-1]])\n"
        "    set_limit = staticmethod(lambda size: limits.update({at[-1]: size}))\n"
        "get_default_memory_pool = lambda: pool\n"
        "runtime = SimpleNamespace(getDeviceCount=lambda: 2)\n"
        "cuda = SimpleNamespace(Device=Device, runtime=runtime)\n"
    )
    with machine.child() as child:
        child.run(f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import cupy, ctypes")
        child.run("import reserve_gpu; reserve_gpu.reserve(memory='3GB')")
        assert child.run("list(cupy.limits.values())").value == [0, 5]
        child.run("ctypes.CDLL('libcuda.so.1').cuInit(0)")
        child.run("reserve_gpu.reserve(memory='2GB')")
        assert child.run("list(cupy.limits.values())").value == [int(2e9) - 512 * MIB, 5]
        child.run("reserve_gpu.release()")
        assert child.run("list(cupy.limits.values())").value == [0, 5]


def test_jax_that_runs_is_said(monkeypatch: pytest.MonkeyPatch, packages: Any) -> None:
    """JAX on a GPU keeps the limit that it started with, and that is said once for each size."""
    bridge = SimpleNamespace(_backends={"cpu": object()})
    monkeypatch.setitem(sys.modules, "jax._src.xla_bridge", bridge)
    assert hooks.install([BIG], PART_MIB, []) == []
    bridge._backends["cuda"] = object()
    assert hooks.install([BIG], PART_MIB, []) == []
    assert [s.split()[0] for s in hooks.install([BIG], PART_MIB + 1, [])] == ["JAX"]
    assert hooks.install([BIG], PART_MIB + 2, [XLA_FRACTION_TOO]) == []


# -- the frameworks themselves ---------------------------------------------------------------------

READ_TORCH = """
import os, reserve_gpu
reserve_gpu.reserve(memory='3GB')
import torch
calls = len(torch.cuda._queued_calls)
torch.cuda._queued_calls[-1][0]()
[torch._C._accelerator_getAllocatorSettings(), os.environ['PYTORCH_CUDA_ALLOC_CONF'],
 torch.cuda.is_initialized(), float(torch.ones(3).sum())]
"""


@pytest.mark.full
@pytest.mark.process
def test_real_pytorch(machine: Machine) -> None:
    """PyTorch itself takes the variable as it was set, and the call for CUDA's start."""
    torch = pytest.importorskip("torch", reason="needs the extra `frameworks`")
    assert caps.knows_fraction(torch.__version__)
    with machine.child() as child:
        settings, value, is_started, total = child.run(READ_TORCH).value
        assert settings == value
        assert value.startswith("per_process_memory_fraction:0.")
        assert not is_started
        assert total == 3.0


READ_JAX = """
import reserve_gpu
reserve_gpu.reserve(memory='3GB')
from jaxlib import xla_client
xla_client.generate_pjrt_gpu_plugin_options()['memory_fraction']
"""


@pytest.mark.full
@pytest.mark.process
def test_real_jax(machine: Machine) -> None:
    """JAX itself reads the fraction from the variable as it was set, and raises for two names."""
    pytest.importorskip("jaxlib", reason="needs the extra `frameworks`")
    with machine.child(XLA_CLIENT_MEM_FRACTION="0.25") as child:
        assert child.run(READ_JAX).value == 0.25
    with machine.child() as child:
        assert 0.5 < child.run(READ_JAX).value < 0.6
        both = "import os; os.environ['XLA_CLIENT_MEM_FRACTION'] = '0.25'\n"
        both += READ_JAX.strip().splitlines()[-1]
        assert "specified together" in child.run(both).text


READ_TENSORFLOW = """
import os, sys, reserve_gpu
reserve_gpu.reserve(memory='3GB')
import tensorflow as tf
context = sys.modules['tensorflow.python.eager.context'].context()
before = context._context_handle is None
# A build without CUDA has no GPU, so it is given the name of one.
context._initialize_physical_devices()
gpu = tf.config.PhysicalDevice('/physical_device:GPU:0', 'GPU')
context._physical_devices.append(gpu)
context._visible_device_list.append(gpu)
context._memory_growth_map[gpu] = None
context._physical_device_to_index[gpu] = len(context._physical_devices) - 1
total = float(tf.reduce_sum(tf.constant([1.0, 2.0])))
virtual = context.config.gpu_options.experimental.virtual_devices
[before, total, [list(each.memory_limit_mb) for each in virtual]]
"""


@pytest.mark.full
@pytest.mark.process
def test_real_tensorflow(machine: Machine) -> None:
    """TensorFlow itself starts with the limit, as its first operation starts it."""
    pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
    with machine.child(TF_CPP_MIN_LOG_LEVEL="3") as child:
        answer = child.run(READ_TENSORFLOW)
        assert answer.value == [True, 3.0, [[2349]]], answer.text


# -- processes below -------------------------------------------------------------------------------

BELOW = """
import os, sys, reserve_gpu
from reserve_gpu.reservation import environment
os.environ.pop("CUDA_VISIBLE_DEVICES")  # or nothing but the GPU of the part could be had
before = environment.read(environment.CAPS)
held = reserve_gpu.reserve(1, memory=None if sys.argv[1] == "whole" else sys.argv[1])
print({n: v for n, v in environment.read(environment.CAPS).items() if v and "XLA" not in n})
held.release()
assert environment.read(environment.CAPS) == before
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("memory", "limit"), [("whole", None), ("1GiB", "536870912"), ("4GiB", "3758096384")]
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
        *command, PYTORCH_CUDA_ALLOC_CONF="backend:native",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "set already" not in done.stderr
    expected = {CUPY_LIMIT: limit, TF_GROWTH: "true"} if limit else {}
    said = ast.literal_eval(done.stdout.splitlines()[-1])
    words = said.pop(TORCH_ALLOCATOR).split(",")
    assert said == expected
    assert words[0] == "backend:native"
    assert len(words) <= (2 if limit else 1)
