"""A chart of the GPU-hours of each day, as SVG inside a page: no script, nothing from elsewhere.

Its colours can be told from a white and from a black page. Idle hours are hatched and unknown ones
dotted, so it can be read without colours, too; each bar says its figures when you point at it.
"""

from __future__ import annotations

import math
from datetime import date, timedelta
from typing import TYPE_CHECKING, NamedTuple

from reserve_gpu.report.html import PIECES
from reserve_gpu.report.words import escape

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reserve_gpu.history.totals import Hours

WIDTH, HEIGHT = 760, 170  # of the bars, in pixels
LEFT, TOP, BOTTOM = 44, 24, 22  # around them
MOST_DAYS = 366
MOST_LABELLED = 16  # bars that have their figure above them
LABEL_PX = 62  # that a date takes
LEAST_GAP_PX, WIDEST_PX = 1, 48
STEPS = (1, 2, 5, 10)
WORDS = ("used", "idle", "not known")
# Of each piece, what is drawn over its colour.
PATTERNS = ("", "M-1,1 l2,-2 M0,6 l6,-6 M5,7 l2,-2", "M2,3 h2")
SVG = """\
<svg role="img" aria-labelledby="chart" viewBox="0 0 {width} {height}" \
style="display:block;width:100%;max-width:{width}px;margin:0.5em 0;\
font:12px system-ui,sans-serif" fill="currentColor">
<title id="chart">{title}</title>
<defs>{patterns}</defs>
<text x="0" y="12" font-weight="bold">{title}</text>
{parts}
</svg>"""
PATTERN = (
    '<pattern id="piece{number}" width="6" height="6" patternUnits="userSpaceOnUse">'
    '<rect width="6" height="6" fill="{colour}"/>'
    '<path d="{path}" stroke="#ffffff" stroke-opacity="0.6" fill="none"/></pattern>'
)


class _Bar(NamedTuple):
    """One day. pieces: its hours of each kind, from below."""

    day: str
    pieces: tuple[float, float, float]


def chart(days: Mapping[str, Hours]) -> str:
    """Return the chart of the days, also of those between them without hours; empty for none."""
    bars = _bars(days)
    highest = max((sum(bar.pieces) for bar in bars), default=0.0)
    if not highest:
        return ""
    top = _round_up(highest)
    patterns = "".join(
        PATTERN.format(number=number, colour=colour, path=path)
        for number, (colour, path) in enumerate(zip(PIECES, PATTERNS, strict=True))
    )
    parts = [_legend(bars), *_scale(top), *(_bar(bars, place, top) for place in range(len(bars)))]
    return SVG.format(
        width=LEFT + WIDTH,
        height=TOP + HEIGHT + BOTTOM,
        title="GPU-hours reserved a day",
        patterns=patterns,
        parts="\n".join(parts),
    )


def _bars(days: Mapping[str, Hours]) -> list[_Bar]:
    """Return a bar for each day from the first to the last one, up to a year."""
    known = {date.fromisoformat(day): hours for day, hours in days.items()}
    if not known:
        return []
    last, first = max(known), max(min(known), max(known) - timedelta(days=MOST_DAYS - 1))
    bars = []
    for number in range((last - first).days + 1):
        day = first + timedelta(days=number)
        hours = known.get(day)
        pieces = (hours.used, hours.idle, hours.unknown) if hours else (0.0, 0.0, 0.0)
        bars.append(_Bar(day.isoformat(), pieces))
    return bars


def _round_up(value: float) -> float:
    """Return the next round number, at which the scale ends: 1, 2, 5, 10, 20, ..."""
    unit = 10.0 ** math.floor(math.log10(value))
    ends = (step * unit for step in STEPS)
    return next((end for end in ends if end >= value), 10 * unit)


def _scale(top: float) -> list[str]:
    """Return the lines across at the ends and in the middle of the scale, with their figures."""
    lines = []
    for value in (0.0, top / 2, top):
        y = TOP + HEIGHT * (1 - value / top)
        lines.append(
            f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y:.1f}" y2="{y:.1f}" '
            'stroke="currentColor" stroke-opacity="0.25"/>'
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>'
        )
    return lines


def _bar(bars: Sequence[_Bar], place: int, top: float) -> str:
    """Return a bar, its figure where there is room, and its date where it is due."""
    bar, step = bars[place], WIDTH / len(bars)
    width = min(WIDEST_PX, max(step - max(LEAST_GAP_PX, step * 0.2), step / 2))
    x, y, whole = LEFT + place * step + (step - width) / 2, float(TOP + HEIGHT), sum(bar.pieces)
    told = ", ".join(
        f"{hours:.1f} {word}" for hours, word in zip(bar.pieces, WORDS, strict=True) if hours
    )
    made = f"<g><title>{bar.day}: {whole:.1f} GPU-hours{f': {told}' if told else ''}</title>"
    for number, hours in enumerate(bar.pieces):
        height = HEIGHT * hours / top
        y -= height
        if height:
            made += (
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
                f'fill="url(#piece{number})"/>'
            )
    middle = x + width / 2
    if whole and len(bars) <= MOST_LABELLED:
        made += f'<text x="{middle:.1f}" y="{y - 4:.1f}" text-anchor="middle">{whole:.1f}</text>'
    if place % math.ceil(LABEL_PX * len(bars) / WIDTH) == 0:
        text = bar.day if len(bars) > MOST_LABELLED else bar.day[5:]
        anchor, at = ("start", x) if len(bars) > MOST_LABELLED else ("middle", middle)
        made += f'<text x="{at:.1f}" y="{TOP + HEIGHT + 16}" text-anchor="{anchor}">{text}</text>'
    return f"{made}</g>"


def _legend(bars: Sequence[_Bar]) -> str:
    """Return the words of the kinds that there are, each beside its pattern."""
    made, x = "", float(LEFT + WIDTH)
    for number in reversed(range(len(WORDS))):
        if any(bar.pieces[number] for bar in bars):
            x -= 26 + 6.5 * len(WORDS[number])
            made += (
                f'<rect x="{x:.1f}" y="3" width="11" height="11" fill="url(#piece{number})"/>'
                f'<text x="{x + 16:.1f}" y="12">{escape(WORDS[number])}</text>'
            )
    return made
