"""Where nothing is free: could the request be met at all?

Pure functions of plain values: no driver, no files, no environment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reserve_gpu.text import gib, shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reserve_gpu.device import Refusal, Request


def impossible(refusals: Sequence[Refusal], wanted: Request) -> str | None:
    """Why no state of this machine could satisfy the request, None if one could.

    refusals: of all devices that this process may use and the request does not exclude.
    """
    fit = [r.label for r in refusals if r.state != "unfit"]
    parts = [label for label in fit if ":" in label]  # MIG instances
    if not refusals or max(len(parts), len(fit) - len(parts)) >= wanted.count:
        return None
    what = "1 GPU" if wanted.count == 1 else f"{wanted.count} GPUs"
    what += f" of {gib(wanted.min_memory_mib)} or more" if wanted.min_memory_mib else ""
    what += f" with {shown(wanted.model)!r} in the name" if wanted.model else ""
    why = [f"{r.label} {r.reason}" for r in refusals if r.state == "unfit"]
    if 0 < len(parts) < len(fit):
        why.append("CUDA gives a process whole GPUs or MIG instances, not both")
    will_do = f"Of {len(refusals)}, {', '.join(fit) or 'none'} will do"
    return f"{what} can't be had here. {will_do}{': ' if why else ''}{'; '.join(why)}."


def may_come_free(refusals: Sequence[Refusal], wanted: Request) -> bool:
    """Whether it makes sense to wait."""
    return bool(refusals) and impossible(refusals, wanted) is None
