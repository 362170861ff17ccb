"""install.sh, run as a user runs it.

Most tests run the real script with a virtual environment whose pip and IPython are small programs
of their own: that pip copies a package of one line, and that IPython reads the configuration with
IPython's own loader and then runs what `-c` says. One environment has the real pip and the real
IPython, which it finds where these tests find theirs. Nothing is written outside `tmp_path`.
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import venv
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
from traitlets.config.loader import LazyConfigValue, PyFileConfigLoader

if TYPE_CHECKING:
    from collections.abc import Callable

USER = pwd.getpwuid(os.geteuid()).pw_name
CHECKOUT = Path(__file__).resolve().parent.parent
SHELL = shutil.which("dash") or "/bin/sh"
OWN_LINE = b"get_config().InteractiveShellApp.extensions.append('reserve_gpu')\n"
# What version 2.0.0 added to a file that it made.
OLD_BLOCK = b"""\
# >>> reserve_gpu (added by install.sh, which takes it away with --uninstall; new: file) >>>
import importlib.util
if importlib.util.find_spec("reserve_gpu"):
    get_config().InteractiveShellApp.extensions.append("reserve_gpu")
# <<< reserve_gpu <<<
"""
BLOCK_OF_ANOTHER = OLD_BLOCK.replace(b"import", b"# for /x/bin/python3.9\nimport", 1)

SMALL_PIP = """\
import pathlib, shutil, sys
packages = pathlib.Path(__file__).parent.parent
for path in packages.glob("reserve_gpu*"):
    shutil.rmtree(path)
if sys.argv[1] == "install":
    (packages / "reserve_gpu").mkdir()
    (packages / "reserve_gpu" / "__init__.py").write_text("")
    (packages / "reserve_gpu-2.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\\nName: reserve_gpu\\nVersion: 2\\n"
    (packages / "reserve_gpu-2.dist-info" / "METADATA").write_text(metadata)
"""

SMALL_IPYTHON = """\
import importlib, os, sys, traceback, types
from traitlets.config.loader import Config, JSONFileConfigLoader, PyFileConfigLoader
folder = os.environ.get("IPYTHONDIR", os.path.expanduser("~/.ipython")) + "/profile_default"
config = Config()
for loader, name in (PyFileConfigLoader, "config.py"), (JSONFileConfigLoader, "config.json"):
    if os.path.exists(f"{folder}/ipython_{name}"):
        try:
            config.merge(loader(f"ipython_{name}", folder).load_config())
        except Exception:
            traceback.print_exc()
extensions = config.InteractiveShellApp.extensions
loaded = extensions if isinstance(extensions, list) else extensions.get_value([])
for name in loaded:
    importlib.import_module(name)
shell = types.SimpleNamespace(find_line_magic=lambda name: name in loaded)
exec(sys.argv[-1], {"get_ipython": lambda: shell})
"""


class Home(NamedTuple):
    """A person's home directory, in which nothing of theirs is set but what a test sets."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / ".ipython" / "profile_default" / "ipython_config.py"

    @property
    def backup(self) -> Path:
        return self.config.with_name("ipython_config.py.before-reserve_gpu")

    def write(self, data: bytes) -> None:
        self.config.parent.mkdir(parents=True, exist_ok=True)
        self.config.write_bytes(data)

    def files(self) -> dict[str, bytes]:
        return files(self.path)

    def environ(self, **more: str | Path) -> dict[str, str]:
        unwanted = ("IPYTHON", "PIP_", "PYTHON", "VIRTUAL_ENV", "XDG_", "COV_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
        kept |= {"HOME": str(self.path), "TERM": "xterm", "PYTHONDONTWRITEBYTECODE": "1"}
        return kept | {name: str(value) for name, value in more.items()}


def files(folder: Path) -> dict[str, bytes]:
    """Return the bytes of every file below."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def install_sh(
    *arguments: str,
    env: dict[str, str],
    script: Path = CHECKOUT / "install.sh",
    cwd: str | Path = "/",
    prefix: tuple[str, ...] = (),
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*prefix, SHELL, str(script), *arguments],
        env=env,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def done(result: subprocess.CompletedProcess[str]) -> str:
    """Return what it said, where it ended well and complained of nothing."""
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout


def refused(result: subprocess.CompletedProcess[str]) -> str:
    """Return the one line it said, where it refused before it did anything."""
    assert (result.returncode, result.stdout) == (1, "")
    return complained(result)


def complained(result: subprocess.CompletedProcess[str]) -> str:
    """Return the one line of complaint, where it did not end well."""
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("install.sh: ")
    return line


def packages_of(python: Path) -> Path:
    asked = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(subprocess.check_output([str(python), "-c", asked], text=True).strip())


def name_of(python: Path) -> str:
    """Return the name by which a block knows this Python."""
    return str(python.parent / f"python{sysconfig.get_python_version()}")


def link_packages(target: Path, *names: str) -> None:
    """Let an environment have packages of this one: those named, or all but reserve_gpu."""
    for source in (Path(entry) for entry in sys.path if entry.endswith("-packages")):
        for entry in source.iterdir():
            is_other = not entry.name.startswith(("reserve_gpu", "__editable__", "__pycache__"))
            is_wanted = entry.name in names if names else is_other and entry.suffix != ".pth"
            if is_wanted and not (target / entry.name).exists():
                (target / entry.name).symlink_to(entry)


def make_environment(folder: Path) -> Path:
    """Make an environment with the packages of this one, except reserve_gpu; return its Python."""
    venv.create(folder, symlinks=True)
    link_packages(packages_of(folder / "bin" / "python"))
    return folder / "bin" / "python"


def make_small_environment(folder: Path) -> Path:
    """Make an environment with the small pip and the small IPython; return its Python."""
    venv.create(folder, symlinks=True)
    packages = packages_of(folder / "bin" / "python")
    for name, text in (("pip", SMALL_PIP), ("IPython", SMALL_IPYTHON)):
        (packages / name).mkdir()
        (packages / name / "__init__.py").touch()
        (packages / name / "__main__.py").write_text(text)
    link_packages(packages, "traitlets")
    return folder / "bin" / "python"


def make_program(path: Path, *lines: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(("#!/bin/sh", *lines, "")))
    path.chmod(0o755)
    return path


def copy_checkout(folder: Path) -> Path:
    unwanted = shutil.ignore_patterns(".*", "__pycache__", "tests", "build", "*.egg-info")
    shutil.copytree(CHECKOUT, folder, ignore=unwanted)
    return folder


def extensions(config: Path) -> list[str]:
    """Return what IPython's own loader reads out of a configuration."""
    found = PyFileConfigLoader(config.name, str(config.parent)).load_config()
    value = found.InteractiveShellApp.extensions
    return list(value.get_value([])) if isinstance(value, LazyConfigValue) else list(value)


@pytest.fixture(scope="module")
def pythons(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the Pythons of two small environments."""
    folder = tmp_path_factory.mktemp("small")
    return make_small_environment(folder / "one"), make_small_environment(folder / "a 'second'")


@pytest.fixture
def home(tmp_path: Path) -> Home:
    (tmp_path / "home").mkdir()
    return Home(tmp_path / "home")


@pytest.fixture
def python(pythons: tuple[Path, Path]) -> Path:
    """Make a Python that has no reserve_gpu."""
    for each in pythons:
        subprocess.check_call([str(each), "-m", "pip", "uninstall"], cwd="/")
    return pythons[0]


@pytest.fixture
def env(python: Path, home: Home) -> dict[str, str]:
    return home.environ(PYTHON=python)


@pytest.fixture
def other(pythons: tuple[Path, Path], env: dict[str, str]) -> dict[str, str]:
    """Return the same home, with the second Python."""
    return env | {"PYTHON": str(pythons[1])}


# --- what a user sees first ----------------------------------------------------------------------


@pytest.mark.promise
@pytest.mark.process
def test_install_and_uninstall(home: Home, env: dict[str, str], python: Path) -> None:
    """It says what it did and what to type; again is the same; uninstalling leaves no file."""
    lines = done(install_sh(env=env)).splitlines()
    assert lines == [
        f"Installing reserve_gpu into {python} ...",
        f"Installed reserve_gpu 2 in {packages_of(python)} for {python}",
        f"Loaded at every start of IPython by {home.config}",
        f"Try it: \"{python}\" -m IPython -c '%reserve_gpu'",
    ]
    assert extensions(home.config) == ["reserve_gpu"]
    first = home.files()
    assert done(install_sh(env=env)).splitlines() == lines
    assert home.files() == first
    assert done(install_sh("--uninstall", env=env)).splitlines() == [
        f"Uninstalled reserve_gpu from {python}; its dependencies stay installed",
        f"Removed {home.config}, which contained nothing else",
    ]
    assert home.files() == {}
    assert done(install_sh("--uninstall", env=env)).splitlines() == [
        f"Nothing to uninstall: reserve_gpu is not installed for {python}",
        f"Nothing to remove from {home.config}",
    ]


@pytest.mark.process
def test_two_environments(home: Home, env: dict[str, str], other: dict[str, str]) -> None:
    """Uninstalling from one environment leaves the lines for the other; the last one takes them."""
    home.write(b"x = 1\n")
    before = home.files()
    done(install_sh(env=env))
    done(install_sh(env=other))
    names = [name_of(Path(each["PYTHON"])) for each in (env, other)]
    both = home.config.read_text()
    assert "".join(f"# for {name}\n" for name in names) in both
    assert both.count("extensions.append") == 1
    assert f"are kept for\n{names[1]}\n" in done(install_sh("--uninstall", env=env))
    assert home.config.read_text() == both.replace(f"# for {names[0]}\n", "")
    assert extensions(home.config) == ["reserve_gpu"]
    done(install_sh("--uninstall", env=env))
    assert names[1] in home.config.read_text()
    done(install_sh("--uninstall", env=other))
    assert home.files() == before


@pytest.mark.process
@pytest.mark.parametrize(("option", "code"), [("-h", 0), ("--help", 0), ("uninstall", 2), ("", 2)])
def test_usage(option: str, code: int, home: Home) -> None:
    """The usage is printed where asked for, and where an argument is unknown; nothing is done."""
    result = install_sh(option, env=home.environ(PATH="/usr/bin:/bin"))
    assert result.returncode == code
    assert "Usage: sh install.sh" in (result.stderr if code else result.stdout)
    assert home.files() == {}


# --- what can stand in ipython_config.py ---------------------------------------------------------

CONFIGS = {
    "empty": b"",
    "usual": b"c = get_config()\nc.InteractiveShell.autocall = 1\n",
    "no line break at the end": b"c = get_config()\nc.InteractiveShell.autocall = 1",
    "a comment at the end": b"x = 1\n# c.InteractiveShellApp.extensions.append('reserve_gpu')",
    "an indented end": b"if True:\n    x = 1\n    \n",
    "an assignment": b"c = get_config()\nc.InteractiveShellApp.extensions = ['json']\n",
    "CRLF": b"c = get_config()\r\nc.InteractiveShell.autocall = 1\r\n",
    "CRLF without the last": b"x = 1\r\nc = get_config()",
    "latin-1": b"# -*- coding: latin-1 -*-\nx = 'caf\xe9'\n",
    "byte order mark": b"\xef\xbb\xbfc = get_config()\n",
}


@pytest.mark.full
@pytest.mark.parametrize("before", CONFIGS.values(), ids=CONFIGS)
def test_existing_file(before: bytes, home: Home, env: dict[str, str]) -> None:
    """What stands in the file stays byte for byte, and is all there is after uninstalling."""
    home.write(before)
    untouched = home.files()
    assert "at every start" in done(install_sh(env=env))
    once = home.files()
    data = home.config.read_bytes()
    assert data.startswith(before)
    assert data.count(b"\r\n") in (0, data.count(b"\n"))
    assert home.backup.read_bytes() == before
    assert extensions(home.config).count("reserve_gpu") == 1
    done(install_sh(env=env))
    assert home.files() == once
    done(install_sh("--uninstall", env=env))
    assert home.files() == untouched


BROKEN = {
    "name": (b"d.InteractiveShell.autocall = 1\n", "NameError: name 'd' is not defined"),
    "error": (b"raise ValueError('of mine')\n", "ValueError: of mine"),
    "encoding": (b"x = 'caf\xe9'\n", "SyntaxError: "),
    "syntax": (b"no Python\n", "SyntaxError: "),
    "null": (b"x = 1\0\n", "null bytes"),
}


@pytest.mark.full
@pytest.mark.parametrize(("before", "reason"), BROKEN.values(), ids=BROKEN)
def test_broken_file(before: bytes, reason: str, home: Home, env: dict[str, str]) -> None:
    """Where the configuration raises, it says so with the error's own words; then it is mended."""
    home.write(before)
    for _ in range(2):
        line = complained(install_sh(env=env))
        assert f"does not load reserve_gpu despite the lines in {home.config}" in line
        assert reason in line
        assert home.config.read_bytes().startswith(before)
        assert home.config.read_bytes().count(b"extensions.append") == 1
    home.write(home.config.read_bytes().replace(before, b"pass\n"))
    assert f"Loaded at every start of IPython by {home.config}\n" in done(install_sh(env=env))
    home.write(home.config.read_bytes().replace(b"pass\n", before))
    done(install_sh("--uninstall", env=env))
    assert home.files() == {str(home.config.relative_to(home.path)): before}


@pytest.mark.full
def test_made_file_that_was_added_to(home: Home, env: dict[str, str]) -> None:
    """A file that it made, and the user has added to, is kept with the user's lines."""
    done(install_sh(env=env))
    home.write(home.config.read_bytes() + b"x = 1\n")
    done(install_sh("--uninstall", env=env))
    assert list(home.files().values()) == [b"x = 1\n"]


@pytest.mark.full
def test_lines_added_behind(home: Home, env: dict[str, str]) -> None:
    """Lines that the user wrote behind the added ones do not run into those before on uninstall."""
    home.write(b"x = 1")
    done(install_sh(env=env))
    home.write(home.config.read_bytes() + b"y = 2")
    done(install_sh("--uninstall", env=env))
    assert home.config.read_bytes() == b"x = 1\ny = 2"


@pytest.mark.full
@pytest.mark.parametrize("before", [b"", b"x = 1\n"])
def test_lines_of_the_release_before(before: bytes, home: Home, env: dict[str, str]) -> None:
    """The lines that version 2.0.0 added get this Python's name, and go with it."""
    home.write(before + OLD_BLOCK)
    done(install_sh(env=env))
    assert home.config.read_text().count(f"# for {name_of(Path(env['PYTHON']))}\n") == 1
    assert home.config.read_bytes().count(b"append") == 1
    home.write(before + OLD_BLOCK)
    done(install_sh("--uninstall", env=env))
    assert [data for data in home.files().values() if data] == ([before] if before else [])


@pytest.mark.full
@pytest.mark.parametrize(
    "line",
    [
        b"c.InteractiveShellApp.extensions.append('reserve_gpu')",
        b"c.InteractiveShellApp.extensions.extend(['json', 'reserve_gpu'])",
        b"c.InteractiveShellApp.extensions = [\n    'reserve_gpu',\n]",
    ],
)
def test_own_line(line: bytes, home: Home, env: dict[str, str]) -> None:
    """Where the user's own line loads the extension, nothing is added, and uninstall leaves it."""
    home.write(b"c = get_config()\n" + line + b"\n")
    before = home.files()
    assert "already loads it at every start of" in done(install_sh(env=env))
    assert home.files() == before
    assert "a line of your own" in done(install_sh("--uninstall", env=env))
    assert home.files() == before


@pytest.mark.full
def test_example_configuration(home: Home, env: dict[str, str]) -> None:
    """A copy of the checkout's ipython_config.py loads the extension and is not added to."""
    home.write((CHECKOUT / "ipython_config.py").read_bytes())
    before = home.files()
    assert "already loads it at every start of" in done(install_sh(env=env))
    assert home.files() == before


FOUND_BY = """\
c = get_config()
c.InteractiveShellApp.extensions.append("reserve_gpu")
"""
REPLACED = 'the extensions are replaced by {} in {}; add "reserve_gpu" to that list'
INSTEAD = "also appends; use c.InteractiveShellApp.extensions there instead"
KERNEL_FILE = "ipython_kernel_config.py"


def ask(kind: str, home: Home, python: str = sys.executable) -> str:
    """Run tools/find_extension.py; return its answer, or else its error output."""
    answer = home.path / "answer"
    command = [python, str(CHECKOUT / "tools" / "find_extension.py"), kind, str(answer)]
    ended = subprocess.run(command, env=home.environ(), cwd="/", capture_output=True, check=False)
    return answer.read_text() if answer.exists() else ended.stderr.decode()


@pytest.mark.parametrize(
    ("kind", "name", "text", "setting"),
    [
        pytest.param(kind, *rest, marks=mark)
        for mark, kind, *rest in [
            (pytest.mark.process, "kernel", KERNEL_FILE, "", None),
            (
                pytest.mark.process,
                "kernel",
                KERNEL_FILE,
                "c.IPKernelApp.extensions = ['autoreload']",
                "c.IPKernelApp.extensions",
            ),
            (
                pytest.mark.full,
                "kernel",
                KERNEL_FILE,
                "c.InteractiveShellApp.extensions = []",
                "c.InteractiveShellApp.extensions",
            ),
            (
                pytest.mark.full,
                "kernel",
                "ipython_kernel_config.json",
                '{"IPKernelApp": {"extensions": ["autoreload"]}}',
                "IPKernelApp.extensions",
            ),
            (
                pytest.mark.full,
                "kernel",
                "ipython_config.json",
                '{"InteractiveShellApp": {"extensions": ["autoreload"]}}',
                "InteractiveShellApp.extensions",
            ),
            (
                pytest.mark.process,
                "terminal",
                "ipython_config.json",
                '{"TerminalIPythonApp": {"extensions": ["autoreload"]}}',
                "TerminalIPythonApp.extensions",
            ),
            *[
                (pytest.mark.full, "kernel", KERNEL_FILE, line, None)
                for line in (
                    "c.InteractiveShellApp.extensions.append('json')",
                    "c.IPKernelApp.extensions = ['reserve_gpu']",
                    "raise ValueError('of mine')",
                )
            ],
        ]
    ],
)
def test_a_setting_that_replaces_the_extensions_is_named(
    kind: str, name: str, text: str, setting: str | None, home: Home
) -> None:
    """A kernel is started; if it lacks the magic, the file and the setting at fault are named."""
    home.write(FOUND_BY.encode())
    file = home.config.with_name(name)
    file.write_text(text if name.endswith(".json") else f"c = get_config()\n{text}\n")
    expected = REPLACED.format(setting, file) if setting else "loaded"
    assert ask(kind, home) == expected


@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "section"),
    [(KERNEL_FILE, "IPKernelApp"), ("ipython_config.py", "TerminalIPythonApp")],
)
def test_an_append_to_another_section_is_named(name: str, section: str, home: Home) -> None:
    """With ours such an append makes traitlets double a list, and the program hang."""
    home.write(FOUND_BY.encode())
    file = home.config.with_name(name)
    file.write_text(f"get_config().{section}.extensions.append('autoreload')\n")
    answer = ask("appends", home)
    assert answer == f"c.{section}.extensions in {file} {INSTEAD}"


@pytest.mark.process
def test_appends_to_the_common_section_go_together(home: Home) -> None:
    """Appends to InteractiveShellApp in several files are no problem, and nothing is said."""
    home.write(FOUND_BY.encode())
    home.config.with_name(KERNEL_FILE).write_bytes(FOUND_BY.encode())
    assert ask("appends", home) == ""


@pytest.mark.full
@pytest.mark.parametrize("lost", ["# <<<", "# >>>", "none, as they are there twice"])
def test_damaged_marks(lost: str, home: Home, env: dict[str, str]) -> None:
    """If a mark is gone, or there are two pairs, the lines are repaired, or all are removed."""
    done(install_sh(env=env))
    text = home.config.read_text()
    lines = [line for line in text.splitlines() if not line.startswith(lost)]
    damaged = "\n".join(lines) + "\n" if lost in text else text + text
    home.write(f"x = 1\n{damaged}y = 2\n".encode())
    done(install_sh(env=env))
    assert home.config.read_text() == f"x = 1\n{text}y = 2\n"
    home.write(f"x = 1\n{damaged}y = 2\n".encode())
    done(install_sh("--uninstall", env=env))
    assert home.config.read_bytes() == b"x = 1\ny = 2\n"


@pytest.mark.full
def test_links_and_modes(
    home: Home, env: dict[str, str], other: dict[str, str], tmp_path: Path
) -> None:
    """A symbolic link stays one; the file behind it keeps its owner and its mode."""
    kept = tmp_path / "dotfiles.py"
    kept.write_bytes(b"x = 1\n")
    kept.chmod(0o600)
    owner = kept.stat().st_uid, kept.stat().st_gid
    home.config.parent.mkdir(parents=True)
    home.config.symlink_to(kept)
    for each in (env, other):
        done(install_sh(env=each))
        assert extensions(home.config) == ["reserve_gpu"]
        assert home.config.readlink() == kept
        assert (kept.stat().st_uid, kept.stat().st_gid) == owner
        assert kept.stat().st_mode & 0o777 == 0o600
    assert home.backup.stat().st_mode & 0o777 == 0o600
    for each in (env, other):
        done(install_sh("--uninstall", env=each))
    assert home.config.readlink() == kept
    assert kept.read_bytes() == b"x = 1\n"


@pytest.mark.process
def test_the_file_is_replaced(home: Home, env: dict[str, str]) -> None:
    """The old file is never overwritten: a second name of it still has the old content."""
    home.write(b"x = 1\n")
    second = home.path / "second"
    os.link(home.config, second)
    done(install_sh(env=env))
    assert second.read_bytes() == b"x = 1\n"
    second.unlink()
    os.link(home.config, second)
    with_lines = second.read_bytes()
    done(install_sh("--uninstall", env=env))
    assert second.read_bytes() == with_lines
    assert home.config.read_bytes() == b"x = 1\n"


@pytest.mark.process
def test_lines_between_the_marks(home: Home, env: dict[str, str]) -> None:
    """The user's lines between the marks stay on uninstall, and the message counts them."""
    home.write(b"x = 1\r\n")
    done(install_sh(env=env))
    home.write(home.config.read_bytes().replace(b"import", b"c = get_config()\r\nimport", 1))
    said = done(install_sh("--uninstall", env=env))
    assert home.config.read_bytes() == b"x = 1\r\nc = get_config()\r\n"
    assert (
        "; the rest of the file, and 1 line that you added between the marks, are unchanged\n"
        in said
    )


@pytest.mark.process
@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user")
def test_root_in_the_home_of_another_user(home: Home, never_pip: dict[str, str]) -> None:
    """Root is refused in another user's home before pip is called, and no file is made."""
    os.chown(home.path, 65501, 65501)  # an account without a name
    line = refused(install_sh(env=never_pip))
    assert f"{home.path} belongs to user 65501" in line
    assert line.endswith(f"run: sh {CHECKOUT}/install.sh")
    assert not (home.path / ".ipython").exists()


@pytest.mark.full
@pytest.mark.parametrize("is_folder", [False, True])
def test_earlier_backup(home: Home, env: dict[str, str], *, is_folder: bool) -> None:
    """What has the name of the backup already is neither overwritten nor removed."""
    home.write(b"x = 2")
    home.backup.mkdir() if is_folder else home.backup.write_bytes(b"x = 1\n")
    before = home.files()
    done(install_sh(env=env))
    done(install_sh("--uninstall", env=env))
    assert home.files() == before
    assert home.backup.is_dir() == is_folder


@pytest.mark.full
def test_disk_full(home: Home, env: dict[str, str]) -> None:
    """If the lines can't be written, the file is as it was, and no other file is left."""
    home.write(b"x = 1\n" * 1000)
    before = home.files()
    limit = ("sh", "-c", 'ulimit -f 8; exec "$@"', "--")  # blocks of 512 bytes
    line = complained(install_sh(env=env, prefix=limit))
    assert f"{home.backup} could not be written (File too large), and is unchanged" in line
    home.backup.write_bytes(b"of mine\n")
    line = complained(install_sh(env=env, prefix=limit))
    assert f"{home.config} could not be written (File too large), and is unchanged" in line
    home.backup.unlink()
    assert home.files() == before


# --- a clone next to the notebook ----------------------------------------------------------------


@pytest.fixture
def above(tmp_path: Path) -> Path:
    """Return the folder above a clone called reserve_gpu."""
    (tmp_path / "work" / "reserve_gpu" / "reserve_gpu").mkdir(parents=True)
    (tmp_path / "work" / "reserve_gpu" / "reserve_gpu" / "__init__.py").touch()
    return tmp_path / "work"


@pytest.mark.process
def test_the_errors_of_a_clone_next_to_the_notebook_are_explained(
    above: Path, home: Home, tmp_path: Path
) -> None:
    """docs/install.md names what Python and IPython say if they take a clone for the package."""
    python = make_environment(tmp_path / "environment")
    page = (CHECKOUT / "docs" / "install.md").read_text()
    for line, said in [
        (["-m", "IPython", "-c", "%load_ext reserve_gpu"], "not an IPython extension"),
        (["-c", "import reserve_gpu; reserve_gpu.reserve()"], "has no attribute 'reserve'"),
        (["-m", "reserve_gpu"], "No module named reserve_gpu.__main__"),
        (["-c", "import reserve_gpu.system"], "No module named 'reserve_gpu.system'"),
    ]:
        command = [str(python), *line]
        result = subprocess.run(
            command, env=home.environ(), cwd=above, capture_output=True, text=True, check=False
        )
        assert said in result.stdout + result.stderr
        assert said in page


@pytest.mark.process
def test_the_lines_do_not_take_a_folder_for_the_package(
    above: Path, home: Home, env: dict[str, str], other: dict[str, str]
) -> None:
    """An environment without the package loads nothing, also in the folder above a clone."""
    done(install_sh(env=env))
    command = [other["PYTHON"], "-m", "IPython", "print('loaded', __import__('sys').modules)"]
    loaded = subprocess.check_output(command, env=home.environ(), cwd=above, text=True)
    assert "'traitlets'" in loaded
    assert "'reserve_gpu'" not in loaded


def test_readme_clones_into_a_folder_that_python_cannot_import() -> None:
    """The clone that README.md makes is never taken for the package."""
    readme = (CHECKOUT / "README.md").read_text()
    (folder,) = re.findall(r"git clone \S+ (\S+) && cd \1", readme)
    assert not folder.isidentifier()


# --- where the file is ---------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize(
    "case",
    [
        "home",
        "no HOME",
        "IPYTHONDIR",
        "relative",
        "tilde",
        "user",
        "dots",
        "XDG",
        "XDG and home",
        "XDG link",
    ],
)
def test_same_place_as_ipython(case: str, home: Home, env: dict[str, str]) -> None:
    """The file is where IPython.paths.get_ipython_dir says, with and without IPYTHONDIR."""
    starts = {
        "IPYTHONDIR": str(home.path),
        "relative": "..",
        "no HOME": str(home.path),
        "tilde": "~",
        "user": f"~{USER}/{os.path.relpath(home.path, pwd.getpwnam(USER).pw_dir)}",
        "dots": f"{home.path}/./x/..//",
    }
    if case in starts:
        env["IPYTHONDIR"] = f"{starts[case]}/ipython dir" + "/" * (case == "dots")
    if case == "no HOME":
        del env["HOME"]
    if case.startswith("XDG"):
        env["XDG_CONFIG_HOME"] = str(home.path / "xdg")
        (home.path / "elsewhere").mkdir()
        (home.path / "xdg").mkdir()
        if case == "XDG link":
            (home.path / "xdg" / "ipython").symlink_to("../elsewhere")
        else:
            (home.path / "xdg" / "ipython").mkdir()
    if case == "XDG and home":
        (home.path / ".ipython").mkdir()
    cwd = home.path / "here"
    cwd.mkdir()
    install_sh(env=env, cwd=cwd)  # the small IPython does not know all these places
    asked = "from IPython.paths import get_ipython_dir; print(get_ipython_dir())"
    command = [sys.executable, "-W", "ignore", "-c", asked]
    answer = subprocess.check_output(command, env=env, cwd=cwd, text=True).strip()
    (made,) = home.path.rglob("ipython_config.py")  # IPython 7 moves the whole folder when asked
    assert made == (cwd / answer / "profile_default" / "ipython_config.py").resolve()


# --- refusals: one line, and nothing changed -----------------------------------------------------


@pytest.fixture
def never_pip(python: Path, home: Home, tmp_path: Path) -> dict[str, str]:
    """Return the environment of an installation that must not get as far as pip."""
    trap = 'case "$1 $2" in "-m pip") echo "pip was called" >&2; exit 99 ;; esac'
    return home.environ(PYTHON=make_program(tmp_path / "python", trap, f'exec "{python}" "$@"'))


def make_folder(path: Path) -> None:
    path.mkdir(parents=True)


def make_pipe(path: Path) -> None:
    path.parent.mkdir(parents=True)
    os.mkfifo(path)


def make_dead_link(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.symlink_to("no folder/of this name")


def make_loop(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.symlink_to(path.name)


def make_file_for_folder(path: Path) -> None:
    path.parents[1].write_text("a file")


@pytest.mark.full
@pytest.mark.parametrize(
    "make", [make_folder, make_pipe, make_dead_link, make_loop, make_file_for_folder]
)
def test_bad_place(make: Callable[[Path], object], home: Home, never_pip: dict[str, str]) -> None:
    """A configuration that can't be made is one line before pip is called; uninstall needs none."""
    make(home.config)
    names = set(home.path.rglob("*"))
    assert f"{home.config} can't be created" in refused(install_sh(env=never_pip))
    assert "Nothing to remove" in done(install_sh("--uninstall", env=never_pip))
    assert set(home.path.rglob("*")) == names


def without_override() -> tuple[str, ...]:
    """Return what to put before a command, so that file modes hold for it, for root as well."""
    if os.geteuid() != 0:
        return ()
    prefix = ("setpriv", "--bounding-set", "-dac_override,-dac_read_search")
    try:
        subprocess.run([*prefix, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs setpriv, as file modes do not hold for root")
    return prefix


@pytest.mark.full
def test_no_permission(home: Home, never_pip: dict[str, str]) -> None:
    """A home in which this user may not write is one line, and nothing is made."""
    prefix = without_override()
    home.path.chmod(0o555)
    said = refused(install_sh(env=never_pip, prefix=prefix))
    assert f"{home.path} is not a writable folder" in said
    assert home.files() == {}


@pytest.mark.full
@pytest.mark.parametrize(
    ("data", "arguments", "code", "said"),
    [
        (OWN_LINE, [], 0, "already loads it at every start of"),
        (OWN_LINE, ["--uninstall"], 0, "a line of your own"),
        (b"x = 1\n", ["--uninstall"], 0, "Nothing to remove"),
        (BLOCK_OF_ANOTHER, ["--uninstall"], 0, "are kept for\n/x/bin/python3.9\n"),
        (b"x = 1\n", [], 1, "no permission to change"),
        (OLD_BLOCK, [], 1, "no permission to change"),
        (OLD_BLOCK, ["--uninstall"], 1, "no permission to change"),
    ],
)
def test_read_only_file(
    data: bytes, arguments: list[str], code: int, said: str, home: Home, env: dict[str, str]
) -> None:
    """A file that may only be read is refused where it would have to be changed, and only there."""
    prefix = without_override()
    home.write(data)
    home.config.chmod(0o444)
    home.config.parent.chmod(0o555)
    before = home.files()
    result = install_sh(*arguments, env=env, prefix=prefix)
    assert (result.returncode, said in result.stdout + result.stderr) == (code, True)
    assert not code or refused(result)
    assert home.files() == before


@pytest.mark.full
def test_pip_fails(home: Home, python: Path, tmp_path: Path) -> None:
    """Where pip fails, its words are seen and the configuration is not touched."""
    failing = 'case "$1 $2" in "-m pip") echo "no network" >&2; exit 3 ;; esac'
    program = make_program(tmp_path / "python", failing, f'exec "{python}" "$@"')
    result = install_sh(env=home.environ(PYTHON=program))
    assert result.returncode == 1
    assert "no network" in result.stderr
    assert "was not changed" in result.stderr
    assert home.files() == {}


# In a session of its own, with the signals that a shell ignores in the background.
DEFAULT = ("env", "--default-signal", "setsid", "-w")


@pytest.mark.full
@pytest.mark.parametrize("name", ["HUP", "INT", "QUIT", "TERM"])
def test_a_signal_while_pip_runs(name: str, home: Home, python: Path, tmp_path: Path) -> None:
    """A signal to install.sh and pip leaves no file, neither at home nor among temporary ones."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    stop = f'case "$1 $2" in "-m pip") kill -s {name} 0; sleep 60 ;; esac'
    program = make_program(tmp_path / "python", stop, f'exec "{python}" "$@"')
    result = install_sh(env=home.environ(PYTHON=program, TMPDIR=temporary), prefix=DEFAULT)
    assert result.returncode == 128 + signal.Signals[f"SIG{name}"]
    assert home.files() == {}
    assert list(temporary.iterdir()) == []


@pytest.mark.full
def test_externally_managed(home: Home, tmp_path: Path) -> None:
    """An externally managed Python is explained, with the commands that make an environment."""
    stdlib = tmp_path / "lib" / f"python{sysconfig.get_python_version()}"
    stdlib.mkdir(parents=True)
    notice = stdlib / "EXTERNALLY-MANAGED"
    for entry in Path(os.__file__).parent.iterdir():
        if entry.name != notice.name:  # opening a link to it would write into this machine's Python
            (stdlib / entry.name).symlink_to(entry)
    notice.write_text("[externally-managed]\nError=ask the distribution\n")
    trap = 'case "$1 $2" in "-m pip") echo "pip was called" >&2; exit 99 ;; esac'
    base = Path(sys.base_prefix, "bin", "python3")
    program = make_program(tmp_path / "python", trap, f'PYTHONHOME="{tmp_path}" exec {base} "$@"')
    result = install_sh(env=home.environ(PYTHON=program))
    assert (result.returncode, result.stdout) == (1, "")
    assert "is externally managed" in result.stderr
    assert str(notice) in result.stderr
    assert f'"{program}" -m venv ~/.venvs/reserve_gpu' in result.stderr
    assert home.files() == {}
    # Who has told pip to install anyway is not stopped.
    result = install_sh(env=home.environ(PYTHON=program, PIP_BREAK_SYSTEM_PACKAGES="1"))
    assert "pip was called" in result.stderr or "has no pip" in result.stderr


@pytest.mark.full
def test_too_old(home: Home, tmp_path: Path) -> None:
    """A Python before 3.10 is one line that names it."""
    old = "import sys; sys.version_info = (3, 9, 18, 'final', 0); exec(sys.argv[1])"
    program = make_program(tmp_path / "python", f'"{sys.executable}" -c "{old}" "$2"')
    said = refused(install_sh(env=home.environ(PYTHON=program)))
    assert f"{program} is older than 3.10" in said


@pytest.mark.full
def test_no_pip(home: Home, tmp_path: Path) -> None:
    """A Python without pip is one line with the command that adds it."""
    venv.create(tmp_path / "bare", symlinks=True)
    python = tmp_path / "bare" / "bin" / "python"
    said = refused(install_sh(env=home.environ(PYTHON=python)))
    assert f'"{python}" -m ensurepip' in said
    assert home.files() == {}


@pytest.mark.process
@pytest.mark.parametrize("python", ["/no/such/python", "no-such-python", "/etc/hostname", "/tmp"])
def test_no_such_python(python: str, home: Home) -> None:
    """A PYTHON that cannot be run is one line that names it."""
    assert python in refused(install_sh(env=home.environ(PYTHON=python)))


@pytest.mark.full
def test_no_python(home: Home, tmp_path: Path) -> None:
    """No Python on PATH is one line that says what to do."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("dirname", "mktemp", "rm"):
        (tools / tool).symlink_to(shutil.which(tool) or tool)
    assert "Install Python 3.10 or newer" in refused(install_sh(env=home.environ(PATH=tools)))


@pytest.mark.full
def test_first_python_on_path(home: Home, python: Path, tmp_path: Path) -> None:
    """Without PYTHON= it is the python3 on PATH; the ipython beside it is what to type."""
    program = make_program(tmp_path / "bin" / "python3", f'exec "{python}" "$@"')
    make_program(tmp_path / "bin" / "ipython")
    said = done(install_sh(env=home.environ(PATH=f"{program.parent}:{os.environ['PATH']}")))
    assert said.startswith(f"Installing reserve_gpu into {program} ...\n")
    assert said.endswith("\nTry it: ipython -c '%reserve_gpu'\n")


# --- the real pip and the real IPython -----------------------------------------------------------

IS_LOADED = "print('loaded:', 'reserve_gpu' in get_ipython().extension_manager.loaded)"


class Installed(NamedTuple):
    """What the one real installation left."""

    checkout: Path
    checkout_before: dict[str, bytes]
    ipython_dir: Path
    python: Path
    said: str
    offline: Path  # this Python as install.sh had it: its pip asks no network where it need not
    plain: Path  # another environment, without reserve_gpu


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("real")
    checkout = copy_checkout(folder / "a checkout [with] 100% odd 'name'")
    before = files(checkout)
    python = make_environment(folder / "environment")
    make_environment(folder / "plain")
    version = metadata.version("setuptools") if find_spec("setuptools") else "0"
    is_enough = int(version.split(".")[0]) >= 77  # as pyproject.toml wants; else pip fetches it
    options = "--no-deps" + " --no-build-isolation --no-index" * is_enough
    offline = make_program(
        folder / "offline" / "python",
        f'if [ "$2 $3" = "pip install" ]; then shift 3; set -- -m pip install {options} "$@"; fi',
        f'exec "{python}" "$@"',
    )
    env = Home(folder).environ(PYTHON="offline/python", IPYTHONDIR="ipython dir")
    said = done(install_sh(env=env, script=checkout / "install.sh", cwd=folder))
    plain = folder / "plain" / "bin" / "python"
    return Installed(checkout, before, folder / "ipython dir", python, said, offline, plain)


def run_ipython(python: Path, env: dict[str, str]) -> str:
    command = [str(python), "-m", "IPython", "--no-banner", "--colors=NoColor", "-c", IS_LOADED]
    env |= {"TERM": "dumb"}  # no window title from IPython 7
    result = subprocess.run(command, env=env, cwd="/", capture_output=True, text=True, check=True)
    return result.stdout + result.stderr


@pytest.mark.full
@pytest.mark.xdist_group("real installation")
def test_ipython_loads_it(installed: Installed, home: Home) -> None:
    """IPython loads the extension by that profile; where the package is not, it says nothing."""
    env = home.environ(IPYTHONDIR=installed.ipython_dir)
    assert run_ipython(installed.python, env) == "loaded: True\n"
    assert run_ipython(installed.plain, env) == "loaded: False\n"


@pytest.mark.full
@pytest.mark.xdist_group("real installation")
def test_real_installation(installed: Installed) -> None:
    """It says which file loads what; the checkout, which may be another's, stays as it was."""
    package, config, command = installed.said.splitlines()[-3:]
    assert package.startswith("Installed reserve_gpu ")
    assert str(installed.ipython_dir / "profile_default" / "ipython_config.py") in config
    assert command == f"Try it: \"{installed.offline}\" -m IPython -c '%reserve_gpu'"
    assert files(installed.checkout) == installed.checkout_before


@pytest.mark.full
@pytest.mark.xdist_group("real installation")
@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("ipython_config.py", OWN_LINE, "already loads it at every start of"),
        ("ipython_config.py", b"raise ValueError('of mine')\n", "ValueError: of mine"),
        (
            "ipython_config.json",
            b'{"InteractiveShellApp": {"extensions": ["autoreload"]}}',
            "the extensions are replaced by InteractiveShellApp.extensions in",
        ),
        (
            "ipython_kernel_config.py",
            b"get_config().IPKernelApp.extensions = ['autoreload']\n",
            "kernels do not load reserve_gpu",
        ),
        (
            "ipython_kernel_config.py",
            b"get_config().IPKernelApp.extensions.append('autoreload')\n",
            "would prevent IPython or kernels from starting",
        ),
        (
            "ipython_config.py",
            b"get_config().TerminalIPythonApp.extensions = ['reserve_gpu']\n",
            "Loaded at every start of IPython and Jupyter kernels by",
        ),
        ("startup/1.py", b"1 / 0\n", "Loaded at every start"),
        ("startup/1.py", b"__import__('os')._exit(0)\n", "unknown reason"),
    ],
)
def test_what_the_real_ipython_does(
    name: str, data: bytes, said: str, installed: Installed, home: Home, tmp_path: Path
) -> None:
    """The report about the user's own configuration is true of the real IPython and kernel."""
    path = home.config.parent / name
    path.parent.mkdir(parents=True)
    path.write_bytes(data)
    no_pip = 'case "$1 $2" in "-m pip") exit ;; esac'
    program = make_program(tmp_path / "python", no_pip, f'exec "{installed.python}" "$@"')
    result = install_sh(env=home.environ(PYTHON=program))
    assert said in result.stdout + result.stderr
    is_in_kernel = ask("kernel", home, str(installed.python)) == "loaded"
    is_loaded = "loaded: True" in run_ipython(installed.python, home.environ()) and is_in_kernel
    assert result.returncode == (0 if is_loaded else 1)


@pytest.mark.full
def test_real_uninstallation(installed: Installed, home: Home, tmp_path: Path) -> None:
    """`--uninstall` has pip remove the package, also one that can't be imported, with odd files."""
    cwd = tmp_path / "cwd"
    (cwd / "reserve_gpu").mkdir(parents=True)
    for name in ("ast", "typing", "random", "runpy", "pip", "IPython", "reserve_gpu/__init__"):
        (cwd / f"{name}.py").write_text(f"raise SystemExit('{name} of the current folder')\n")
    python = make_environment(tmp_path / "environment")
    place = packages_of(python)
    package = {
        "reserve_gpu/__init__.py": "raise SystemExit('the older one was imported')\n",
        "reserve_gpu-1.9.dist-info/METADATA": "Metadata-Version: 2.1\nName: x\nVersion: 1.9\n",
        "reserve_gpu-1.9.dist-info/INSTALLER": "pip\n",
    }
    record = "reserve_gpu-1.9.dist-info/RECORD"
    package |= {record: "".join(f"{name},,\n" for name in (*package, record))}
    for name, text in package.items():
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text(text)
    home.write(OLD_BLOCK)
    env = home.environ(PYTHON=python)
    assert "Uninstalled" in done(install_sh("--uninstall", env=env, cwd=cwd))
    assert list(place.glob("reserve_gpu*")) == []
    assert not home.config.exists()


@pytest.mark.full
def test_a_checkout_is_no_installation(home: Home, env: dict[str, str], tmp_path: Path) -> None:
    """What building in the checkout has left there is not taken for the installed package."""
    checkout = copy_checkout(tmp_path / "checkout")
    (checkout / "reserve_gpu.egg-info").mkdir()
    (checkout / "reserve_gpu.egg-info" / "PKG-INFO").write_text("Name: reserve_gpu\nVersion: 2\n")
    script = checkout / "install.sh"
    said = done(install_sh("--uninstall", env=env, script=script, cwd=checkout))
    assert said.startswith("Nothing to uninstall")
