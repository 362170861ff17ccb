"""How single values are written: memory, durations, lists of words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

REASON_LIMIT = 300  # characters of an error of the driver's or the system's


class Labelled(Protocol):
    """What people have a name for: a device, or a value that is about one."""

    @property
    def label(self) -> str:
        """`GPU2`, or `GPU1:0` for a MIG instance."""


def gib(mib: float) -> str:
    """Memory for people: `10.2 GiB`, and `512 MiB` below one GiB."""
    return f"{mib / 1024:.1f} GiB" if mib >= 1024 else f"{mib:.0f} MiB"


def duration(seconds: float) -> str:
    """`45 s`, `12 min`, `2 h 10 min`, `2 h`, `3 d 4 h`."""
    minutes, hours, days = int(seconds // 60), int(seconds // 3600), int(seconds // 86400)
    if days:
        return f"{days} d {hours % 24} h".removesuffix(" 0 h")
    if hours:
        return f"{hours} h {minutes % 60} min".removesuffix(" 0 min")
    return f"{minutes} min" if minutes else f"{int(seconds)} s"


def time_limit(seconds: float) -> str:
    """A duration that somebody asked for: as above, and `0.2 s` where it is below a second."""
    return duration(seconds) if seconds >= 1 else f"{seconds:.2g} s"


def listed(words: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def labels(devices: Sequence[Labelled]) -> str:
    """`GPU1`, `GPU1 and GPU3`, `GPU0, GPU1 and GPU3`."""
    return listed([device.label for device in devices])


def escape(text: str) -> str:
    """The text as HTML shows it."""
    import html  # which loads the names of 2,000 letters; most sessions show no HTML

    return html.escape(text)
