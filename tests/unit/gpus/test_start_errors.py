"""Why the driver does not start, and what helps: by what a process can see of it."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest

from reserve_gpu.gpus import start_errors
from reserve_gpu.gpus.start_errors import Surroundings, advice, is_without_driver

if TYPE_CHECKING:
    from pathlib import Path


BARE, LOADED = Surroundings(control_error=errno.ENOENT), Surroundings(is_loaded=True)
HIDDEN = LOADED._replace(control_error=errno.ENOENT)
CLOSED = LOADED._replace(control_error=errno.EACCES)
WSL = Surroundings(is_wsl=True)
WITHOUT_LIBRARY = BARE._replace(unloadable=())

# What surrounds the process, what initialisation answers, what has to be said, what must not be.
ADVICE: dict[str, tuple[Surroundings, int | None, list[str], list[str]]] = {
    "no module": (BARE, 9, ["not loaded", "administrator"], ["reboot", "hidden"]),
    "no module, in a sandbox": (BARE._replace(is_inside=True), 9, ["not loaded", "hidden"], []),
    "no file": (HIDDEN, 9, ["is loaded", "/dev/nvidiactl", "sandbox"], ["not loaded"]),
    "no file, 999": (HIDDEN, 999, ["/dev/nvidiactl", "sandbox", "nvidia-modprobe"], ["restart"]),
    "no file, 17": (HIDDEN, 17, ["/dev/nvidiactl", "sandbox"], []),
    "a file that is denied": (CLOSED, 9, ["Permission denied", "sandbox"], ["not loaded"]),
    "a file that is denied, 4": (CLOSED, 4, ["Permission denied", "administrator"], []),
    "a container that has lost its GPUs": (
        LOADED._replace(control_error=errno.EPERM), 999, ["not permitted", "daemon-reload"], [],
    ),
    "a loaded module that does not answer": (LOADED, 9, ["nvidia-smi"], ["not loaded"]),
    "an unknown error": (LOADED, 999, ["nvidia-smi", "daemon-reload"], []),
    "WSL without a GPU": (WSL._replace(control_error=errno.ENOENT), 9, ["/dev/dxg", "Windows"], []),
    "WSL": (WSL, 17, ["blocks"], ["/dev/dxg"]),
    "an updated driver": (LOADED, 18, ["keep running", "administrator"], ["Reboot"]),
    "an updated driver, from a sandbox": (
        HIDDEN, 18, ["keep running", "administrator"], ["sandbox"],
    ),
    "a hang": (HIDDEN, None, ["does not start"], ["sandbox"]),
    "no library": (WITHOUT_LIBRARY, 12, ["No NVIDIA driver found", "--gpus all"], []),
    "no library beside a module": (
        WITHOUT_LIBRARY._replace(is_loaded=True), 12, ["is loaded", "--gpus all"], ["Install the"],
    ),
    "CUDA without NVML": (
        WITHOUT_LIBRARY._replace(has_cuda=True), 12, ["compute,utility"], ["No NVIDIA driver"],
    ),
    "a Jetson": (
        WITHOUT_LIBRARY._replace(has_cuda=True, is_jetson=True), 12, ["JetPack"], ["No NVIDIA"],
    ),
    "a library that can't be loaded": (
        WITHOUT_LIBRARY._replace(unloadable=["/usr/lib/x.so: wrong ELF class\x1b"]), 12,
        ["/usr/lib/x.so: wrong ELF class"], ["No NVIDIA driver", "\x1b"],
    ),
    "macOS": (WITHOUT_LIBRARY._replace(is_linux=False), 12, ["Linux or WSL2"], ["docker"]),
}  # fmt: skip


@pytest.mark.parametrize(("around", "code", "said", "unsaid"), ADVICE.values(), ids=ADVICE.keys())
def test_advice(around: Surroundings, code: int | None, said: list[str], unsaid: list[str]) -> None:
    """The advice names the cause that can be seen, and what helps against it."""
    text = advice(code, around)
    assert all(words in text for words in said), text
    assert not any(words in text for words in unsaid), text
    assert "\n" not in text


@pytest.mark.parametrize("code", [None, 1, 4, 9, 12, 13, 17, 18, 555, 999])
@pytest.mark.parametrize("around", [BARE, LOADED, HIDDEN, CLOSED, WSL, WITHOUT_LIBRARY])
def test_no_user_is_told_to_reboot(around: Surroundings, code: int | None) -> None:
    """No advice tells an ordinary user to reboot, which would end the work of others."""
    text = advice(code, around)
    assert "reboot" not in text.replace("the administrator can reload the module or reboot", "")
    assert "Reboot" not in text


@pytest.mark.parametrize(
    ("around", "code", "expected"),
    [
        (WITHOUT_LIBRARY, 12, True),
        (BARE, 12, True),
        (BARE, 9, True),
        (BARE, 18, False),
        (WITHOUT_LIBRARY._replace(has_cuda=True), 12, False),
        (WITHOUT_LIBRARY._replace(is_jetson=True), 12, False),
        (WITHOUT_LIBRARY._replace(unloadable=["?"]), 12, False),
    ],
)
def test_no_driver_means_that_cuda_has_none(
    around: Surroundings, code: int, *, expected: bool
) -> None:
    """A driver without NVML is not an absent driver: CUDA could use any GPU."""
    assert is_without_driver(code, around) is expected


def test_libraries_that_belong_to_no_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stubs and compatibility libraries in LD_LIBRARY_PATH are not taken for a driver."""
    monkeypatch.setenv("LD_LIBRARY_PATH", "")
    if start_errors.read_surroundings().has_cuda:
        pytest.skip("there is an NVIDIA driver here")
    for folder, has_cuda in (("compat", False), ("lib64/stubs", False), ("lib64", True)):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "libcuda.so.1").touch()
        monkeypatch.setenv("LD_LIBRARY_PATH", f":{tmp_path / folder}")
        assert start_errors.read_surroundings().has_cuda is has_cuda
