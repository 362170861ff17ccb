"""Lay out docstrings on the page docs/reference.md.

https://mkdocstrings.github.io/griffe/guide/users/extending/
"""

from __future__ import annotations

import re
from typing import Any

import griffe

PARAMETER = re.compile(r"(?:^|(?<=\. ))((?:\w+, )*\w+): (?=\S)", re.MULTILINE)


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
