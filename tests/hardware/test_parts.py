"""Parts of a GPU."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tests.support.hardware.machine import CHECK, COMPUTE, CUDA, milliseconds, refusal, until
from tests.support.hardware.report import check

if TYPE_CHECKING:
    from tests.support.hardware.machine import Hardware
    from tests.support.hardware.report import Findings
    from tests.support.machine import Child

LIMITED = ("PyTorch", "TensorFlow", "JAX", "CuPy")
# The available memory, according to the refusal of a request for all of it.
ROOM = """
(row,) = [row for row in reserve_gpu.status().rows if row.device.index == {index}]
most_mib = row.device.memory_mib - (row.device.reserve_mib or 0)
try: reserve_gpu.reserve({index}, memory=f'{{most_mib}}MiB')
except reserve_gpu.NoFreeDeviceError as error: left = error.rows[0].promisable_mib
left
"""


@check(
    {
        "exact": "exactly the memory that is left next to a part can be reserved",
        "less": "use beyond a part reduces the memory that is left",
        "seen": "the status shows the memory that the holder of a part uses",
    },
    facts={
        "free": "free memory by CUDA and by NVML, while the holder of a part uses 1500 MiB",
        "took": "time until the memory of a part is available after kill -9",
    },
    limit_s=60,
)
def test_memory_left(hardware: Hardware, found: Findings) -> None:
    """Exactly the memory left next to a part can be reserved."""
    index = hardware.index
    with hardware.child() as holder, hardware.child() as other:
        assert not holder.reserve(f"{index}, memory='1000MiB'").error
        left = other.run(ROOM.format(index=index)).value
        more = other.reserve(f"{index}, memory='{left + 1}MiB'").error
        exact = other.reserve(f"{index}, memory='{left}MiB'").error
        is_exact = (more, exact) == ("NoFreeDeviceError", None)
        found.promise("exact", is_exact, f"{left:.0f} MiB; 1 MiB more: {more}")
        other.run("reserve_gpu.release()")
        assert not holder.run(f"{CUDA}start(); context(); take(1500)").error
        free = holder.run("free_mib()").value
        by_nvml = hardware.read("nvml.nvmlDeviceGetMemoryInfo(handle).free >> 20")
        found.fact("free", f"{free} MiB, {by_nvml} MiB")
        used = use_of(hardware, holder.pid)["memory_used_mib"]
        found.promise("seen", None if used is None else used >= 1500, f"{used} MiB")
        later = other.run(ROOM.format(index=index)).value
        found.promise("less", later <= left - 500, f"{left:.0f} MiB, then {later:.0f} MiB")
        holder.kill()
        took = until(lambda: not other.reserve(f"{index}, memory='{left}MiB'").error, 30)
        found.fact("took", milliseconds(took))


def use_of(hardware: Hardware, pid: int) -> dict[str, Any]:
    """Return the holder's entry in the status."""
    holders: list[dict[str, Any]] = hardware.status()[0]["holders"]
    return next((holder for holder in holders if holder["pid"] == pid), {})


@check(
    {
        "both": "two processes each get 10 GB of one GPU",
        "whole": "next to parts, the whole GPU is refused, and the holders' pids are named",
        "within": "PyTorch gets memory within its part",
        "beyond": "PyTorch gets no memory beyond its part",
        "shown": "the status shows the use of each part",
        "over": "the status shows that a holder exceeds its part",
    },
    limit_s=150,
)
def test_two_parts(hardware: Hardware, found: Findings) -> None:
    """Two processes share a GPU, and the status shows who exceeds a part."""
    with hardware.child() as one, hardware.child() as two:
        pair = (one, two)
        for child in pair:
            child.send("reserve_gpu.reserve(memory='10GB').environ['CUDA_VISIBLE_DEVICES']")
        answers = [child.answer() for child in pair]
        found.promise("both", not any(a.error for a in answers), [a.text for a in answers])
        done = hardware.ipython("%reserve_gpu")
        is_named = all(f"(pid {child.pid})" in done.stdout for child in pair)
        found.promise("whole", bool(done.returncode) and is_named, refusal(done.stdout))
        if hardware.is_stand_in or not hardware.has("torch"):
            for key in ("within", "beyond"):
                found.promise(key, None, "needs PyTorch")
            assert not any(child.run(f"{COMPUTE}\ntake(7500)").error for child in pair)
        else:
            for child in pair:
                child.send("import torch; kept = []; torch.cuda.init()")
            assert not any(child.answer().error for child in pair)
            take = "kept.append(torch.empty({}, dtype=torch.uint8, device='cuda'))"
            answers = [child.run(take.format(8 * 10**9)) for child in pair]
            found.promise("within", not any(a.error for a in answers), [a.text for a in answers])
            found.promise("beyond", *beyond(one, take))
        uses = [use_of(hardware, child.pid) for child in pair]
        used = [use.get("memory_used_mib") for use in uses]
        is_shown = all((mib or 0) > 7000 for mib in used) and not any(u["is_over"] for u in uses)
        found.promise("shown", None if None in used else is_shown, f"{used} MiB")
        assert not one.run(f"{CUDA}start(); context(); take(6000)").error
        over = [use_of(hardware, child.pid).get("is_over") for child in pair]
        found.promise("over", None if None in used else over == [True, False], over)


def beyond(child: Child, take: str) -> tuple[bool | None, str]:
    """Return whether PyTorch refuses memory beyond the part, and the details."""
    if not child.run("[name for name in os.environ if name.startswith('PYTORCH_')]").value:
        return None, "this version reads no variable, so users type a line of code"
    error = child.run(take.format(4 * 10**9)).error
    return error == "OutOfMemoryError", str(error)


@check(
    {name: f"within a part, {name} is limited by a variable or by code" for name in LIMITED},
    limit_s=150,
)
def test_caps(hardware: Hardware, found: Findings) -> None:
    """Within a part, the frameworks that read a variable get one that limits their memory."""
    done = hardware.ipython("%reserve_gpu --memory 2GB", CHECK)
    assert done.returncode == 0, done.stderr[-500:]
    rows = json.loads(done.stdout[done.stdout.index("{") :])["frameworks"]
    there = {row["name"]: row for row in rows if row["state"] != "not installed"}
    for name in LIMITED:
        row = there.get(name)
        limit = row and (row["cap"] or row["to_type"])
        is_limited = None if row is None else bool(limit)
        found.promise(name, is_limited, limit or ("not installed" if row is None else "no limit"))
