"""What the documents show works: their Python runs, and their links lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import reserve_gpu
from tests import driver

if TYPE_CHECKING:
    from tests.support.here import Here
    from tests.support.machine import Machine

from tests.support.documents import blocks

ROOT = Path(__file__).parents[3]
README = ROOT / "README.md"
DOCUMENTS = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


# An EGL of a machine with two GPUs, whose order is not CUDA's, and a software renderer. It numbers
# as CUDA does only in a process without CUDA_VISIBLE_DEVICES.
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


def test_the_numbers_of_egl_are_printed(here: Here) -> None:
    """The script for programs that render prints the GPU of each EGL device."""
    (script,) = (block.code for block in blocks() if "EGL_CUDA_DEVICE_NV" in block.code)
    (here.folder / "egl.c").write_text(EGL)
    command = [*driver.compiler(), "-shared", "-fPIC", "-o", "libEGL.so.1", "egl.c"]
    subprocess.run(command, cwd=here.folder, check=True)
    libraries = f"{here.folder}:{os.environ['LD_LIBRARY_PATH']}"
    reserve_gpu.reserve("1")
    done = here.command("sh", "-c", script, LD_LIBRARY_PATH=libraries)
    assert done.stdout == "EGL 0: GPU1\nEGL 1: GPU0\nEGL 2: no CUDA device\n", done.stderr


@pytest.mark.needs("frameworks")
def test_first_notebook(machine: Machine) -> None:
    """The front page's first notebook runs to its end; here on the CPU, as no GPU can compute."""
    (notebook,) = (b.code for b in blocks() if b.code.startswith("%reserve_gpu\nimport torch\n"))
    assert len(notebook.splitlines()) == 5
    done = machine.ipython(notebook.replace('"cuda"', '"cpu"'))
    assert done.returncode == 0, done
    assert done.stdout.startswith("Reserving GPU0")
    assert re.search(r"^10\d\d\.\d+$", done.stdout, re.MULTILINE)  # a quarter of 4096 on average
