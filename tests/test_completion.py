"""What Tab offers behind %reserve_gpu, in real shells; in a kernel: test_kernels.py."""

from __future__ import annotations

import os
import time
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from typing import TYPE_CHECKING

import IPython
import pytest
from IPython.core.completer import provisionalcompleter

from reserve_gpu import host
from tests.shell import printed

if TYPE_CHECKING:
    from tests.here import Here
    from tests.shell import Shell

pytestmark = pytest.mark.ipython

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
    *("--count", "--min-memory", "--name", "--exclude", "--memory", "--wait", "--share", "--note"),
    *("--optional", "--for", "--until", "--idle", "--if-wanted", "--end-kernel"),
    *("--status", "--check", "--release", "--help"),
]
DAYS = ["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"]
REQUESTS = OPTIONS[: OPTIONS.index("--status")]
# Before 8.6 IPython adds to what is offered Python's own names; ours are there all the same.
IS_OLD = IPython.version_info < (8, 6)


def shell_of(here: Here) -> Shell:
    """A shell without Jedi, which knows Python alone and takes seconds to load."""
    shell = here.shell()
    shell.shell.Completer.use_jedi = False
    return shell


def offered(shell: Shell, line: str) -> list[str]:
    """What the line may become by Tab, which says nothing besides."""
    output = StringIO()
    with redirect_stdout(output), redirect_stderr(output), printed(), provisionalcompleter():
        found = list(shell.shell.Completer.completions(line, len(line)))
    assert output.getvalue() == ""
    return [line[: each.start] + each.text for each in found]


def described(shell: Shell, line: str) -> dict[str, str]:
    """What is offered at the end of the line, and what stands beside each."""
    with provisionalcompleter():
        found = list(shell.shell.Completer.completions(line, len(line)))
    return {each.text: each.type or "" for each in found}


@pytest.mark.parametrize("magic", ["%reserve_gpu", "reserve_gpu", "  %reserve_gpu"])
def test_options(here: Here, magic: str) -> None:
    """Tab offers all options, with the percent sign and without, and completes a begun one."""
    shell = shell_of(here)
    everything, wanted = offered(shell, f"{magic} --"), [f"{magic} {text}" for text in OPTIONS]
    assert set(wanted) <= set(everything) if IS_OLD else wanted == everything
    assert offered(shell, f"{magic} 0 --na") == [f"{magic} 0 --name"]


CASES = [
    ("%reserve_gpu ", ["0", "1", "2:0", "2:5", *OPTIONS]),
    ("%reserve_gpu 2:", ["2:0", "2:5"]),
    ("%reserve_gpu 0,", ["0,1"]),
    ("%reserve_gpu 2:5 ", ["2:0", *REQUESTS[1:]]),
    ("%reserve_gpu 0-1,", []),
    ("%reserve_gpu 1 -", ["--min-memory", "--name", "--exclude", *REQUESTS[4:]]),
    ("%reserve_gpu -n 2 ", REQUESTS[1:]),
    ("%reserve_gpu -n 2 --exclude ", ["0", "1", "2:0", "2:5"]),
    ("%reserve_gpu --exclude 0 --share 1,", []),
    ("%reserve_gpu --share --wait 1h --", [f for f in REQUESTS if f not in ("--share", "--wait")]),
    ("%reserve_gpu --exclude 0 --ex", []),
    ("%reserve_gpu --json ", ["--status", "--check"]),
    ("%reserve_gpu --json --status ", []),
    ("%reserve_gpu --status --watch ", []),
    ("%reserve_gpu --watch ", ["--status"]),
    ("%reserve_gpu --release ", []),
    ("%reserve_gpu --note pri", []),
    ("%reserve_gpu --note ", []),
    ("%reserve_gpu # pri", []),
    ("%reserve_gpu gpu", ["gpu0", "gpu1", "gpu2:0", "gpu2:5"]),
    ("%reserve_gpu GPU-a", ["GPU-aaaa1111-0000-0000-0000-000000000000"]),
    ("%reserve_gpu -n ", ["1", "2", "3"]),
    ("%reserve_gpu --exclude ", ["0", "1", "2:0", "2:5"]),
    ("%reserve_gpu --name ", ['"GeForce RTX 2080 Ti"', "A100-SXM4-40GB"]),
    ("%reserve_gpu --name rtx", ['"RTX 2080 Ti"']),
    ("%reserve_gpu --name 'gef", ["'GeForce RTX 2080 Ti'"]),
    ("%reserve_gpu --min-memory ", ["4GiB", "11GiB", "40GiB"]),
    ("%reserve_gpu --min-memory 4", ["4GiB", "40GiB"]),
    ("%reserve_gpu --memory ", ["4GB", "10GB", "20GB", "40GB"]),
    ("%reserve_gpu --memory 1", ["10GB"]),
    ("%reserve_gpu --min-memory=1", ["--min-memory=11GiB"]),
    ("%reserve_gpu --wait 1", ["10m", "1h", "1d"]),
    ("%reserve_gpu --for ", ["1h", "4h", "8h", "1d"]),
    ("%reserve_gpu --for 4h --", [f for f in REQUESTS if f not in ("--for", "--until")]),
    ("%reserve_gpu --until ", ["12:00", "18:00", *DAYS]),
    ("%reserve_gpu --until f", ["Fri"]),
    ("%reserve_gpu --until Fri --f", []),
    ("%reserve_gpu --idle ", ["30m", "1h", "2h"]),
    ("%reserve_gpu --idle 1h --i", ["--if-wanted"]),
    ("%reserve_gpu --status ", ["--json", "--watch"]),
    ("%reserve_gpu --check --", ["--json"]),
    ("x = 1\n%reserve_gpu --sh", ["--share"]),
]


@pytest.mark.skipif(
    IS_OLD, reason="IPython before 8.6 mixes Python's own names into what it offers"
)
def test_devices_and_values(here: Here) -> None:
    """Tab offers the devices of this machine by each of their names, and values that occur here."""
    here.write(MIXED)
    shell = shell_of(here)
    for line, texts in CASES:
        start = line[: max(line.rfind(" "), line.rfind("\n")) + 1]
        assert offered(shell, line) == ([start + text for text in texts] or [line]), line


@pytest.mark.skipif(IS_OLD, reason="IPython before 8.6 shows texts alone")
def test_what_devices_are(here: Here) -> None:
    """Beside each device Tab shows what it is, and whether anything runs on it."""
    here.write(MIXED + "gpu\n name Tesla T4\n compute 4321000 3500\ngpu\n name Tesla\x1b[31m")
    shell = shell_of(here)
    kinds = described(shell, "%reserve_gpu ")
    assert kinds["1"] == "A100, idle"
    assert kinds["3"] == "Tesla T4, busy"
    assert kinds["4"] == "Tesla\ufffd[31m, idle"
    assert described(shell, "%reserve_gpu GPU-b") == {here.uuid("1"): "A100, idle"}
    assert kinds["--wait"] == "option"
    shell.shell.kernel = object()  # JupyterLab breaks what stands beside an offer at blanks
    assert (
        described(shell, "%reserve_gpu ")["3"] == "Tesla\N{NO-BREAK SPACE}T4,\N{NO-BREAK SPACE}busy"
    )


@pytest.mark.skipif(IS_OLD, reason="IPython before 8.6 shows texts alone")
@pytest.mark.process
def test_who_has_devices(here: Here) -> None:
    """Tab names who has a device, by the kernel's list of locks, and this kernel by that name."""
    with here.child() as child:
        assert child.reserve("0").value == "0"
        shell = shell_of(here)
        shell.run("%reserve_gpu 1")
        kinds = described(shell, "%reserve_gpu ")
    assert kinds["0"].endswith(f", {host.user_of(os.getpid())}")
    assert kinds["1"].endswith(", this kernel")


@pytest.mark.skipif(IS_OLD, reason="the matchers of IPython from 8.6 on")
def test_nothing_else_is_offered(here: Here) -> None:
    """Jedi, files and Python's names are not even asked on the magic's line."""
    shell = here.shell()
    shell.shell.Completer.use_jedi = True
    (here.folder / "print_me").touch()
    shell.run("print_too = printed = 1")
    for line in ("%reserve_gpu pri", "%reserve_gpu --note pri", "x = 1\n%reserve_gpu --name pri"):
        assert offered(shell, line) == [line]


@pytest.mark.skipif(not IS_OLD, reason="the way of IPython before 8.6")
def test_devices_in_an_old_shell(here: Here) -> None:
    """An old IPython offers devices and values too, beside Python's own names."""
    here.write(MIXED)
    shell = shell_of(here)
    assert {"%reserve_gpu 0", "%reserve_gpu 2:5"} <= set(offered(shell, "%reserve_gpu "))
    assert "%reserve_gpu 0,1" in offered(shell, "%reserve_gpu 0,")
    name = offered(shell, "%reserve_gpu --name 'gef")
    assert "%reserve_gpu --name 'GeForce RTX 2080 Ti'" in name


@pytest.mark.parametrize(
    ("before", "lines"),
    [
        (
            "",
            [
                "reserve_gpu = --stat",
                "reserve_gpus --stat",
                "print('%reserve_gpu') --stat",
                "%reserve_gpu # --stat",
                "%reserve_gpu --status --stat",
                "%reserve_gpu 0 --stat",
            ],
        ),
        ("import reserve_gpu", ["reserve_gpu --stat"]),
        ("%automagic off", ["reserve_gpu --stat"]),
        ("%unload_ext reserve_gpu", ["%reserve_gpu --stat"]),
    ],
)
def test_what_is_not_the_magic(here: Here, before: str, lines: list[str]) -> None:
    """No option is offered for Python that only looks like the magic, nor once that is unloaded."""
    shell = shell_of(here)
    shell.run(before)
    for line in lines:
        assert not any(text.endswith("--status") for text in offered(shell, line)), line


def test_loading_again_offers_nothing_twice(here: Here) -> None:
    """An extension that was loaded again offers everything once."""
    shell = shell_of(here)
    shell.run("%reload_ext reserve_gpu")
    assert offered(shell, "%reserve_gpu --stat").count("%reserve_gpu --status") == 1


def test_tab_takes_nothing(here: Here) -> None:
    """Tab takes no lock, and what is typed in one go asks the driver once."""
    shell = shell_of(here)
    start = time.monotonic()
    for line in ("%reserve_gpu ", "%reserve_gpu 0,", "%reserve_gpu --name "):
        assert len(offered(shell, line)) > 0
    is_slow = time.monotonic() - start > 5
    assert here.calls().count("nvmlInitWithFlags") == 1 or is_slow
    assert not here.locks.exists()


@pytest.mark.parametrize("function", ["nvmlInitWithFlags", "nvmlDeviceGetMigMode"])
def test_a_driver_that_hangs(here: Here, function: str) -> None:
    """A driver that does not answer is not waited for, nor asked again, and Tab offers options."""
    here.write(f"gpu\ngpu\ndelay {function} * 3600")
    shell = shell_of(here)
    for _ in range(4):
        assert "%reserve_gpu --status" in offered(shell, "%reserve_gpu ")
    assert [call.split()[0] for call in here.calls()].count(function) == 1


def test_without_a_driver(here: Here) -> None:
    """Where there is no driver Tab offers the options, and says nothing."""
    here.add("fail nvmlInitWithFlags * 9")  # NVML_ERROR_DRIVER_NOT_LOADED
    assert {"%reserve_gpu --status", "%reserve_gpu --wait"} <= set(
        offered(shell_of(here), "%reserve_gpu ")
    )
