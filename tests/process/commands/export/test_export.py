"""What the status is given out as: coloured text, a page for browsers, metrics for Prometheus."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.here import Here


@pytest.mark.parametrize("form", ["json", "html", "prometheus"])
def test_they_are_utf_8(here: Here, form: str) -> None:
    """What programs read is UTF-8, whatever the locale of cron is."""
    here.write("gpu\n name Ω-GPU")
    command = (sys.executable, "-m", "reserve_gpu", "status", "--format", form)
    for encoding in ("latin-1", "utf-8"):
        text = here.command(*command, PYTHONIOENCODING=encoding, PYTHONUTF8="0").stdout
        assert ("Ω-GPU" if form != "json" else "\\u03a9-GPU") in text
