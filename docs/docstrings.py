"""A griffe extension that formats docstrings for docs/reference.md.

https://mkdocstrings.github.io/griffe/guide/users/extending/
"""

from __future__ import annotations

import re
from typing import Any

import griffe

PARAMETER = re.compile(r"(?:^|(?<=\. ))((?:\w+, )*\w+): (?=\S)", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Turn the descriptions of parameters and fields in docstrings into Markdown lists."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Replace each paragraph of `name: description` pairs by a list."""
        if obj.docstring:
            parts = obj.docstring.value.split("\n\n")
            obj.docstring.value = "\n\n".join(map(as_list, parts))


def as_list(paragraph: str) -> str:
    """Return a paragraph as a list if it starts with `name: description`, else unchanged."""
    if not PARAMETER.match(paragraph):
        return paragraph
    return PARAMETER.sub(lambda names: f"\n- **{names[1]}**: ", " ".join(paragraph.split())).strip()
