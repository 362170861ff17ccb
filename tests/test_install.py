"""install.sh, run as a user runs it.

Two real installations by pip go into fresh virtual environments that find the dependencies of the
tests' own. The many cases of what can stand in ipython_config.py then use the first of them,
through a Python whose `-m pip install` has nothing left to do.
"""

from __future__ import annotations

import functools
import os
import pwd
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traitlets.config.loader import LazyConfigValue, PyFileConfigLoader

from reserve_gpu import autoload

if TYPE_CHECKING:
    from collections.abc import Callable

CHECKOUT = Path(__file__).resolve().parent.parent
SHELL = shutil.which("dash") or "/bin/sh"
IS_LOADED = "print('loaded:', 'reserve_gpu' in get_ipython().extension_manager.loaded)"


class Home(NamedTuple):
    """A person's home directory, in which nothing of theirs is set but what a test sets."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / ".ipython" / "profile_default" / "ipython_config.py"

    def write(self, data: bytes) -> None:
        self.config.parent.mkdir(parents=True, exist_ok=True)
        self.config.write_bytes(data)

    def tree(self) -> dict[str, bytes | None]:
        return tree(self.path)

    def environ(self, **more: str | Path) -> dict[str, str]:
        unwanted = ("IPYTHON", "PYTHON", "VIRTUAL_ENV", "XDG_", "COV_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
        kept["TERM"] = "dumb"  # no window title from IPython 7
        return kept | {"HOME": str(self.path)} | {name: str(value) for name, value in more.items()}


def tree(folder: Path) -> dict[str, bytes | None]:
    """Every path below, with the bytes of the files."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def install_sh(
    *arguments: str, env: dict[str, str], script: Path = CHECKOUT / "install.sh", cwd: str = "/"
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SHELL, str(script), *arguments],
        env=env,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def done(result: subprocess.CompletedProcess[str]) -> str:
    """What it said, where it ended well and complained of nothing."""
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout


def refused(result: subprocess.CompletedProcess[str]) -> str:
    """The one line it said, where it refused."""
    assert (result.returncode, result.stdout) == (1, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("install.sh: ")
    return line


def make_environment(folder: Path) -> Path:
    """Make an environment with the packages of this one, except reserve_gpu; return its Python."""
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    asked = "import sysconfig; print(sysconfig.get_path('purelib'))"
    target = Path(subprocess.check_output([str(python), "-c", asked], text=True).strip())
    for source in (Path(entry) for entry in sys.path if entry.endswith("-packages")):
        for entry in source.iterdir():
            wanted = not entry.name.startswith(("reserve_gpu", "__editable__", "__pycache__"))
            if wanted and entry.suffix != ".pth" and not (target / entry.name).exists():
                (target / entry.name).symlink_to(entry)
    return python


def make_program(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(("#!/bin/sh", *lines, "")))
    path.chmod(0o755)
    return path


def copy_checkout(folder: Path) -> Path:
    unwanted = shutil.ignore_patterns(".*", "__pycache__", "tests", "build", "*.egg-info")
    shutil.copytree(CHECKOUT, folder, ignore=unwanted)
    return folder


class Installed(NamedTuple):
    """What the one real installation left, and the Pythons of the quick cases."""

    checkout: Path
    checkout_before: dict[str, bytes | None]
    ipython_dir: Path
    python: Path
    said: str
    pip_is_done: Path  # the same Python; its pip install succeeds without doing anything
    plain: Path  # another environment, without reserve_gpu


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("install")
    checkout = copy_checkout(folder / "a checkout [with] 100% odd 'name'")
    before = tree(checkout)
    python = make_environment(folder / "environment")
    ipython_dir = folder / "ipython dir"
    env = Home(Path.home()).environ(PYTHON="environment/bin/python", IPYTHONDIR="ipython dir")
    said = done(install_sh(env=env, script=checkout / "install.sh", cwd=str(folder)))
    pip_is_done = make_program(
        folder / "pip is done",
        'case "$1 $2 $3" in "-m pip install") exit 0 ;; esac',
        f'exec "{python}" "$@"',
    )
    plain = make_environment(folder / "plain")
    return Installed(checkout, before, ipython_dir, python, said, pip_is_done, plain)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    (tmp_path / "home").mkdir()
    return Home(tmp_path / "home")


@pytest.fixture
def add(installed: Installed, home: Home) -> dict[str, str]:
    """Environment of an installation where pip has nothing to do."""
    return home.environ(PYTHON=installed.pip_is_done)


@pytest.fixture
def take_back(installed: Installed, home: Home) -> dict[str, str]:
    """Environment of an uninstallation where pip has nothing to do."""
    return home.environ(PYTHON=installed.plain)


def run_ipython(python: Path, env: dict[str, str]) -> str:
    command = [str(python), "-m", "IPython", "--no-banner", "--colors=NoColor", "-c", IS_LOADED]
    result = subprocess.run(command, env=env, cwd="/", capture_output=True, text=True, check=True)
    return result.stdout + result.stderr


def extensions(config: Path) -> list[str]:
    """What IPython's own loader reads out of a configuration."""
    found = PyFileConfigLoader(config.name, str(config.parent)).load_config()
    value = found.InteractiveShellApp.extensions
    return list(value.get_value([])) if isinstance(value, LazyConfigValue) else list(value)


# --- the whole of it -----------------------------------------------------------------------------


def test_ipython_loads_it(installed: Installed) -> None:
    """After `sh install.sh`, IPython has loaded the extension when it starts."""
    env = Home(Path.home()).environ(IPYTHONDIR=installed.ipython_dir)
    assert "loaded: True" in run_ipython(installed.python, env)


def test_it_says_what_it_did(installed: Installed) -> None:
    """The last three lines say what was installed, which file loads it, and what to type next."""
    package, config, command = installed.said.splitlines()[-3:]
    assert package.startswith("Installed reserve_gpu 2.")
    assert str(installed.ipython_dir / "profile_default" / "ipython_config.py") in config
    assert command == f"Try it: {installed.python} -m IPython -c '%reserve_gpu'"


def test_checkout_stays_clean(installed: Installed) -> None:
    """Building leaves nothing in the checkout, which may belong to someone else."""
    assert tree(installed.checkout) == installed.checkout_before


def test_other_environments_are_not_disturbed(installed: Installed) -> None:
    """IPython of an environment without the package starts with that profile and says nothing."""
    env = Home(Path.home()).environ(IPYTHONDIR=installed.ipython_dir)
    assert run_ipython(installed.plain, env) == "loaded: False\n"


def test_uninstall(tmp_path: Path) -> None:
    """`--uninstall` removes the package and all that was made; a second one has nothing to do."""
    python = make_environment(tmp_path / "environment")
    before = tree(tmp_path)
    env = Home(Path.home()).environ(PYTHON=python, IPYTHONDIR=tmp_path / "ipython")
    done(install_sh(env=env))
    assert "Uninstalled" in done(install_sh("--uninstall", env=env))
    assert {path for path in tree(tmp_path) if "__pycache__" not in path} == set(before)
    again = done(install_sh("--uninstall", env=env))
    assert [line.split(":")[0] for line in again.splitlines()] == [
        "Nothing to uninstall",
        "Nothing to take out",
    ]


def install_by_hand(python: Path) -> Path:
    """Put an older package, which can't even be imported, where pip would; return the place."""
    asked = "import sysconfig; print(sysconfig.get_path('purelib'))"
    place = Path(subprocess.check_output([str(python), "-c", asked], text=True).strip())
    files = {
        "reserve_gpu/__init__.py": "raise SystemExit('the older one was imported')\n",
        "reserve_gpu-1.9.dist-info/METADATA": "Metadata-Version: 2.1\nName: x\nVersion: 1.9\n",
        "reserve_gpu-1.9.dist-info/INSTALLER": "pip\n",
    }
    record = "reserve_gpu-1.9.dist-info/RECORD"
    files |= {record: "".join(f"{name},,\n" for name in (*files, record))}
    for name, text in files.items():
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text(text)
    return place


def test_files_in_the_way(home: Home, add: dict[str, str], tmp_path: Path) -> None:
    """No file of the current folder or of an older package is taken for a module that it needs."""
    cwd = tmp_path / "cwd"
    (cwd / "reserve_gpu").mkdir(parents=True)
    modules = ("ast", "typing", "random", "runpy", "dask", "pip", "reserve_gpu/__init__")
    for name in modules:
        (cwd / f"{name}.py").write_text(f"raise SystemExit('{name} of the current folder')\n")
    assert "new file" in done(install_sh(env=add, cwd=str(cwd)))
    python = make_environment(tmp_path / "environment")
    place = install_by_hand(python)
    env = home.environ(PYTHON=python)
    assert "Uninstalled" in done(install_sh("--uninstall", env=env, cwd=str(cwd)))
    assert list(place.glob("reserve_gpu*")) == []
    assert not home.config.exists()


def test_a_checkout_is_no_installation(
    home: Home, take_back: dict[str, str], tmp_path: Path
) -> None:
    """What building in the checkout has left there is not taken for the installed package."""
    checkout = copy_checkout(tmp_path / "checkout")
    (checkout / "reserve_gpu.egg-info").mkdir()
    (checkout / "reserve_gpu.egg-info" / "PKG-INFO").write_text("Name: reserve_gpu\nVersion: 2\n")
    script = checkout / "install.sh"
    said = done(install_sh("--uninstall", env=take_back, script=script, cwd=str(checkout)))
    assert said.startswith("Nothing to uninstall")


# --- what can stand in ipython_config.py ---------------------------------------------------------

PIECES = [b"\r", b"\n", b"\r\n", b"x = 1", b"#", autoload.new_file(2), autoload.BODY, autoload.HEAD]


@settings(deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(PIECES) | st.binary()).map(b"".join))
def test_any_bytes(data: bytes) -> None:
    """Whatever is in a configuration, adding the lines and taking them out leaves just that."""
    data = autoload.without(data).data
    assert autoload.without(data + autoload.behind(data)) == (data, False, 0)


CONFIGS = {
    "empty": b"",
    "usual": b"c = get_config()\nc.InteractiveShell.autocall = 1\n",
    "no line break at the end": b"c = get_config()\nc.InteractiveShell.autocall = 1",
    "a comment at the end": b"x = 1\n# c.InteractiveShellApp.extensions.append('reserve_gpu')",
    "an indented end": b"if True:\n    x = 1\n    \n",
    "an assignment": b"c = get_config()\nc.InteractiveShellApp.extensions = ['autoreload']\n",
    "CRLF": b"c = get_config()\r\nc.InteractiveShell.autocall = 1\r\n",
    "CRLF without the last": b"x = 1\r\nc = get_config()",
    "CR alone at the end": b"x = 1\nc = get_config()\r",
    "latin-1": b"# -*- coding: latin-1 -*-\nx = 'caf\xe9'\n",
    "byte order mark": b"\xef\xbb\xbfc = get_config()\n",
}


@pytest.mark.parametrize("before", [pytest.param(data, id=name) for name, data in CONFIGS.items()])
def test_existing_file(
    before: bytes, home: Home, add: dict[str, str], take_back: dict[str, str]
) -> None:
    """What stands in the file stays byte for byte, is added to once, and uninstall restores it."""
    home.write(before)
    untouched = home.tree()
    done(install_sh(env=add))
    once = home.tree()
    assert home.config.read_bytes().startswith(before)
    assert "reserve_gpu" in extensions(home.config)
    assert extensions(home.config).count("reserve_gpu") == 1
    done(install_sh(env=add))
    assert home.tree() == once
    done(install_sh("--uninstall", env=take_back))
    assert home.tree() == untouched


UNREADABLE = {
    "encoding": b"x = 'caf\xe9'\n",
    "syntax": b"this is not Python\n",
    "null": b"x = 1\0\n",
    "too deep": b"x = " + b"1 + " * 20_000 + b"1\n",
}


@pytest.mark.parametrize("before", UNREADABLE.values(), ids=UNREADABLE)
def test_unreadable_file(
    before: bytes, home: Home, add: dict[str, str], take_back: dict[str, str]
) -> None:
    """A file that Python cannot read is kept, added to once and given back all the same."""
    home.write(before)
    for _ in range(2):
        done(install_sh(env=add))
        data = home.config.read_bytes()
        assert data.startswith(before)
        assert data.count(b"extensions.append") == 1
    done(install_sh("--uninstall", env=take_back))
    assert home.config.read_bytes() == before


def test_no_file(home: Home, add: dict[str, str], take_back: dict[str, str]) -> None:
    """The file and folders that it made are gone after uninstall, where nothing was put in them."""
    done(install_sh(env=add))
    assert extensions(home.config) == ["reserve_gpu"]
    done(install_sh("--uninstall", env=take_back))
    assert home.tree() == {}


def test_made_file_that_was_added_to(
    home: Home, add: dict[str, str], take_back: dict[str, str]
) -> None:
    """A file that it made, and the user has added to, is kept with the user's lines."""
    done(install_sh(env=add))
    with home.config.open("ab") as file:
        file.write(b"x = 1\n")
    done(install_sh("--uninstall", env=take_back))
    assert home.config.read_bytes() == b"x = 1\n"


def test_lines_added_behind(home: Home, add: dict[str, str], take_back: dict[str, str]) -> None:
    """Lines that the user wrote behind the added ones do not run into those before on uninstall."""
    home.write(b"x = 1")
    done(install_sh(env=add))
    with home.config.open("ab") as file:
        file.write(b"y = 2")
    done(install_sh("--uninstall", env=take_back))
    assert home.config.read_bytes() == b"x = 1\ny = 2"


OWN_LINES = [
    b"c.InteractiveShellApp.extensions.append('reserve_gpu')",
    b"c.InteractiveShellApp.extensions += ['autoreload', 'reserve_gpu']",
    b"c.InteractiveShellApp.extensions = [\n    'reserve_gpu',\n]",
    b"if True:\n    c.InteractiveShellApp.extensions.extend(('reserve_gpu',))",
]


@pytest.mark.parametrize("line", OWN_LINES)
def test_own_line(line: bytes, home: Home, add: dict[str, str], take_back: dict[str, str]) -> None:
    """Where the user's own line loads the extension, nothing is added, and uninstall leaves it."""
    home.write(b"c = get_config()\n" + line + b"\n")
    before = home.tree()
    assert "as before" in done(install_sh(env=add))
    assert home.tree() == before
    assert "is your own" in done(install_sh("--uninstall", env=take_back))
    assert home.tree() == before


def test_example_configuration_counts(home: Home, add: dict[str, str]) -> None:
    """A copy of the checkout's ipython_config.py loads the extension and is not added to."""
    home.write((CHECKOUT / "ipython_config.py").read_bytes())
    assert extensions(home.config) == ["reserve_gpu"]
    before = home.tree()
    done(install_sh(env=add))
    assert home.tree() == before


@pytest.mark.parametrize("lost", ["# <<<", "# >>>", "    get_config()"])
def test_damaged_lines(
    lost: str, home: Home, add: dict[str, str], take_back: dict[str, str]
) -> None:
    """Where the added lines were edited, uninstall removes none, names the place and exits 1."""
    home.write(b"x = 1\n")
    done(install_sh(env=add))
    text = home.config.read_text()
    lines = [line for line in text.splitlines() if not line.startswith(lost)] + ["y = 2", ""]
    home.write("\n".join(lines).encode())
    before = home.tree()
    result = install_sh("--uninstall", env=take_back)
    assert result.returncode == 1
    assert "remove them by hand" in result.stderr
    assert home.tree() == before


def test_links_and_modes(
    home: Home, add: dict[str, str], take_back: dict[str, str], tmp_path: Path
) -> None:
    """A symbolic link stays one; the file behind it keeps its inode and its mode."""
    kept = tmp_path / "dotfiles.py"
    kept.write_bytes(b"x = 1\n")
    kept.chmod(0o600)
    inode = kept.stat().st_ino
    home.config.parent.mkdir(parents=True)
    home.config.symlink_to(kept)
    done(install_sh(env=add))
    assert extensions(home.config) == ["reserve_gpu"]
    assert home.config.readlink() == kept
    assert (kept.stat().st_ino, kept.stat().st_mode & 0o777) == (inode, 0o600)
    (backup,) = home.config.parent.glob("*.before-*")
    assert backup.stat().st_mode & 0o777 == 0o600
    done(install_sh("--uninstall", env=take_back))
    assert home.config.readlink() == kept
    assert kept.read_bytes() == b"x = 1\n"


def test_link_to_nothing_yet(
    home: Home, add: dict[str, str], take_back: dict[str, str], tmp_path: Path
) -> None:
    """A link whose file does not exist yet is written through, and is as it was after uninstall."""
    home.config.parent.mkdir(parents=True)
    home.config.symlink_to(tmp_path / "later.py")
    done(install_sh(env=add))
    assert extensions(tmp_path / "later.py") == ["reserve_gpu"]
    done(install_sh("--uninstall", env=take_back))
    assert home.config.is_symlink()
    assert not (tmp_path / "later.py").exists()


def test_backups(home: Home, add: dict[str, str], take_back: dict[str, str]) -> None:
    """The file as it was is kept beside it, and no earlier copy with other text is overwritten."""
    home.write(b"x = 2\n")
    first = home.config.with_name("ipython_config.py.before-reserve_gpu")
    first.write_bytes(b"x = 1\n")
    done(install_sh(env=add))
    second = home.config.with_name("ipython_config.py.before-reserve_gpu.2")
    assert (first.read_bytes(), second.read_bytes()) == (b"x = 1\n", b"x = 2\n")
    done(install_sh("--uninstall", env=take_back))
    assert (first.exists(), second.exists()) == (True, False)


def test_a_folder_for_a_backup(home: Home, add: dict[str, str], take_back: dict[str, str]) -> None:
    """Something else by the name of a backup is left alone, now and on uninstall."""
    home.write(b"x = 2\n")
    home.config.with_name("ipython_config.py.before-reserve_gpu").mkdir()
    before = home.tree()
    done(install_sh(env=add))
    copy = home.config.with_name("ipython_config.py.before-reserve_gpu.2")
    assert copy.read_bytes() == b"x = 2\n"
    done(install_sh("--uninstall", env=take_back))
    assert home.tree() == before


@pytest.mark.parametrize(
    ("before", "blocks"),
    [(None, 0), (b"x = 1\n", 0), (b"#" * 600, 1), (b"#" * 400, 1)],
    ids=["new file", "backup", "half a backup", "half the lines"],
)
def test_no_room(
    before: bytes | None, blocks: int, home: Home, add: dict[str, str], tmp_path: Path
) -> None:
    """Where the disk is full, for the lines or the backup, all is as it was, without a backup."""
    if before is not None:
        home.write(before)
    untouched = home.tree()
    # What a file may grow to, in blocks of 512 bytes: POSIX, ulimit.
    small = make_program(
        tmp_path / "small",
        f'case "$*" in *" add") ulimit -f {blocks} ;; esac',
        f'exec "{add["PYTHON"]}" "$@"',
    )
    result = install_sh(env=add | {"PYTHON": str(small)})
    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("install.sh: ")
    assert home.tree() == untouched


# --- where the file is ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case", ["home", "IPYTHONDIR", "relative", "tilde", "XDG", "XDG and home", "XDG link"]
)
def test_same_place_as_ipython(case: str, home: Home, add: dict[str, str]) -> None:
    """The file is where IPython.paths.get_ipython_dir says, with and without IPYTHONDIR."""
    env = add | {"XDG_CONFIG_HOME": str(home.path / "xdg")}
    if case in ("IPYTHONDIR", "relative", "tilde"):
        start = {"IPYTHONDIR": str(home.path), "relative": "..", "tilde": "~"}[case]
        env["IPYTHONDIR"] = f"{start}/ipython dir"
    if case.startswith("XDG"):
        (home.path / "xdg").mkdir()
        (home.path / "elsewhere").mkdir()
        if case == "XDG link":
            (home.path / "xdg" / "ipython").symlink_to("../elsewhere")
        else:
            (home.path / "xdg" / "ipython").mkdir()
    if case == "XDG and home":
        (home.path / ".ipython").mkdir()
    cwd = home.path / "here"
    cwd.mkdir()
    done(install_sh(env=env, cwd=str(cwd)))
    asked = "from IPython.paths import get_ipython_dir; print(get_ipython_dir())"
    command = [sys.executable, "-W", "ignore", "-c", asked]
    answer = subprocess.check_output(command, env=env, cwd=cwd, text=True).strip()
    (made,) = home.path.rglob("ipython_config.py")  # IPython 7 moves the whole folder when asked
    assert made == (cwd / answer / "profile_default" / "ipython_config.py").resolve()


# --- refusals: one line, and nothing changed -----------------------------------------------------


@pytest.fixture
def never_pip(installed: Installed, home: Home, tmp_path: Path) -> dict[str, str]:
    """Environment of an installation that must not get as far as pip."""
    program = make_program(
        tmp_path / "python",
        'case "$1 $2" in "-m pip") echo "pip was called" >&2; exit 99 ;; esac',
        f'exec "{installed.plain}" "$@"',
    )
    return home.environ(PYTHON=program)


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


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (make_folder, "is not a file"),
        (make_pipe, "is not a file"),
        (make_dead_link, "leads nowhere"),
        (make_loop, "leads nowhere"),
        (lambda path: path.parents[1].write_text("a file"), "is not a folder"),
        (lambda path: path.parents[2].rmdir(), "there is no folder"),
    ],
    ids=["folder", "pipe", "dead link", "loop", "file for folder", "no home"],
)
def test_bad_place(
    make: Callable[[Path], object], said: str, home: Home, never_pip: dict[str, str]
) -> None:
    """A configuration that cannot be written is one line, before pip is called."""
    make(home.config)
    names = set(home.path.parent.rglob("*"))
    assert said in refused(install_sh(env=never_pip))
    assert set(home.path.parent.rglob("*")) == names


@pytest.mark.parametrize("make", [make_folder, make_pipe, make_dead_link, make_loop])
def test_bad_place_on_uninstall(
    make: Callable[[Path], object], home: Home, take_back: dict[str, str]
) -> None:
    """A configuration that nothing can have been added to does not stand in an uninstall's way."""
    make(home.config)
    names = set(home.path.rglob("*"))
    assert "Nothing to take out" in done(install_sh("--uninstall", env=take_back))
    assert set(home.path.rglob("*")) == names


def test_no_permission(installed: Installed) -> None:
    """A home in which this user may not write is one line, and nothing is made."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to be another user")
    nobody = pwd.getpwnam("nobody")
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        script = copy_checkout(Path(folder, "checkout")) / "install.sh"
        asked = ["sh", "-c", f'test -r "{script}" && "{sys.executable}" -m pip --version']
        user = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
        env = Home(Path(folder)).environ(PYTHON=sys.executable)
        tried = subprocess.run(asked, env=env, cwd="/", capture_output=True, check=False, **user)  # type: ignore[call-overload]
        if tried.returncode:
            pytest.skip("needs a Python that every user can run")
        result = subprocess.run(  # type: ignore[call-overload]
            [SHELL, script], env=env, cwd="/", capture_output=True, text=True, check=False, **user
        )
        assert f"no permission to write in {folder}" in refused(result)
        assert [path.name for path in Path(folder).iterdir()] == ["checkout"]


OWN_LINE = b"get_config().InteractiveShellApp.extensions.append('reserve_gpu')\n"


@pytest.mark.parametrize(
    ("data", "arguments", "code", "said"),
    [
        (OWN_LINE, [], 0, "as before"),
        (OWN_LINE, ["--uninstall"], 0, "is your own"),
        (b"x = 1\n", ["--uninstall"], 0, "Nothing to take out"),
        (b"x = 1\n", [], 1, "no permission to change"),
        (autoload.new_file(0), ["--uninstall"], 1, "no permission to change"),
    ],
)
def test_read_only_file(data: bytes, arguments: list[str], code: int, said: str) -> None:
    """A file that may only be read is refused where it would have to be changed, and only there."""
    user: dict[str, Any] = {}
    if os.geteuid() == 0:
        nobody = pwd.getpwnam("nobody")
        user = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        home = Home(Path(folder))
        home.path.chmod(0o755)
        script = copy_checkout(home.path / "checkout") / "install.sh"
        home.write(data)
        home.config.chmod(0o444)
        home.config.parent.chmod(0o555)
        if not arguments:
            (home.path / "packages" / "reserve_gpu-2.dist-info").mkdir(parents=True)
        skips_pip = 'if [ "$1" = -m ]; then exit 0; fi'
        bare = "-S " if arguments else ""  # where this environment's own packages are not seen
        python = make_program(
            home.path / "python", skips_pip, f'exec "{sys.executable}" {bare}"$@"'
        )
        env = home.environ(PYTHON=python, PYTHONPATH=home.path / "packages")
        run = functools.partial(
            subprocess.run, env=env, cwd="/", capture_output=True, text=True, check=False, **user
        )
        if run([python, "-c", ""]).returncode:
            pytest.skip("needs a Python that every user can run")
        before = home.tree()
        result = run([SHELL, script, *arguments])
        assert (result.returncode, said in result.stdout + result.stderr) == (code, True)
        assert home.tree() == before
        home.config.parent.chmod(0o755)


def test_pip_fails(installed: Installed, home: Home, tmp_path: Path) -> None:
    """Where pip fails, its words are seen and the configuration is not touched."""
    program = make_program(
        tmp_path / "python",
        'case "$1 $2" in "-m pip") echo "no network" >&2; exit 3 ;; esac',
        f'exec "{installed.plain}" "$@"',
    )
    result = install_sh(env=home.environ(PYTHON=program))
    assert result.returncode == 1
    assert "no network" in result.stderr
    assert "was not touched" in result.stderr
    assert home.tree() == {}


def test_externally_managed(home: Home, tmp_path: Path) -> None:
    """An externally managed Python is explained, with the commands that make an environment."""
    stdlib = tmp_path / "lib" / f"python{sysconfig.get_python_version()}"
    stdlib.mkdir(parents=True)
    for entry in Path(os.__file__).parent.iterdir():
        (stdlib / entry.name).symlink_to(entry)
    (stdlib / "EXTERNALLY-MANAGED").write_text("[externally-managed]\nError=ask the distribution\n")
    program = make_program(
        tmp_path / "python",
        f'PYTHONHOME="{tmp_path}" exec "{Path(sys.base_prefix, "bin", "python3")}" "$@"',
    )
    result = install_sh(env=home.environ(PYTHON=program))
    assert (result.returncode, result.stdout) == (1, "")
    assert "is externally managed" in result.stderr
    assert "-m venv ~/.venvs/reserve_gpu" in result.stderr
    assert home.tree() == {}
    # Who has told pip to install all the same is not stopped.
    called = 'case "$1 $2" in "-m pip") echo "pip was called" >&2; exit 99 ;; esac'
    forced = make_program(tmp_path / "forced", called, f'exec "{program}" "$@"')
    env = home.environ(PYTHON=forced, PIP_BREAK_SYSTEM_PACKAGES="1")
    result = install_sh(env=env)
    assert "pip was called" in result.stderr or "has no pip" in result.stderr


def test_too_old(home: Home, tmp_path: Path) -> None:
    """A Python before 3.10 is one line that names it."""
    old = "import sys; sys.version_info = (3, 9, 18, 'final', 0); exec(sys.argv[1])"
    program = make_program(tmp_path / "python", f'"{sys.executable}" -c "{old}" "$2"')
    said = refused(install_sh(env=home.environ(PYTHON=program)))
    assert f"{program} is older than 3.10" in said


def test_no_pip(home: Home, tmp_path: Path) -> None:
    """A Python without pip is one line with the command that adds it."""
    venv.create(tmp_path / "bare", symlinks=True)
    python = tmp_path / "bare" / "bin" / "python"
    said = refused(install_sh(env=home.environ(PYTHON=python)))
    assert f"{python} -m ensurepip" in said
    assert home.tree() == {}


@pytest.mark.parametrize("python", ["/no/such/python", "no-such-python", "/etc/hostname", "/tmp"])
def test_no_such_python(python: str, home: Home) -> None:
    """A PYTHON that cannot be run is one line that names it."""
    assert python in refused(install_sh(env=home.environ(PYTHON=python)))


def test_no_python(home: Home) -> None:
    """No Python on PATH is one line that says what to do."""
    assert "no Python on PATH" in refused(install_sh(env=home.environ(PATH="/nowhere")))


# --- options -------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help(option: str, home: Home) -> None:
    """`--help` prints the usage and does nothing."""
    assert done(install_sh(option, env=home.environ())).startswith("Usage: sh install.sh")
    assert home.tree() == {}


@pytest.mark.parametrize("option", ["--remove", "uninstall", ""])
def test_unknown_argument(option: str, home: Home) -> None:
    """An unknown argument prints the usage, exits with 2 and does nothing."""
    result = install_sh(option, env=home.environ())
    assert (result.returncode, result.stdout) == (2, "")
    assert "Usage: sh install.sh" in result.stderr
    assert home.tree() == {}
