"""`reserve-gpu setup` reports what the real IPython and a real kernel do with a configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.profiles import Home

pytestmark = pytest.mark.full
KERNEL_FILE = "ipython_kernel_config.py"
INSTEAD = "Use c.InteractiveShellApp.extensions there"


@pytest.mark.parametrize(
    ("name", "section"),
    [(KERNEL_FILE, "IPKernelApp"), ("ipython_config.py", "TerminalIPythonApp")],
)
def test_an_append_to_another_section(name: str, section: str, home: Home) -> None:
    """With such an append, the lines would make traitlets double a list, so they are refused."""
    file = home.write(f"get_config().{section}.extensions.append('autoreload')\n".encode(), name)
    before = home.configuration()
    line = home.refused()
    assert line.startswith(f"The lines were not added to {home.config}. ")
    assert line.endswith(f"because c.{section}.extensions in {file} also appends. {INSTEAD}.")
    assert home.configuration() == before
