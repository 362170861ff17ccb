"""The encoding of formats for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.processes import US

if TYPE_CHECKING:
    from tests.support.here import Here


@pytest.mark.parametrize("form", ["json", "html", "prometheus"])
def test_formats_for_programs_are_utf_8_in_any_locale(here: Here, form: str) -> None:
    here.write("gpu\n name Ω-GPU")
    for encoding in ("latin-1", "utf-8"):
        settings = {"PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"}
        text = here.command(*US, "status", "--format", form, **settings).stdout
        assert ("Ω-GPU" if form != "json" else "\\u03a9-GPU") in text
