"""install.sh, and the errors that a clone next to the notebook causes."""

from __future__ import annotations

import re

from tests.support.machine import ROOT


def test_readme_clones_into_a_folder_that_python_cannot_import() -> None:
    """The clone that README.md makes is never taken for the package."""
    readme = (ROOT / "README.md").read_text()
    (folder,) = re.findall(r"git clone \S+ (\S+) && cd \1", readme)
    assert not folder.isidentifier()
