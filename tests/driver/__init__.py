"""A stand-in NVIDIA driver: `libnvidia-ml.so.1` and `libcuda.so.1`, driven by a scenario file.

`build()` compiles the two libraries. `environment()` returns the environment of a child process on
the scenario's machine. `load()` loads NVML into this process. README.md describes the language.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from functools import cache as cached
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

SOURCES = Path(__file__).parent
SCENARIOS = SOURCES / "scenarios"

# soname: (its sources, the prefix of its functions)
SHARED = ("scenario.c", "parse.c")
LIBRARIES = {
    "libnvidia-ml.so.1": (
        (*SHARED, "nvml.c", "nvml_about.c", "nvml_use.c", "nvml_parts.c"),
        "nvml",
    ),
    "libcuda.so.1": ((*SHARED, "visible.c", "cuda.c"), "cu"),
}
OPTIONS = ("-std=gnu11", "-O1", "-g", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread")
RULES = ("missing", "fail", "delay", "delay-first", "stuck")  # the rules that name a function

# The definition of an exported function: after EXPORT, or as the argument of a macro.
# PROCESS_CALLS defines three versions of a function.
DEFINITION = re.compile(
    r"^(?:EXPORT [^(]*?\b|(?:SYSTEM_|DEVICE_|PAIR_)?CALL\(|(PROCESS_CALLS)\()((?:nvml|cu)[A-Z]\w+)",
    re.MULTILINE,
)


def build(cache: Path | None = None, missing: Iterable[str] = ()) -> Path:
    """Compile both libraries, or find them in the cache.

    Args:
        cache: Their folder; by default, one of this user in the temporary directory.
        missing: Functions to leave out.

    Returns:
        The folder that holds the two libraries.

    Raises:
        ValueError: A missing function is unknown.
        RuntimeError: The compiler is missing, or fails.
    """
    left_out = sorted(set(missing))
    check_functions(left_out)
    folder = cache or default_cache()
    folder.mkdir(parents=True, exist_ok=True)
    built = folder / fingerprint(left_out)
    if not built.is_dir():
        build_at(built, left_out)
    return built


def environment(
    scenario: Path, *, log: Path | None = None, base: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the environment of a process on the scenario's machine.

    Args:
        scenario: The scenario file. Its `missing` lines are read only now.
        log: File to which each call of a function adds a line.
        base: The environment to change; by default, the environment of this process.

    Returns:
        A copy of `base` with the libraries first in `LD_LIBRARY_PATH`.

    Raises:
        ValueError: The scenario names a function that the libraries don't have.
        OSError: The scenario can't be read.
    """
    functions = named_functions(scenario)
    check_functions(name for names in functions.values() for name in names)
    made = dict(os.environ if base is None else base)
    folders = [str(build(missing=functions["missing"])), made.get("LD_LIBRARY_PATH", "")]
    made["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, folders))
    made["STAND_IN_SCENARIO"] = str(scenario.absolute())
    made.pop("STAND_IN_LOG", None)
    if log is not None:
        made["STAND_IN_LOG"] = str(log.absolute())
    return made


@cached
def load() -> ctypes.CDLL:
    """Load NVML's library into this process, permanently.

    The dynamic loader identifies a library by its soname, so every later search for
    `libnvidia-ml.so.1` finds this one. Each call reads $STAND_IN_SCENARIO and $STAND_IN_LOG. CUDA's
    library is not loaded: its presence can mean that CUDA is starting, and the end of each
    reservation would wait for that.

    Returns:
        libnvidia-ml.so.1.
    """
    folder = build()
    return ctypes.CDLL(str(folder / "libnvidia-ml.so.1"))


@cached
def exports() -> frozenset[str]:
    """Return the names of all functions of the two libraries."""
    names: set[str] = set()
    for source in SOURCES.glob("*.c"):
        for versions, name in DEFINITION.findall(source.read_text()):
            names |= {name + suffix for suffix in (("", "_v2", "_v3") if versions else ("",))}
    return frozenset(names)


def check_functions(names: Iterable[str]) -> None:
    """Raise ValueError for an unknown function."""
    unknown = sorted(set(names) - exports())
    if unknown:
        raise ValueError(f"the stand-in driver has no function {', '.join(unknown)}")


def named_functions(scenario: Path) -> dict[str, set[str]]:
    """Return the functions that the scenario names, by rule."""
    found: dict[str, set[str]] = {word: set() for word in RULES}
    for line in scenario.read_text().splitlines():
        words = line.partition("#")[0].split()
        if len(words) > 1 and words[0] in found:
            found[words[0]].add(words[1])
    return found


def default_cache() -> Path:
    """Return this user's cache folder, which other users can read, because some tests need them."""
    folder = Path(tempfile.gettempdir()) / f"stand-in-driver-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise RuntimeError(f"{folder} belongs to another user: pass a cache folder, or set TMPDIR")
    folder.chmod(0o755)
    return folder


def compiler() -> list[str]:
    """Return the command of the C compiler: cc, or the compiler of the `ziglang` package."""
    system = shutil.which("cc")
    if system:
        return [system]
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "cc"]
    return install_compiler()


def install_compiler() -> list[str]:
    """Install the `ziglang` package (96 MB) into this Python; return its compiler's command."""
    print("No C compiler: installing ziglang for the stand-in driver ...", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "ziglang>=0.13"]
    if subprocess.run(command, check=False).returncode:
        raise RuntimeError("no C compiler: install cc (Debian: gcc), or pip install ziglang")
    return [sys.executable, "-m", "ziglang", "cc"]


def fingerprint(left_out: list[str]) -> str:
    """Return a hash of everything that affects the libraries."""
    digest = hashlib.sha256(repr((LIBRARIES, OPTIONS, left_out, compiler())).encode())
    for source in sorted(SOURCES.glob("*.[ch]")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:20]


def build_at(built: Path, left_out: list[str]) -> None:
    """Compile in a draft folder and rename it, so that no process sees an unfinished one."""
    with tempfile.TemporaryDirectory(dir=built.parent, ignore_cleanup_errors=True) as temporary:
        draft = Path(temporary) / built.name
        draft.mkdir()
        for soname in LIBRARIES:
            compile_library(soname, draft, left_out)
        for path in (draft, *draft.iterdir()):
            path.chmod(0o755)  # despite the umask: other users can use them
        try:
            draft.rename(built)
        except OSError:
            if not built.is_dir():
                raise


def compile_library(soname: str, folder: Path, left_out: list[str]) -> None:
    """Compile one library, without the functions left out."""
    sources, prefix = LIBRARIES[soname]
    script = folder / f"{soname}.map"
    hidden = "".join(f"{name}; " for name in left_out if name.startswith(prefix))
    script.write_text(f"{{ global: {prefix}*; local: {hidden}*; }};\n")
    command = [
        *compiler(),
        *OPTIONS,
        *(str(SOURCES / source) for source in sources),
        *("-o", str(folder / soname)),
        *(f"-Wl,-soname,{soname}", f"-Wl,--version-script={script}"),
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"{command[0]} could not compile {soname}:\n{result.stderr}")
