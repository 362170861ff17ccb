"""Properties that hold for whatever people and programs may write."""

from __future__ import annotations

import math
import shlex
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from IPython.core.error import UsageError

import reserve_gpu
from reserve_gpu.gpus import names
from reserve_gpu.ipython.parser import magic_parser
from reserve_gpu.model import parsing
from reserve_gpu.model.untrusted import sanitize

if TYPE_CHECKING:
    from tests.support.here import Here
    from tests.support.shell import Shell

from tests.support.properties import unless_refused

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
