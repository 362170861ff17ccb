"""%reserve_gpu in real IPython shells, most of them in the test process."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.machine import ROOT

if TYPE_CHECKING:
    import subprocess

    from tests.support.machine import Machine

from tests.support.magic import without_container


def ipython(machine: Machine, *arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run IPython as a program, with nothing loaded."""
    done = machine.command(
        *(sys.executable, "-m", "IPython", "--no-banner", "--colors=NoColor", "--no-term-title"),
        *arguments,
        **extra,
    )
    done.stderr = without_container(done.stderr)
    return done


@pytest.mark.ipython
def test_example_configuration_gives_the_magic(machine: Machine) -> None:
    """With the repository's ipython_config.py in the profile, magic and settings are there."""
    machine.write("gpu\n memory 4096\n used 700")
    other = machine.folder / "other"
    profile = machine.home / ".ipython" / "profile_default"
    profile.mkdir(parents=True)
    shutil.copy(ROOT / "ipython_config.py", profile)
    with (profile / "ipython_config.py").open("a") as file:
        file.write("\nc.ReserveGPU.idle_memory = '800MiB'\n")
        file.write(f"c.ReserveGPU.lock_directory = {str(other)!r}\n")
    done = ipython(machine, "-c", "%reserve_gpu", RESERVE_GPU_LOCK_DIR="")
    assert done.stdout.startswith("Reserving GPU0: "), done.stderr
    assert (done.stderr, done.returncode) == ("", 0)
    assert [path.name for path in other.glob("GPU-*")]
    assert not machine.locks.exists()


# -- loading, unloading, and what stays untouched --------------------------------------------------


@pytest.mark.ipython
@pytest.mark.promise
def test_ext_gives_the_magic_and_a_failure_stops_ipython(machine: Machine) -> None:
    """After `ipython --ext`, a cell that gets no GPU ends `-c` with 1; nothing after it runs."""
    machine.use("busy")
    done = ipython(machine, "--ext=reserve_gpu", "-c", "%reserve_gpu\nprint('went on')")
    assert done.returncode == 1
    shown = (done.stdout + done.stderr).splitlines()
    assert shown[0] == "No free GPU: 2 busy.  2 x GeForce GTX 1050 Ti"
    assert shown[-4].startswith("GPU  state ")
    assert shown[-1] == "No free GPU: 2 busy."
    assert "went on" not in shown
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.promise
def test_loading_is_light(machine: Machine) -> None:
    """Loading the extension loads no more than it needs, and asks no driver; Tab's part waits."""
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
    fresh, has_asked, *has_completion = done.stdout.splitlines()
    assert "reserve_gpu.extension" in fresh.split(), done.stderr
    heavy = {"pynvml", "ctypes", "subprocess", "asyncio"}
    heavy |= {
        "reserve_gpu.ipython.magic",
        "reserve_gpu.model.devices",  # most shells never use them
    }  # most shells never use them
    assert not set(fresh.split()) & heavy
    assert (has_asked, has_completion) == ("False", ["False", "True"])
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


@pytest.mark.promise
def test_a_granted_request_loads_no_display(machine: Machine) -> None:
    """A kernel whose request is granted loads no module that displays a wait or a GPU table."""
    with machine.kernel() as kernel:
        assert "CUDA_VISIBLE_DEVICES" in kernel.run("%reserve_gpu").stdout
        loaded = kernel.run("import sys\nprint(*sys.modules)").stdout.split()
    assert "reserve_gpu.ipython.magic" in loaded
    assert not DISPLAY.intersection(loaded)
