"""What is printed of what was done, and how single values are written."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reserve_gpu.device import Device, Refusal

_UNPRINTABLE = "\N{REPLACEMENT CHARACTER}"


def shown(text: str, limit: int = 80) -> str:
    """Text that somebody else wrote, made fit to print: one line, bounded, nothing unprintable."""
    clean = "".join(c if c.isprintable() else _UNPRINTABLE for c in text[: limit + 1])
    return clean if len(clean) <= limit else clean[: limit - 1] + "\N{HORIZONTAL ELLIPSIS}"


def gib(mib: float) -> str:
    """Memory for people: `10.2 GiB`, below one `512 MiB`."""
    return f"{mib / 1024:.1f} GiB" if mib >= 1024 else f"{mib:.0f} MiB"


def duration(seconds: float) -> str:
    """`45 s`, `12 min`, `2 h 10 min`, `2 h`, `3 d 4 h`."""
    minutes, hours, days = int(seconds // 60), int(seconds // 3600), int(seconds // 86400)
    if days:
        return f"{days} d {hours % 24} h".removesuffix(" 0 h")
    if hours:
        return f"{hours} h {minutes % 60} min".removesuffix(" 0 min")
    return f"{minutes} min" if minutes else f"{int(seconds)} s"


def listed(words: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def labels(devices: Sequence[Device | Refusal]) -> str:
    """`GPU1`, `GPU1 and GPU3`, `GPU0, GPU1 and GPU3`."""
    return listed([device.label for device in devices])


def reserved(devices: Sequence[Device], environ: Mapping[str, str]) -> str:
    """What a reservation prints: the devices, then the variables."""
    lines = [f"Reserving {device.label}: {_described(device)}" for device in devices]
    return "\n".join([*lines, *variables(environ)])


def variables(environ: Mapping[str, str | None]) -> list[str]:
    """One line for each variable: `CUDA_VISIBLE_DEVICES = '2'`."""
    return [f"{name} = {value!r}" for name, value in sorted(environ.items()) if value is not None]


def released(devices: Sequence[Device], environ: Mapping[str, str | None], *, started: bool) -> str:
    """What a release prints. started: CUDA runs in this process, so device memory stays in use."""
    lines = [f"Released {labels(devices)}." if devices else "This kernel holds no GPU."]
    if started and devices:
        lines.append("CUDA still runs in this kernel: restart it to free the GPU's memory as well.")
    lines += [
        f"{name} is not set" if value is None else f"{name} = {value!r}"
        for name, value in sorted(environ.items())
    ]
    return "\n".join(lines)


def _described(device: Device) -> str:
    """`0000:03:00.0 16x GeForce GTX 1050 Ti (VBIOS 86.07.22.00.A8)`, less what is not reported."""
    parts = [
        device.bus_id,
        device.link_width and f"{device.link_width}x",
        device.name,
        device.vbios and f"(VBIOS {device.vbios})",
    ]
    return " ".join(part for part in parts if part)
