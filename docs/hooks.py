"""Add the pages that stand outside of this folder to the site, and lay out docstrings.

https://www.mkdocs.org/user-guide/configuration/#hooks
"""

from __future__ import annotations

import os
import posixpath
import re
from typing import TYPE_CHECKING, Any

import griffe
from mkdocs.structure.files import File

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

# Files of the repository, and where the site has them. GitHub expects them where they are.
ELSEWHERE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "LICENSE": "LICENSE.txt",
    "ipython_config.py": "ipython_config.py",
    "tests/driver/README.md": "driver.md",
}
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")
PARAMETER = re.compile(r"(?:^|(?<=\. ))((?:\w+, )*\w+): (?=\S)", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the pages that stand elsewhere."""
    root = os.path.dirname(config.config_file_path)
    for path, name in ELSEWHERE.items():
        files.append(File.generated(config, name, abs_src_path=os.path.join(root, path)))


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Let links to files of the repository lead to pages of the site."""
    name = page.file.src_uri
    path = next((p for p, n in ELSEWHERE.items() if n == name), f"docs/{name}")

    def moved(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link[1]))
        return ELSEWHERE.get(target) or posixpath.relpath(target, "docs")

    return LINK.sub(moved, markdown)


class Docstrings(griffe.Extension):
    """Turn what a docstring says of each parameter or field into a list."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Start an item at each `name: meaning`."""
        if obj.docstring:
            parts = obj.docstring.value.split("\n\n")
            obj.docstring.value = "\n\n".join(map(as_list, parts))


def as_list(paragraph: str) -> str:
    """Return a paragraph, as a list if it begins with the meaning of a parameter."""
    if not PARAMETER.match(paragraph):
        return paragraph
    return PARAMETER.sub(lambda names: f"\n- **{names[1]}**: ", " ".join(paragraph.split())).strip()
