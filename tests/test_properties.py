"""Properties that hold for whatever people and programs may write."""

from __future__ import annotations

import math
import os
import shlex
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from IPython.core.error import UsageError

import reserve_gpu
from reserve_gpu.allocation import inherited_limit
from reserve_gpu.gpus import names
from reserve_gpu.gpus.nvml import Nvml
from reserve_gpu.ipython.parser import magic_parser
from reserve_gpu.model import parsing
from reserve_gpu.model.devices import Device, Fault
from reserve_gpu.model.errors import RequestError
from reserve_gpu.model.untrusted import sanitize
from tests.forker import Forker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.here import Here
    from tests.shell import Shell

pytestmark = pytest.mark.full

settings.register_profile(
    "ours",
    deadline=None,
    derandomize=True,
    max_examples=150,
    # All examples of a test are on one machine: each leaves it as it found it.
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
settings.load_profile("ours")

# -- what people type ------------------------------------------------------------------------------

HEX = "0123456789abcdef"
INDICES = st.integers(0, 9999).map(str)
INSTANCES = st.builds("{}:{}".format, st.integers(0, 9999), st.integers(0, 9))
UUIDS = st.builds("{}-{}".format, st.sampled_from(["GPU", "MIG"]), st.text(f"{HEX}-", min_size=1))
BUS_IDS = st.from_regex(r"([0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]", fullmatch=True)
NAMES = st.one_of(INDICES, INDICES.map("GPU{}".format), INSTANCES, UUIDS, BUS_IDS)
SEPARATORS = st.sampled_from([",", " ", ", ", " ,\t", ",,", "\n"])

TYPED = st.text(st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"]), max_size=12)
OPTIONS = "-n --count --min-memory --name --note --optional --release --rel --wait -- -"
WORDS = st.one_of(
    st.sampled_from(["0", "1", "0,1", "GPU-", "GPU0", "0000:01:00.0", "7", "0:0", "16GB", "1MiB"]),
    st.sampled_from(OPTIONS.split()),
    st.sampled_from(["-1", "-n1", "-n=x", "--count=0", "--note=", "-h", "--he", "@x", "$x", "{1}"]),
    st.sampled_from(["'", '"', "\\", "1e9", "9" * 5000]),
    TYPED,
)


@pytest.fixture
def shell(here: Here) -> Shell:
    return here.shell()


@given(st.lists(WORDS, max_size=5).map(" ".join) | TYPED)
@example("-n " + "9" * 5000)
@example("--min-memory " + "9" * 5000)
@example("-n 99999999999999999999")
def test_any_line_is_obeyed_or_a_usage_error(shell: Shell, line: str) -> None:
    """On a machine that nobody else uses, any line is obeyed or refused by one line of text."""
    text = ""
    try:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            shell.shell.run_line_magic("reserve_gpu", line)
    except UsageError as error:
        text = str(error) or "\n\n"
    finally:
        reserve_gpu.release()
    assert len(text.splitlines()) <= 1


def unless_refused(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what the function returns, None if it refuses by a RequestError of one line."""
    try:
        return function(*arguments)
    except RequestError as error:
        refusal = str(error)
    assert len(refusal.splitlines()) == 1
    return None


@settings(max_examples=60)
@given(
    devices=st.lists(NAMES, max_size=4),
    count=st.none() | st.integers(0, 99),
    texts=st.dictionaries(st.sampled_from(["min-memory", "name", "note", "wait"]), st.text()),
    flags=st.sets(st.sampled_from(["optional", "release"])),
)
def test_what_is_quoted_arrives(
    devices: list[str],
    count: int | None,
    texts: dict[str, str],
    flags: set[str],
) -> None:
    """Words that `shlex.join` quotes come out of the parser as they went in."""
    words = devices + [f"--{name}={text}" for name, text in texts.items()]
    words += [f"--{flag}" for flag in flags] + ([] if count is None else [f"--count={count}"])
    typed = vars(magic_parser().parse_args(shlex.split(shlex.join(words), comments=True)))
    assert typed == typed | {
        "devices": devices,
        "count": count,
        **{
            name.replace("-", "_"): texts.get(name)
            for name in ("min-memory", "name", "note", "wait")
        },
        **{flag: flag in flags for flag in ("optional", "release")},
    }


@given(st.lists(st.tuples(NAMES, SEPARATORS), min_size=1, max_size=6))
def test_device_lists_keep_their_order(parts: list[tuple[str, str]]) -> None:
    """A list of devices means the same as text with any separators, and as a list in Python."""
    found = tuple(name for name, _ in parts)
    assert names.parse("".join(name + separator for name, separator in parts)) == found
    assert names.parse([name for name, _ in parts]) == found


@given(st.text(f"{HEX}GPUMIg:.-, /", max_size=30) | st.text())
def test_device_lists_are_understood_or_refused(text: str) -> None:
    """Any text is a RequestError or names that, parsed again, are the same names."""
    found = unless_refused(names.parse, text)
    assert found is None or names.parse(",".join(found)) == names.parse(found) == found


# -- devices by name -------------------------------------------------------------------------------

UUID_TAILS = st.lists(st.text(HEX[:3], min_size=6, max_size=6), min_size=1, max_size=5, unique=True)
MACHINES = UUID_TAILS.map(
    lambda tails: [
        Device(index, f"GPU-{tail}", bus_id=f"0000:{index + 1:02x}:00.0")
        for index, tail in enumerate(tails)
    ]
)


@given(MACHINES, st.data())
def test_every_name_of_a_device_means_it(machine: list[Device], data: st.DataObject) -> None:
    """Index, UUID, unique prefix and bus id mean their device alone, in upper or lower case."""
    device = data.draw(st.sampled_from(machine))
    bus_id = device.bus_id or ""
    prefixes = [device.uuid[:length] for length in range(5, len(device.uuid) + 1)]
    unique = [p for p in prefixes if sum(other.uuid.startswith(p) for other in machine) == 1]
    for name in [str(device.index), f"GPU{device.index}", bus_id, bus_id[5:], *unique]:
        for spelling in (name, name.upper(), name.lower()):
            assert names.matching(spelling, machine) == [device]
            assert names.pick(spelling, machine) is device


@given(MACHINES, NAMES, st.data())
def test_a_name_means_a_device_or_is_refused(
    machine: list[Device], name: str, data: st.DataObject
) -> None:
    """A name picks one of the devices that it matches, or a broken one, or is refused."""
    broken = data.draw(st.sets(st.sampled_from([device.index for device in machine])))
    found = [Fault(d.index, "lost") if d.index in broken else d for d in machine]
    picked = unless_refused(names.pick, name, found)
    assert picked in [None, *found]
    if isinstance(picked, Device):
        assert names.matching(name, machine) == [picked]


# -- sizes -----------------------------------------------------------------------------------------

MIB = {
    "": 1, "kB": 1e3 / 2**20, "KiB": 2**-10, "MB": 1e6 / 2**20, "MiB": 1, "GB": 1e9 / 2**20,
    "GiB": 2**10, "TB": 1e12 / 2**20, "TiB": 2**20, "K": 1e3 / 2**20, "m": 1e6 / 2**20,
    "g": 1e9 / 2**20, "T": 1e12 / 2**20,
}  # fmt: skip
NUMBERS = st.integers(0, 10**6) | st.decimals(0, 10**6, places=3)


@given(NUMBERS, st.sampled_from(list(MIB)), st.sampled_from(["", " ", "\t"]))
def test_sizes(number: Any, unit: str, blank: str) -> None:
    """A size is its number times its unit, in any case of letters, with or without a blank."""
    expected = pytest.approx(float(number) * MIB[unit])
    for text in (f"{number}{blank}{unit}", f" {number}{blank}{unit.upper()} "):
        assert parsing.parse_size(text) == expected
    assert parsing.parse_size(f"{number}{unit.lower()}") == expected


@given(NUMBERS, NUMBERS, st.sampled_from(list(MIB)))
def test_more_is_more(one: Any, other: Any, unit: str) -> None:
    """Of two sizes in one unit the larger number is the larger size."""
    less, more = sorted([one, other])
    assert parsing.parse_size(f"{less}{unit}") <= parsing.parse_size(f"{more}{unit}")


@given(
    st.text("0123456789.,kmgtibKMGTIB +-e_", max_size=12) | st.text() | st.floats() | st.integers()
)
@example("1" * 5000)
@example(math.nan)
@example("٣GB")
def test_sizes_are_understood_or_refused(text: str | float) -> None:
    """Anything else is a RequestError of one line; no size is negative or not a number."""
    size = unless_refused(parsing.parse_size, text)
    assert size is None or size >= 0


# -- durations -------------------------------------------------------------------------------------

SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
CENTURY_S = 3e9


@given(NUMBERS, st.sampled_from(list(SECONDS)), st.sampled_from(["", " ", "\t"]))
def test_durations(number: Any, unit: str, blank: str) -> None:
    """A duration is its number times its unit, up to a century, in any case of letters."""
    expected = pytest.approx(min(float(number) * SECONDS[unit], CENTURY_S))
    for text in (f"{number}{blank}{unit}", f" {number}{blank}{unit.upper()} "):
        assert parsing.parse_duration(text) == expected


@given(st.floats(0, 1e9) | st.integers(0, 10**9))
@example(0.1 + 0.2)
@example(1e-05)
def test_any_number_of_seconds_is_a_duration(number: float) -> None:
    """What a program computes, however many digits it has, is a number of seconds."""
    assert parsing.parse_duration(number) == number


@given(
    st.text("0123456789.,smhdSMHD +-e_:", max_size=12)
    | st.text()
    | st.floats()
    | st.integers()
    | st.none()
    | st.booleans()
    | st.binary()
    | st.lists(st.integers())
)
@example("1" * 5000)
@example(10**5000)
@example(math.nan)
@example("٣m")
def test_durations_are_understood_or_refused(text: object) -> None:
    """Anything else is a RequestError of one line; no duration is negative or not a number."""
    duration = unless_refused(parsing.parse_duration, text)
    assert duration is None or duration >= 0


# -- foreign text ----------------------------------------------------------------------------------


@given(st.text(), st.integers(1, 100))
@example("a\x1b[31mb\r\nc\u2028d\u202ee\x00f\x85", 80)
@example("\ud800", 80)
@example("x" * 10**6, 3)
def test_foreign_text_is_shown_safely(text: str, limit: int) -> None:
    """What others wrote becomes one short line without control characters; harmless text stays."""
    clean = sanitize(text, limit)
    assert len(clean) <= limit
    assert clean.isprintable()
    assert len(clean.splitlines()) <= 1
    assert sanitize(clean, limit) == clean
    if text.isprintable() and len(text) <= limit:
        assert clean == text


# -- CUDA_VISIBLE_DEVICES --------------------------------------------------------------------------
# What the inherited limit lets through against what the CUDA driver itself then enumerates.

GPU = "gpu\n name NVIDIA A100\n memory {memory}\n speed {speed}\n uuid GPU-{uuid}\n"
INSTANCE = " instance {slot}\n uuid MIG-{uuid}\n"
TAIL = "-0000-4000-8000-000000000000"
A1, A2, B3 = (beginning + TAIL for beginning in ("aaaa1111", "aaaa2222", "bbbb3333"))
C1, C2, D3 = (beginning + TAIL for beginning in ("cccc1111", "cccc2222", "dddd3333"))

ONE_MODEL = "".join(GPU.format(memory=40960, speed=10, uuid=uuid) for uuid in (A1, A2, B3))
MODELS = "".join(
    GPU.format(memory=1024 * speed, speed=speed, uuid=uuid)
    for speed, uuid in ((20, A1), (10, A2), (80, B3))
)
# GPU 0 whole, GPU 1 split into three instances, GPU 2 in MIG mode with none.
SPLIT = "".join(
    ["driver 570.86.15\n"]
    + [GPU.format(memory=40960, speed=10, uuid=uuid) + " mig on\n" for uuid in (A1, A2)]
    + [INSTANCE.format(slot=slot, uuid=uuid) for slot, uuid in ((0, C1), (2, C2), (5, D3))]
    + [GPU.format(memory=40960, speed=10, uuid=B3) + " mig on\n"]
).replace(" mig on\n", "", 1)

NUMBERS_SEEN = st.sampled_from([
    *("0", "1", "2", "3", "-1", "00", "+1", "+-1", "-0", " 1", "\t2", "\v0", "1 ", "1gpu2", "0x1"),
    *("1.9", "2:0", "", " ", "junk", "NoDevFiles", "none", "all", "\xa01", "1" * 30, "\u0663"),
])  # fmt: skip
UUIDS_SEEN = st.sampled_from([
    *(f"GPU-{uuid}" for uuid in (A1, A2, B3)),
    *("GPU-", "GPU", "GPU-aaaa", "GPU-aaaa1", "GPU-aaaa2222-", "GPU-b", "gpu-b", "GPU-B", "GPU-c"),
    *(" GPU-b", "\fGPU-b", "GPU-b ", "GPU-b\n", "\x1cGPU-b", "\xa0GPU-b", f"GPU-{B3}0", B3, "MIG-"),
])  # fmt: skip
INSTANCES_SEEN = st.sampled_from([
    *(f"MIG-{uuid}" for uuid in (C1, C2, D3)),
    *("MIG-", "MIG", "MIG-cccc", "MIG-cccc1", "MIG-cccc2222-", "MIG-d", "MIG-D", " MIG-d", "MIG-e"),
])  # fmt: skip
VALUES = st.lists(NUMBERS_SEEN | UUIDS_SEEN, max_size=5).map(",".join)
SIGNS = st.text("012 ,-+GPUMIgab\t", max_size=10)


@pytest.fixture(scope="module")
def forker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forker]:
    with Forker(tmp_path_factory.mktemp("forker")) as forker:
        yield forker


def allowed(value: str | None, order: str | None) -> list[str]:
    """Return the devices that the inherited limit lets through, by their bare UUIDs."""
    before = {"CUDA_VISIBLE_DEVICES": value, "CUDA_DEVICE_ORDER": order}
    with Nvml() as nvml:
        devices = [
            d for d in inherited_limit.devices_within_limit(nvml, before) if isinstance(d, Device)
        ]
    return sorted(names.bare_uuid(device.uuid) for device in devices)


def cuda_shows(forker: Forker, value: str | None, order: str | None) -> list[str]:
    """Return the devices that CUDA shows."""
    variables = {"CUDA_VISIBLE_DEVICES": value, "CUDA_DEVICE_ORDER": order}
    set_ones = {name: text for name, text in variables.items() if text is not None}
    return sorted(forker.cuda({**os.environ, **set_ones}))


# What starts a process for each example is tried less often.
FEWER = settings(max_examples=80)


@FEWER
@given(st.none() | VALUES | SIGNS, st.sampled_from(["PCI_BUS_ID", "FASTEST_FIRST", None]))
@example("9" * 5000, None)
@example("0,-0", "PCI_BUS_ID")
def test_limit_on_one_model(
    here: Here, forker: Forker, value: str | None, order: str | None
) -> None:
    """On GPUs of one model, in any order, the limit is what CUDA shows."""
    here.write(ONE_MODEL)
    assert allowed(value, order) == cuda_shows(forker, value, order)


@FEWER
@given(VALUES | SIGNS)
def test_limit_on_several_models(here: Here, forker: Forker, value: str) -> None:
    """On GPUs of several models, in PCI bus order, the limit is what CUDA shows."""
    here.write(MODELS)
    assert allowed(value, "PCI_BUS_ID") == cuda_shows(forker, value, "PCI_BUS_ID")


@pytest.mark.parametrize("value", ["0", "1", "2", "2,0", "1,GPU-b", "GPU-aaaa2,1", "0,7,1", "1,1"])
def test_a_limit_that_only_cuda_knows(here: Here, value: str) -> None:
    """On GPUs of several models no number without CUDA_DEVICE_ORDER is taken for NVML's."""
    here.write(MODELS)
    assert unless_refused(allowed, value, None) is None


@FEWER
@given(st.lists(INSTANCES_SEEN, max_size=4).map(",".join), st.sampled_from(["PCI_BUS_ID", None]))
def test_limit_of_instances(here: Here, forker: Forker, value: str, order: str | None) -> None:
    """On a machine with MIG the limit of instances' UUIDs is what CUDA shows."""
    here.write(SPLIT)
    assert allowed(value, order) == cuda_shows(forker, value, order)


@pytest.mark.parametrize(
    "value",
    [
        *(f"MIG-GPU-{A2}/7/0", f"MIG-GPU-{A2}/9/0,MIG-d", f"MIG-GPU-{A2}/8/0", f"MIG-GPU-{A2}/7"),
        *("GPU-a", "GPU-", "GPU-aaaa1", f"GPU-{A1},MIG-d", f"MIG-d,GPU-{A1}", "GPU-b"),
    ],
)
def test_limit_on_a_machine_with_instances(here: Here, forker: Forker, value: str) -> None:
    """Old names of instances, and UUIDs among GPUs with MIG on, are read as CUDA reads them."""
    here.write(SPLIT)
    assert allowed(value, None) == cuda_shows(forker, value, None)


@pytest.mark.parametrize("value", ["1", f"GPU-{A2}", "GPU-aaaa2"])
def test_limit_of_a_split_gpu(here: Here, forker: Forker, value: str) -> None:
    """Who may use a GPU may use any of its instances, of which CUDA would show the first."""
    here.write(SPLIT)
    assert cuda_shows(forker, value, "PCI_BUS_ID") == [C1]
    assert allowed(value, "PCI_BUS_ID") == [C1, C2, D3]
