"""The texts about GPUs' names, drivers that do not start, bindings, and CUDA's variables."""

from __future__ import annotations

import errno
import os
import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

import reserve_gpu
from reserve_gpu.gpus import import_errors, names
from reserve_gpu.gpus.bindings import DeviceError
from reserve_gpu.gpus.nvml import Nvml
from reserve_gpu.gpus.start_errors import Surroundings, advice
from reserve_gpu.model import errors
from reserve_gpu.model.devices import Device, Fault
from reserve_gpu.model.errors import RequestError
from tests.support.magic import FOUR_GPUS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from syrupy.assertion import SnapshotAssertion

    from tests.support.here import Here

# -- drivers that do not start ---------------------------------------------------------------------

NO_MODULE, LOADED = Surroundings(control_error=errno.ENOENT), Surroundings(is_loaded=True)
HIDDEN = LOADED._replace(control_error=errno.ENOENT)
WSL = Surroundings(is_wsl=True)
NO_LIBRARY = NO_MODULE._replace(unloadable=())

# The machine as the process sees it, and NVML's error code, None if NVML does not answer.
START_ERRORS: dict[str, tuple[Surroundings, int | None]] = {
    "no module in a container": (NO_MODULE._replace(is_inside=True), 9),
    "device file hidden": (HIDDEN, 9),
    "container lost its GPUs": (LOADED._replace(control_error=errno.EPERM), 999),
    "loaded module does not answer": (LOADED, 9),
    "unknown error": (LOADED, 999),
    "no permission": (LOADED, 4),
    "WSL without a GPU": (WSL._replace(control_error=errno.ENOENT), 9),
    "WSL blocked": (WSL, 17),
    "driver updated": (LOADED, 18),
    "driver too old": (HIDDEN, 13),
    "driver hangs": (HIDDEN, None),
    "library reports that it is missing": (NO_MODULE, 12),
    "no library although the module is loaded": (NO_LIBRARY._replace(is_loaded=True), 12),
    "CUDA without NVML": (NO_LIBRARY._replace(has_cuda=True), 12),
    "Jetson": (NO_LIBRARY._replace(has_cuda=True, is_jetson=True), 12),
    "library can't be loaded": (
        NO_LIBRARY._replace(unloadable=["/usr/lib/x.so: wrong ELF class\x1b"]), 12,
    ),
    "macOS": (NO_LIBRARY._replace(is_linux=False), 12),
}  # fmt: skip


@pytest.mark.parametrize(("around", "code"), START_ERRORS.values(), ids=START_ERRORS)
def test_start_error(snapshot: SnapshotAssertion, around: Surroundings, code: int | None) -> None:
    """The advice is one line, and never tells an ordinary user to reboot."""
    text = advice(code, around)
    assert "\n" not in text
    assert "reboot" not in text.lower().replace("administrator can reload the module or reboot", "")
    assert text == snapshot


# -- bindings that can't be imported ---------------------------------------------------------------

IMPORT_ERRORS: dict[str, BaseException] = {
    "without a text": ImportError(),
    "written for Python 2": SyntaxError("Missing parentheses in call to 'print'"),
}


@pytest.mark.parametrize("error", IMPORT_ERRORS.values(), ids=IMPORT_ERRORS)
def test_import_error(snapshot: SnapshotAssertion, error: BaseException) -> None:
    assert text_of(import_errors.not_imported(error)) == snapshot


@pytest.mark.parametrize(
    ("is_new", "python_path"),
    [
        pytest.param(True, True, id="on PYTHONPATH"),
        pytest.param(False, False, id="already imported"),
    ],
)
def test_shadowed_bindings(
    snapshot: SnapshotAssertion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    *, is_new: bool, python_path: bool,
) -> None:  # fmt: skip
    monkeypatch.setenv("PYTHONPATH", str(tmp_path) if python_path else "")
    monkeypatch.setitem(sys.modules, "pynvml", sys.modules.get("pynvml"))
    module = ModuleType("pynvml")
    module.__file__ = str(tmp_path / "pynvml.py")
    text = text_of(import_errors.not_official(module, is_new=is_new))
    assert text.replace(os.path.realpath(tmp_path), "FOLDER") == snapshot


def test_bindings_that_a_file_breaks(
    snapshot: SnapshotAssertion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken.py").write_text("raise ImportError('no module named x')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError) as caught:
        import_module("broken")
    text = str(import_errors.not_imported(caught.value))
    assert text.replace(os.path.realpath(tmp_path), "FOLDER") == snapshot


def text_of(error: Exception) -> str:
    """Return an error's text without the commands that depend on this Python."""
    install = errors.install_command("nvidia-ml-py")
    replace = errors.install_command("nvidia-ml-py", instead_of=import_errors.PACKAGES)
    return str(error).replace(replace, "REPLACE").replace(install, "INSTALL")


# -- names of GPUs ---------------------------------------------------------------------------------

A, B = Device(0, "GPU-aaaa1111"), Device(1, "GPU-aaaa2222")
C, D = Device(2, "MIG-cccc1111", instance=0), Device(2, "MIG-cccc2222", instance=3)
LOST, BROKEN = Fault(3, "GPU is lost"), Fault(2, "Unknown Error", 5)
UNKNOWN_NAMES: dict[str, tuple[str, Sequence[Device | Fault]]] = {
    "start of several UUIDs": ("GPU-aaaa", [A, B, C, D, LOST]),
    "GPU that is split, with a broken instance": ("2", [C, D, BROKEN]),
    "missing instance": ("2:4", [C, D, BROKEN]),
    "instance of a whole GPU": ("1:0", [A, B]),
    "UUID that might be a broken GPU's": ("GPU-ffff", [A, B, C, D, LOST]),
    "index, one GPU": ("9", [A]),
}


@pytest.mark.parametrize(("name", "devices"), UNKNOWN_NAMES.values(), ids=UNKNOWN_NAMES)
def test_unknown_name(
    snapshot: SnapshotAssertion, name: str, devices: Sequence[Device | Fault]
) -> None:
    with pytest.raises(RequestError) as caught:
        names.pick(name, devices)
    assert str(caught.value) == snapshot


def test_refused_names(snapshot: SnapshotAssertion) -> None:
    """Text that is not a name, duplicate names, and mixtures with MIG instances are refused."""
    texts = []
    for refused in (
        lambda: names.parse("TPU-1\n"),
        lambda: names.require_distinct([A, B, A]),
        lambda: names.require_one_kind([B, C]),
    ):
        with pytest.raises(RequestError) as caught:
            refused()
        texts.append(str(caught.value))
    assert texts == snapshot


# -- variables that were set before ----------------------------------------------------------------

INHERITED = [
    ("3,1", "", "cuda:1"), ("3,1", "", "cuda:2"), ("3,1", "PCI_BUS_ID", "0"),
    ("1", "", None), ("1", "FASTEST_FIRST", None),
]  # fmt: skip


def test_inherited_limit(snapshot: SnapshotAssertion, here: Here) -> None:
    """A name is ambiguous, a GPU is not visible, or the variable's numbers are ambiguous."""
    here.write(FOUR_GPUS)
    texts = []
    for visible, order, name in INHERITED:
        os.environ.update(CUDA_VISIBLE_DEVICES=visible, CUDA_DEVICE_ORDER=order)
        with pytest.raises(RequestError) as caught:
            reserve_gpu.reserve(name)
        texts.append(str(caught.value))
    assert texts == snapshot


# -- faults that the driver reports ----------------------------------------------------------------

UUID = "GPU-12345678-0000-4000-8000-000000000000"
FAULTS = {
    "hangs": "gpu\ndelay nvmlDeviceGetUUID 0 1000",
    "memory can't be repaired": "gpu\n remap-failed 1",
    "needs a reset": "gpu\n recovery 1",
    "same UUID": f"gpu\n uuid {UUID}\ngpu\n uuid {UUID}",
}


@pytest.mark.parametrize("scenario", FAULTS.values(), ids=FAULTS)
def test_fault(snapshot: SnapshotAssertion, here: Here, scenario: str) -> None:
    here.write(scenario)
    with Nvml(0.1) as nvml:
        reasons = [each.reason for each in nvml.walk() if isinstance(each, Fault)]
    assert reasons == snapshot


@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param("count 0\ngpu", id="no GPU"),
        pytest.param("gpu\nfail nvmlDeviceGetCount_v2 * 999", id="no count"),
        pytest.param("gpu\ndelay nvmlInitWithFlags * 1000", id="hangs"),
    ],
)
def test_driver_error(snapshot: SnapshotAssertion, here: Here, scenario: str) -> None:
    here.write(scenario)
    with Nvml(0.1) as nvml, pytest.raises(errors.DriverError) as caught:
        nvml.count()
    assert str(caught.value) == snapshot


def test_a_device_that_is_gone(snapshot: SnapshotAssertion, here: Here) -> None:
    device = Device(5, UUID)
    here.write("gpu")
    with Nvml() as nvml, pytest.raises(DeviceError) as caught:
        nvml.usage(device)
    assert str(caught.value) == snapshot
