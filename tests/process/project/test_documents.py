"""Scripts and notebooks of the documents that need another process."""

from __future__ import annotations

import os
import re
import subprocess
from typing import TYPE_CHECKING

import pytest

import reserve_gpu
from tests import driver
from tests.support.documents import find_block

if TYPE_CHECKING:
    from tests.support.here import Here
    from tests.support.machine import Machine


# An EGL library of a machine with two GPUs, in another order than CUDA's, and a software renderer.
# Its numbers are CUDA's only in a process without CUDA_VISIBLE_DEVICES.
EGL = r"""
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
static unsigned list_devices(int most, void **devices, int *count) {
    for (*count = 0; *count < 3 && *count < most; ++*count) devices[*count] = (void *)(*count + 1L);
    return 1;
}
static unsigned read_attribute(void *device, int attribute, intptr_t *value) {
    if (attribute != 0x323A || (intptr_t)device > 2) return 0;
    *value = getenv("CUDA_VISIBLE_DEVICES") ? 0 : 2 - (intptr_t)device;
    return 1;
}
void *eglGetProcAddress(const char *name) {
    return !strcmp(name, "eglQueryDevicesEXT") ? (void *)list_devices : (void *)read_attribute;
}
"""


def test_script_for_egl(here: Here) -> None:
    """The script for programs that render prints the GPU of each EGL device."""
    (here.folder / "egl.c").write_text(EGL)
    command = [*driver.compiler(), "-shared", "-fPIC", "-o", "libEGL.so.1", "egl.c"]
    subprocess.run(command, cwd=here.folder, check=True)
    libraries = f"{here.folder}:{os.environ['LD_LIBRARY_PATH']}"
    reserve_gpu.reserve("1")
    script = find_block("EGL_CUDA_DEVICE_NV")
    done = here.command("sh", "-c", script, LD_LIBRARY_PATH=libraries)
    assert done.stdout == "EGL 0: GPU1\nEGL 1: GPU0\nEGL 2: no CUDA device\n", done.stderr


@pytest.mark.needs("frameworks")
def test_first_notebook(machine: Machine) -> None:
    """The first notebook of README.md runs, here on the CPU."""
    notebook = find_block("%reserve_gpu\nimport torch\n")
    assert len(notebook.splitlines()) == 5
    done = machine.ipython(notebook.replace('"cuda"', '"cpu"'))
    assert done.returncode == 0, done
    assert "GPU0" in done.stdout
    assert re.search(r"^10\d\d\.\d+$", done.stdout, re.MULTILINE)  # a quarter of 4096 on average
