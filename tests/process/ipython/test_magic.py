"""%reserve_gpu in IPython as a program, and the modules that it loads."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.machine import ROOT
from tests.support.magic import without_container_warning

if TYPE_CHECKING:
    import subprocess

    from tests.support.machine import Machine


def run_ipython(
    machine: Machine, *arguments: str, **extra: str
) -> subprocess.CompletedProcess[str]:
    """Run IPython as a program, without the extension."""
    done = machine.command(
        *(sys.executable, "-m", "IPython", "--no-banner", "--colors=NoColor", "--no-term-title"),
        *arguments,
        **extra,
    )
    done.stderr = without_container_warning(done.stderr)
    return done


@pytest.mark.ipython
def test_example_configuration(machine: Machine) -> None:
    """With the repository's ipython_config.py in the profile, the magic and the settings work."""
    machine.write("gpu\n memory 4096\n used 700")
    other = machine.folder / "other"
    profile = machine.home / ".ipython" / "profile_default"
    profile.mkdir(parents=True)
    shutil.copy(ROOT / "ipython_config.py", profile)
    with (profile / "ipython_config.py").open("a") as file:
        file.write("\nc.ReserveGPU.idle_memory = '800MiB'\n")
        file.write(f"c.ReserveGPU.lock_directory = {str(other)!r}\n")
    done = run_ipython(machine, "-c", "%reserve_gpu", RESERVE_GPU_LOCK_DIR="")
    assert "GPU0" in done.stdout, done.stderr
    assert (done.stderr, done.returncode) == ("", 0)
    assert [path.name for path in other.glob("GPU-*")]
    assert not machine.locks.exists()


@pytest.mark.ipython
@pytest.mark.promise
def test_failed_request_ends_ipython(machine: Machine) -> None:
    """With `ipython --ext -c`, a cell without a GPU ends the program with exit code 1."""
    machine.use("busy")
    done = run_ipython(machine, "--ext=reserve_gpu", "-c", "%reserve_gpu\nprint('continued')")
    assert done.returncode == 1
    output = done.stdout + done.stderr
    assert "busy" in output
    assert "continued" not in output
    assert "Traceback" not in output


@pytest.mark.promise
def test_loading_the_extension_is_fast(machine: Machine) -> None:
    """Loading imports no slow module and calls no driver; completion is imported when needed."""
    done = machine.python(
        "import os, sys, IPython\n"
        "from IPython.core.interactiveshell import InteractiveShell\n"
        "shell = InteractiveShell.instance()\n"
        "shell.Completer.use_jedi = False\n"
        "before = set(sys.modules)\n"
        "shell.run_cell('%load_ext reserve_gpu')\n"
        "print(*set(sys.modules) - before)\n"
        "print(os.path.exists(os.environ['STAND_IN_LOG']))\n"
        "for text in ('pri', '%reserve_gpu '):\n"
        "    shell.complete('', text, len(text))\n"
        "    print('reserve_gpu.ipython.completion' in sys.modules)"
    )
    loaded, has_called, *has_completion = done.stdout.splitlines()
    assert "reserve_gpu.extension" in loaded.split(), done.stderr
    slow = {"pynvml", "ctypes", "subprocess", "asyncio"}
    slow |= {"reserve_gpu.ipython.magic", "reserve_gpu.model.devices"}  # not needed by most shells
    assert not set(loaded.split()) & slow
    assert (has_called, has_completion) == ("False", ["False", "True"])
    assert not machine.locks.exists()


DISPLAY = {
    "reserve_gpu.render.columns",
    "reserve_gpu.render.html",
    "reserve_gpu.render.layout",
    "reserve_gpu.render.pictures",
    "reserve_gpu.render.progress",
    "reserve_gpu.render.tables",
    "reserve_gpu.render.terminal",
    "reserve_gpu.system.nonblocking",
}


def test_successful_request_loads_no_display(machine: Machine) -> None:
    """A kernel that gets a GPU imports no module that displays a wait or the table of GPUs."""
    with machine.kernel() as kernel:
        assert "CUDA_VISIBLE_DEVICES" in kernel.run("%reserve_gpu").stdout
        loaded = kernel.run("import sys\nprint(*sys.modules)").stdout.split()
    assert "reserve_gpu.ipython.magic" in loaded
    assert not DISPLAY.intersection(loaded)
