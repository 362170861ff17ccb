"""What Tab offers behind %reserve_gpu, in real shells and kernels."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import IPython
import pytest

if TYPE_CHECKING:
    from tests.machine import Kernel, Machine

MIXED = """
gpu
  name NVIDIA GeForce RTX 2080 Ti
  memory 11264
  uuid GPU-aaaa1111-0000-0000-0000-000000000000
gpu
  name NVIDIA A100-SXM4-40GB
  memory 40960
  uuid GPU-bbbb2222-0000-0000-0000-000000000000
gpu
  name NVIDIA A100-SXM4-40GB
  mig on
  instance 0
  instance 5
"""
OPTIONS = [
    *("--count", "--min-memory", "--name", "--exclude", "--wait", "--share", "--note"),
    *("--optional", "--status", "--check", "--json", "--release", "--help"),
]
# Before 8.6 IPython adds to what is offered Python's own names; ours are there all the same.
IS_OLD = IPython.version_info < (8, 6)

ASK = """
import json, sys
from IPython.core.completer import provisionalcompleter
before = set(sys.modules)
shell = get_ipython()
answers = []
with provisionalcompleter():
    for line in json.loads({lines!r}):
        found = list(shell.Completer.completions(line, len(line)))
        answers.append([line[:each.start] + each.text for each in found])
print(json.dumps(answers))
"""


def offered(machine: Machine, *lines: str, before: str = "", **extra: str) -> list[list[str]]:
    """What each line may become, in a fresh shell."""
    done = machine.ipython(before, ASK.format(lines=json.dumps(lines)), **extra)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    found: list[list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


def ours(line: str, texts: list[str]) -> list[str]:
    return [line + text for text in texts]


@pytest.mark.parametrize("magic", ["%reserve_gpu", "reserve_gpu", "  %reserve_gpu"])
def test_options(machine: Machine, magic: str) -> None:
    """Tab offers all options, with the percent sign and without, and completes a begun one."""
    everything, begun = offered(machine, f"{magic} --", f"{magic} 0 --na")
    wanted = ours(f"{magic} ", OPTIONS)
    assert set(wanted) <= set(everything) if IS_OLD else wanted == everything
    assert begun == [f"{magic} 0 --name"]


CASES = [
    ("%reserve_gpu ", ["0", "1", "2:0", "2:5", *OPTIONS]),
    ("%reserve_gpu 2:", ["2:0", "2:5"]),
    ("%reserve_gpu 0,", ["0,1", "0,2:0", "0,2:5"]),
    ("%reserve_gpu gpu", ["gpu0", "gpu1", "gpu2:0", "gpu2:5"]),
    ("%reserve_gpu GPU-a", ["GPU-aaaa1111-0000-0000-0000-000000000000"]),
    ("%reserve_gpu -n ", ["1", "2", "3"]),
    ("%reserve_gpu --exclude ", ["0", "1", "2:0", "2:5"]),
    ("%reserve_gpu --name ", ['"GeForce RTX 2080 Ti"', "A100-SXM4-40GB"]),
    ("%reserve_gpu --name rtx", ['"RTX 2080 Ti"']),
    ("%reserve_gpu --name 'gef", ["'GeForce RTX 2080 Ti'"]),
    ("%reserve_gpu --min-memory ", ["4GiB", "11GiB", "40GiB"]),
    ("%reserve_gpu --min-memory 4", ["4GiB", "40GiB"]),
    ("%reserve_gpu --min-memory=1", ["--min-memory=11GiB"]),
    ("%reserve_gpu --wait 1", ["10m", "1h", "1d"]),
    ("%reserve_gpu --status ", ["--json"]),
    ("%reserve_gpu --check --", ["--json"]),
    ("x = 1\n%reserve_gpu --sh", ["--share"]),
]


@pytest.mark.skipif(
    IS_OLD, reason="IPython before 8.6 mixes Python's own names into what it offers"
)
def test_devices_and_values(machine: Machine) -> None:
    """Tab offers the devices of this machine by each of their names, and values that occur here."""
    machine.write(MIXED)
    found = offered(machine, *(line for line, _ in CASES))
    for (line, texts), lines in zip(CASES, found, strict=True):
        start = line[: max(line.rfind(" "), line.rfind("\n")) + 1]
        assert lines == ours(start, texts), line


@pytest.mark.skipif(not IS_OLD, reason="the way of IPython before 8.6")
def test_devices_in_an_old_shell(machine: Machine) -> None:
    """An old IPython offers devices and values too, beside Python's own names."""
    machine.write(MIXED)
    lines = ["%reserve_gpu ", "%reserve_gpu 0,", "%reserve_gpu --name 'gef"]
    some, more, name = offered(machine, *lines)
    assert {"%reserve_gpu 0", "%reserve_gpu 2:5"} <= set(some)
    assert "%reserve_gpu 0,2:0" in more
    assert "%reserve_gpu --name 'GeForce RTX 2080 Ti'" in name


@pytest.mark.parametrize(
    ("before", "line"),
    [
        ("", "reserve_gpu = --stat"),
        ("", "reserve_gpus --stat"),
        ("", "print('%reserve_gpu') --stat"),
        ("", "%reserve_gpu # --stat"),
        ("", "%reserve_gpu --status --stat"),
        ("import reserve_gpu", "reserve_gpu --stat"),
        ("%automagic off", "reserve_gpu --stat"),
        ("%unload_ext reserve_gpu", "%reserve_gpu --stat"),
    ],
)
def test_what_is_not_the_magic(machine: Machine, before: str, line: str) -> None:
    """No option is offered for Python that only looks like the magic, nor once that is unloaded."""
    (found,) = offered(machine, line, before=before)
    assert not any(text.endswith("--status") for text in found)


def test_loading_again_offers_nothing_twice(machine: Machine) -> None:
    """An extension that was loaded again offers everything once."""
    (found,) = offered(machine, "%reserve_gpu --stat", before="%reload_ext reserve_gpu")
    assert found.count("%reserve_gpu --status") == 1


def complete(kernel: Kernel, code: str) -> dict[str, Any]:
    reply: dict[str, Any] = kernel.client.complete(code, len(code), reply=True, timeout=30)
    return reply["content"]  # type: ignore[no-any-return]


def test_in_a_kernel(machine: Machine) -> None:
    """A kernel answers a front end's request to complete, and takes no lock and no GPU for it."""
    with machine.kernel() as kernel:
        for code in ("%reserve_gpu --stat", "x = 1\nreserve_gpu --stat"):
            content = complete(kernel, code)
            assert content["status"] == "ok"
            assert "--status" in content["matches"]
            assert (content["cursor_start"], content["cursor_end"]) == (len(code) - 6, len(code))
        assert {"0", "1"} <= set(complete(kernel, "%reserve_gpu ")["matches"])
    assert not machine.locks.exists()


@pytest.mark.parametrize("scenario", ["delay nvmlInitWithFlags", "delay nvmlDeviceGetMigMode"])
def test_a_driver_that_hangs(machine: Machine, scenario: str) -> None:
    """A driver that does not answer costs Tab a moment, once, and it offers what it knows."""
    machine.write(f"gpu\ngpu\n{scenario} * 100000")
    with machine.kernel() as kernel:
        start = time.monotonic()
        for _ in range(4):
            assert "--status" in complete(kernel, "%reserve_gpu ")["matches"]
        assert time.monotonic() - start < 4 * 2
        calls = [call for call in machine.calls() if call.startswith(scenario.split()[1])]
        assert len(calls) == 1


def test_without_a_driver(machine: Machine) -> None:
    """Where there is no driver Tab offers the options, and says nothing."""
    (found,) = offered(machine, "%reserve_gpu ", LD_LIBRARY_PATH="")
    assert {"%reserve_gpu --status", "%reserve_gpu --wait"} <= set(found)


def test_loading_the_extension_loads_nothing_for_it(machine: Machine) -> None:
    """What completes is loaded at the first Tab behind the magic, not before."""
    done = machine.ipython(
        "import sys; shell = get_ipython()",
        "shell.complete('', 'pri', 3); print('reserve_gpu.completion' in sys.modules)",
        "shell.complete('', '%reserve_gpu ', 13); print('reserve_gpu.completion' in sys.modules)",
    )
    assert done.stdout == "False\nTrue\n"
