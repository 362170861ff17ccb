"""Sizes of memory and durations, as people type them.

Most requests give neither: loaded when one is given.
"""

from __future__ import annotations

import math
import re

from reserve_gpu.errors import RequestError
from reserve_gpu.text import shown

_DURATION = r"([0-9]{1,12}(?:\.[0-9]{1,12})?)\s*([smhd]?)"
_LONGEST_S = 1e10  # three centuries
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_SIZE = r"([0-9]{1,12}(?:\.[0-9]{1,12})?)\s*([kmgt]?)(i?b)?"
_BYTES = {"k": (10**3, 2**10), "m": (10**6, 2**20), "g": (10**9, 2**30), "t": (10**12, 2**40)}


def parse_size(text: str | float) -> float:
    """A size of memory in MiB: `16GB`, `16GiB`, `16000` (MiB). Raises RequestError."""
    if isinstance(text, float) and text.is_integer():
        text = int(text)
    match = re.fullmatch(_SIZE, str(text).strip(), re.IGNORECASE | re.ASCII)
    if not match or (match[3] and not match[2]):
        raise RequestError(f"{shown(str(text))!r} is no size. Give 16GB, 16GiB or 16000 (MiB).")
    number, prefix, unit = float(match[1]), match[2].lower(), (match[3] or "").lower()
    return number * _BYTES[prefix][unit == "ib"] / 2**20 if prefix else number


def parse_duration(text: object) -> float:
    """A time in seconds: `90`, `90s`, `10m`, `2h`, True for ever. Raises RequestError."""
    if text is True:
        return math.inf
    if isinstance(text, (int, float)) and not isinstance(text, bool) and text >= 0:
        return float(min(text, _LONGEST_S))
    match = re.fullmatch(_DURATION, str(text).strip(), re.IGNORECASE | re.ASCII)
    if not match:
        text = shown(str(text))
        hint = f" To wait for GPUs by name: {text} --wait." if "," in text else ""
        raise RequestError(f"{text!r} is no duration. Give 90, 90s, 10m or 2h.{hint}")
    return float(match[1]) * _SECONDS[match[2].lower()]
