"""The checks of this project.

`nox` runs the checks that your change affects, as CI does. The change is everything that differs
from the commit $CI_BASE, by default from the parent of HEAD. `nox --list` lists all checks, `nox -s
NAME` runs one, and `CI_BASE=all nox` runs all of them, for a release. Arguments after `--` go to
pytest: `nox -s process -- tests/process/locks`.
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import nox

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

CORE = "^reserve_gpu/(allocation|api|gpus|locks|log|model|reservation|system)"
SETUP = r"^(pyproject\.toml|setup\.py|noxfile\.py|\.ci/|MANIFEST\.in)"
MAGIC = "ipython|^reserve_gpu/(extension|api|features|reservation)"

# Session: a regular expression. A changed path that matches it chooses the session.
AFFECTED_BY = {
    "lint": "",
    "types": rf"\.py$|{SETUP}",
    "docs": rf"^docs/|\.md$|^zensical|^reserve_gpu/(__init__|api|public)|{SETUP}",
    "readme": rf"^README|^install\.sh|^tests/driver/|/commands/setup/|{SETUP}",
    "tests": rf"\.py$|^docs/|\.md$|{SETUP}",
    "ipython-8": rf"{MAGIC}|{SETUP}",
    "ipython-7": rf"{MAGIC}|{SETUP}",
    "process": rf"^reserve_gpu/|^tests/|{SETUP}",
    "full": rf"^reserve_gpu/|^tests/|{SETUP}",
    "driver": r"^tests/(driver|support)/|^noxfile\.py",
    "browser": rf"^labextension/|browser|/lab\.py|screenshots|/render/html|html_page|{SETUP}",
    "engines": rf"dask|engines|cluster|/hub|{CORE}|{SETUP}",
    "frameworks": rf"frameworks|memory_caps|/commands/run/|{SETUP}",
    "hosts": rf"hosts|remote|{SETUP}",
    "packaging": rf"^labextension/|^benchmarks/|packaging|{SETUP}",
    "prometheus": rf"prometheus|grafana|{SETUP}",
    "slurm": rf"slurm|/features/job/|{SETUP}",
}
# No other module imports these packages (import-linter checks this), so their changes affect only
# their own tests.
INDEPENDENT = re.compile(r"^(?:reserve_gpu|tests/\w+)/((?:commands|features)/\w+)/")

ROOT = Path(__file__).parent
SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
COMPILER = {"cc": "gcc libc6-dev"}  # otherwise ziglang compiles the stand-in driver
SSH = {"/usr/sbin/sshd": "openssh-server openssh-client"}


def git(*arguments: str) -> list[str]:
    """Return the lines that git prints, or raise CalledProcessError."""
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def changed() -> list[str] | None:
    """Return the paths of changed and new files, or None if git does not know the base."""
    base = os.environ.get("CI_BASE") or "HEAD~1"
    try:
        new = git("ls-files", "--others", "--exclude-standard")
        return git("diff", "--name-only", base) + new
    except (OSError, subprocess.CalledProcessError):
        return None


def affected(paths: list[str] | None) -> list[str]:
    """Return the sessions that a change affects: all of them if the change is unknown."""
    if paths is None:
        return list(AFFECTED_BY)
    return [
        name
        for name, pattern in AFFECTED_BY.items()
        if any(re.search(pattern, path) for path in paths)
    ]


def folders(paths: list[str] | None) -> list[str]:
    """Return the folders whose slower tests run: the changed commands and features, or all."""
    code = [path for path in paths or () if path.endswith(".py")]
    packages = {match[1] if (match := INDEPENDENT.match(path)) else "" for path in code}
    if not packages or "" in packages:
        packages = {""}
    layers = ("unit", "shell", "process")
    found = [ROOT / "tests" / layer / name for layer in layers for name in sorted(packages)]
    return [str(path.relative_to(ROOT)) for path in found if path.exists()]


CHANGED = changed()
nox.needs_version = ">=2024.4.15"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.error_on_external_run = True
nox.options.sessions = affected(CHANGED)


def need(session: nox.Session, packages: Mapping[str, str]) -> None:
    """Install the Debian packages of missing programs; without root, name them.

    Args:
        session: The session that needs the programs.
        packages: Program: the names of its Debian packages, separated by spaces.
    """
    path = os.pathsep.join([os.environ.get("PATH", ""), SYSTEM_PATH])
    missing = [packages[program] for program in packages if not shutil.which(program, path=path)]
    if missing and os.geteuid() == 0 and shutil.which("apt-get"):
        session.run("apt-get", "update", "-qq", external=True)
        words = ["apt-get", "install", "-qq", "--no-install-recommends", *" ".join(missing).split()]
        session.run(*words, external=True, env={"DEBIAN_FRONTEND": "noninteractive"})
    elif missing:
        report = session.error if "CI" in os.environ else session.warn
        report(f"Tests need these packages: sudo apt-get install {' '.join(missing)}")


def install(session: nox.Session, extras: str, *requirements: str) -> None:
    """Install the package with extras, as a wheel: an editable one would hide missing files."""
    shutil.rmtree(ROOT / "build", ignore_errors=True)  # setuptools would add deleted modules
    session.install(f".[{extras}]", *requirements)


def pytest(session: nox.Session, *arguments: str, path: str | None = None) -> None:
    """Run pytest with these arguments, and with those of the command line."""
    environ = {"PATH": path} if path else {}
    session.run("python", "-m", "pytest", *arguments, *session.posargs, env=environ)


# -- static checks ---------------------------------------------------------------------------------


@nox.session
def lint(session: nox.Session) -> None:
    """Check the style, and which module imports which."""
    install(session, "lint")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    path = os.pathsep.join([str(ROOT), str(ROOT / "labextension")])
    session.run("lint-imports", "--no-cache", "--no-logo", env={"PYTHONPATH": path})


@nox.session
def types(session: nox.Session) -> None:
    """Check the types."""
    install(session, "test,lint")
    session.run("mypy")


@nox.session
def docs(session: nox.Session) -> None:
    """Build the site."""
    if tuple(sys.version_info) < (3, 11):
        session.skip("Zensical needs Python 3.11")
    install(session, "docs")
    session.run("zensical", "build", "--strict")


# -- README.md's commands --------------------------------------------------------------------------


@nox.session(venv_backend="none")
def readme(session: nox.Session) -> None:
    """Run README.md's first commands as a new user, and the simulated GPUs without a compiler."""
    with new_user(session) as run, tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o711)
        for path in Path("/usr/bin").iterdir():
            if not re.match(r"(cc|gcc|c89|c99|clang|tcc)\b", path.name):
                (Path(folder) / path.name).symlink_to(path)
        output = run(readme_command("tests.driver"), folder)
        if not re.search(r"^Reserving GPU0: ", output, re.MULTILINE):
            session.error(f"README.md's command for simulated GPUs printed: {output}")
        output = run(readme_command("sh install.sh && ipython"), SYSTEM_PATH)
        if not re.search(r"^(Reserving GPU|No NVIDIA driver)", output, re.MULTILINE):
            session.error(f"README.md's first command printed: {output}")


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """Run README.md's test command as a new user."""
    with new_user(session) as run:
        run(readme_command("-m pytest"), SYSTEM_PATH, may_fail=False)


def readme_command(words: str) -> str:
    """Return the only line in README.md's code blocks that contains these words."""
    text = (ROOT / "README.md").read_text()
    blocks: list[str] = re.findall(r"^```.*?^```", text, re.DOTALL | re.MULTILINE)
    (line,) = (line for block in blocks for line in block.splitlines() if words in line)
    return line


@contextmanager
def new_user(session: nox.Session) -> Iterator[Callable[..., str]]:
    """Yield a function that runs a shell command in a fresh clone, with an empty home.

    As root, the command runs as a new Unix user, otherwise as the current one. It has the system's
    Python and a clean environment. The clone contains the changes that are not committed.
    """
    programs = {"git": "git", "python3": "python3 python3-venv", "setpriv": "util-linux"}
    need(session, {**programs, "useradd": "passwd", "pkill": "procps"})
    user, prefix, is_root = pwd.getpwuid(os.geteuid()).pw_name, [], os.geteuid() == 0
    if is_root:
        user = "newcomer"
        remove_user(user)  # an interrupted run may have left it
        subprocess.run(["useradd", "--create-home", user], check=True)
        prefix = ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups", "--reset-env"]
        home = Path(pwd.getpwnam(user).pw_dir)
    else:
        home = Path(tempfile.mkdtemp(prefix="reserve_gpu-", dir=Path.home()))
    temporary = Path(tempfile.mkdtemp())  # an earlier user may have left files in /tmp

    def run(command: str, path: str, *, may_fail: bool = True) -> str:
        """Run a command and show its output; if it may fail, return the output instead."""
        clone = home / "reserve_gpu"
        shutil.rmtree(clone, ignore_errors=True)
        copy_checkout(clone)
        if is_root:
            subprocess.run(["chown", "-R", f"{user}:", home, temporary], check=True)
        words = [*prefix, "env", "-i", "-C", str(clone), f"HOME={home}", f"TMPDIR={temporary}"]
        words += [f"PATH={path}", "LANG=C.UTF-8", "CI=true", "bash", "-euo", "pipefail", "-c"]
        session.log(f"{user} runs {command}")
        if may_fail:
            return subprocess.run(
                [*words, command], check=False, capture_output=True, text=True
            ).stdout
        session.run(*words, command, external=True, log=False)
        return ""

    try:
        yield run
    finally:
        if is_root:
            remove_user(user)
        for folder in (home, temporary):
            shutil.rmtree(folder, ignore_errors=True)


def remove_user(user: str) -> None:
    """Remove a user with its processes and its home, if it exists."""
    for command in (["pkill", "-KILL", "-u", user], ["userdel", "--force", "--remove", user]):
        subprocess.run(command, check=False, stderr=subprocess.DEVNULL)


def copy_checkout(folder: Path) -> None:
    """Clone this repository with its history, then copy changes that are not committed."""
    git("clone", "--quiet", "--no-hardlinks", str(ROOT), str(folder))
    for name in git("ls-files", "--deleted", "--modified", "--others", "--exclude-standard"):
        target = folder / name
        target.unlink(missing_ok=True)
        if (ROOT / name).exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)


# -- pytest in an environment of the session -------------------------------------------------------


@nox.session(name="ipython-8")
def ipython_8(session: nox.Session) -> None:
    """Test with IPython 8.18, the last version for Python 3.9."""
    need(session, COMPILER)
    install(session, "test", "ipython==8.18.*")
    pytest(session, "-m", "ipython and not needs")


@nox.session(name="ipython-7")
def ipython_7(session: nox.Session) -> None:
    """Test with the versions of IPython and ipykernel that Google Colab installs."""
    need(session, COMPILER)
    install(session, "test", "ipython==7.34.*", "ipykernel==6.17.*")
    pytest(session, "-m", "ipython and not needs")


def run_layer(session: nox.Session, layer: str) -> None:
    """Run the tests of a layer that the change affects, or those named on the command line."""
    programs = {"setpriv": "util-linux", "tmux": "tmux"}
    need(session, {**COMPILER, **programs, "make": "make", "parallel": "parallel"})
    install(session, "test,completion,recipes", "pip")  # uv's environments have no pip
    pytest(session, "-m", layer, *(() if session.posargs else folders(CHANGED)))


@nox.session
def process(session: nox.Session) -> None:
    """Test with child processes; as root, also with several users and containers."""
    run_layer(session, "process")


@nox.session
def full(session: nox.Session) -> None:
    """Run slow tests: races, every driver call with every error, properties, earlier versions."""
    run_layer(session, "full")


@nox.session
def driver(session: nox.Session) -> None:
    """Test the stand-in driver."""
    need(session, COMPILER)
    install(session, "test,compiler,benchmarks")
    pytest(session, "-m", "full", "--require-extras", "tests/driver")


# -- end-to-end tests ------------------------------------------------------------------------------


def end_to_end(session: nox.Session, extras: str, path: str | None = None) -> None:
    """Run the tests of the folder in tests/e2e that has the name of the session."""
    install(session, extras)
    folder = f"tests/e2e/{session.name}"
    pytest(session, "-m", "full", "--require-extras", folder, path=path)


@nox.session
def browser(session: nox.Session) -> None:
    """Test JupyterLab, its extension and other clients, in Chromium."""
    need(session, {**COMPILER, "chromium": "chromium fonts-dejavu-core", "npm": "nodejs npm"})
    quiet = ("--no-audit", "--no-fund")
    with session.chdir("labextension"):
        session.run("npm", "ci", *quiet, external=True)
        session.run("npm", "run", "lint", external=True)
    session.install("--no-deps", "./labextension")
    proxy = Path(session.create_tmp()) / "proxy"
    words = ("npm", "install", *quiet, "--prefix", str(proxy), "configurable-http-proxy")
    session.run(*words, external=True)
    path = [session.bin, str(proxy / "node_modules" / ".bin"), os.environ["PATH"]]
    end_to_end(session, "test,browser,engines", os.pathsep.join(path))


@nox.session
def engines(session: nox.Session) -> None:
    """Test Dask, Ray and ipyparallel."""
    need(session, {**COMPILER, **SSH})
    end_to_end(session, "test,engines,lint")


@nox.session
def frameworks(session: nox.Session) -> None:
    """Test with the builds of PyTorch, JAX and TensorFlow for the CPU."""
    need(session, COMPILER)
    install(session, "test,frameworks")
    pytest(session, "-m", "full and needs", "tests/shell", "tests/process")


@nox.session
def hosts(session: nox.Session) -> None:
    """Test several machines over SSH."""
    need(session, {**COMPILER, **SSH, "setpriv": "util-linux"})
    end_to_end(session, "test,hosts,engines")


@nox.session
def packaging(session: nox.Session) -> None:
    """Test the distributions and the benchmarks."""
    need(session, COMPILER)
    session.install("pip")  # uv's environments have no pip
    end_to_end(session, "test,build,benchmarks")


@nox.session
def prometheus(session: nox.Session) -> None:
    """Evaluate the queries of docs/formats.md."""
    need(session, {**COMPILER, "prometheus": "prometheus"})
    end_to_end(session, "test")


@nox.session
def slurm(session: nox.Session) -> None:
    """Test kernels and jobs on a Slurm cluster on this machine."""
    need(session, {**COMPILER, "slurmd": "slurmctld slurmd slurm-client munge"})
    end_to_end(session, "test")
