#!/bin/sh
# Installs this checkout of reserve_gpu, and makes IPython and Jupyter load it at every start. See usage().
set -eu

usage() {
    cat <<'EOF'
Usage: sh install.sh [--uninstall]

Installs reserve_gpu and lets every IPython shell and Jupyter kernel of yours load it by itself, by
adding a few marked lines to ipython_config.py in IPython's default profile.

  --uninstall   take back what was added: those lines and the package
  -h, --help    show this text

PYTHON=/path/to/python sh install.sh   installs into that Python; otherwise into the first python3 on PATH,
                                       which is the virtual environment's where one is active
IPYTHONDIR                             is where IPython keeps its profiles; otherwise ~/.ipython
EOF
}

fail() {
    printf 'install.sh: %s\n' "$*" >&2
    exit 1
}

# Sets PYTHON to the absolute path of a Python that can run the rest.
find_python() {
    if [ -n "${PYTHON:-}" ]; then
        named=$PYTHON
        PYTHON=$(command -v "$named") || fail "PYTHON=$named is no program that can be run"
    else
        PYTHON=$(command -v python3 || command -v python) ||
            fail "no Python on PATH; install 3.10 or newer, or name one: PYTHON=/path/to/python sh install.sh"
    fi
    case $PYTHON in
        /*) ;;
        *) PYTHON=$PWD/$PYTHON ;;
    esac
    version=$("$PYTHON" -c 'import sys; print("%d.%02d" % sys.version_info[:2])' 2>/dev/null </dev/null) ||
        fail "$PYTHON does not run as a Python; name another: PYTHON=/path/to/python sh install.sh"
    case $version in
        3.0? | [0-2].*) fail "$PYTHON is older than 3.10; name a newer one: PYTHON=/path/to/python sh install.sh" ;;
    esac
}

# step check-install|add|check-uninstall|remove: what needs Python. The checks change nothing.
step() {
    "$PYTHON" - "$here" "$@" <<'EOF'
import sys

sys.path = [entry for entry in sys.path if entry]  # not the current directory: what is there is not installed

import ast
import importlib.metadata
import importlib.util
import itertools
import os
import re
import shlex
import shutil
import sysconfig
import warnings

sys.stdout.reconfigure(errors="backslashreplace")  # any path can be printed
warnings.simplefilter("ignore")  # about the user's own lines

# The added lines. The guard is for other environments of this user: they share the file, not the package.
# "new" says what else was made and has to go again: a line break, or the file and its folders.
HEAD = b"# >>> reserve_gpu (added by install.sh, which takes it away with --uninstall; new: %s) >>>\n"
BODY = b"""import importlib.util
if importlib.util.find_spec("reserve_gpu"):
    get_config().InteractiveShellApp.extensions.append("reserve_gpu")
# <<< reserve_gpu <<<
"""
HEAD_RE = rb"^# >>> reserve_gpu \(added by install\.sh[^\n]*; new: (\w+)[\w ]*?(\d?)(?: folders?)?\) >>>(\r?\n)"
BLOCK = re.compile(HEAD_RE + rb"\r?\n".join(map(re.escape, BODY.splitlines())) + rb"(?:\r?\n|\Z)", re.MULTILINE)
MARKER = re.compile(rb"^# (?:>>>|<<<) reserve_gpu\b", re.MULTILINE)


def fail(message):
    sys.exit(f"install.sh: {message}")


def config_path():
    """Where IPython looks: the rules of IPython.paths.get_ipython_dir, which makes folders when it is asked."""
    folder = os.environ.get("IPYTHONDIR")
    if folder is None:
        home = os.path.realpath(os.path.expanduser("~"))
        folder = os.path.join(home, ".ipython")
        old = os.path.join(os.environ.get("XDG_CONFIG_HOME") or os.path.join(home, ".config"), "ipython")
        if os.path.isdir(old) and os.access(old, os.W_OK) and not os.path.islink(old) and not os.path.exists(folder):
            folder = old
    return os.path.abspath(os.path.join(os.path.expanduser(folder), "profile_default", "ipython_config.py"))


def folders_of(path):
    profile = os.path.dirname(path)
    return os.path.dirname(profile), profile


def check_config(path):
    """Leave with one line where the file could not be written, before anything is changed."""
    if os.path.lexists(path):
        target = os.path.realpath(path)
        if not os.path.exists(path) and (os.path.lexists(target) or not os.path.isdir(os.path.dirname(target))):
            fail(f"{path} is a symbolic link that leads nowhere; remove it or mend it")
        if os.path.exists(path) and not os.path.isfile(path):
            fail(f"{path} is not a file, so nothing can be added to it")
        for place in (path if os.path.exists(path) else os.path.dirname(target), os.path.dirname(path)):
            if not os.access(place, os.R_OK | os.W_OK):
                fail(f"no permission to change {place}")
        return
    ipython, profile = folders_of(path)
    for folder in (profile, ipython, os.path.dirname(ipython)):
        if os.path.isdir(folder):
            if not os.access(folder, os.W_OK | os.X_OK):
                fail(f"no permission to write in {folder}, where {path} belongs; IPYTHONDIR names another place")
            return
        if os.path.lexists(folder):
            fail(f"{folder} is not a folder, so {path} cannot be made")
    fail(f"there is no folder {os.path.dirname(ipython)}, where {path} belongs; IPYTHONDIR names another place")


def read(path):
    with open(path, "rb") as file:
        return file.read()


def loads_extension(data):
    """The number of the line by which this configuration already loads the extension, 0 where none does."""
    try:
        nodes = list(ast.walk(ast.parse(data)))
    except (SyntaxError, ValueError):
        block = BLOCK.search(data)
        return data[: block.start()].count(b"\n") + 1 if block else 0
    for node in nodes:
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.Expr)):
            inside = list(ast.walk(node))
            if any(isinstance(part, ast.Attribute) and part.attr == "extensions" for part in inside) and any(
                isinstance(part, ast.Constant) and part.value == "reserve_gpu" for part in inside
            ):
                return node.lineno
    return 0


def backups(path):
    yield path + ".before-reserve_gpu"
    for number in itertools.count(2):
        yield f"{path}.before-reserve_gpu.{number}"


def back_up(path, data):
    """Keep a copy beside the file; an earlier one is never written over."""
    mode = os.stat(path).st_mode & 0o777
    for copy in backups(path):
        if os.path.isfile(copy) and read(copy) == data:
            return copy
        try:
            descriptor = os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        except FileExistsError:
            continue
        with open(descriptor, "wb") as file:
            file.write(data)
        shutil.copystat(path, copy)
        return copy


def create(path):
    missing = [folder for folder in folders_of(path) if not os.path.isdir(folder)]
    for folder in missing:
        os.mkdir(folder)
    new = [b"file", b"file and 1 folder", b"file and 2 folders"][len(missing)]
    with open(os.path.realpath(path), "xb") as file:
        file.write(HEAD % new + BODY)
    return f"Loaded at every start of IPython by {path} (a new file)"


def append(path):
    """Write behind what is there, through links, and touch nothing of it."""
    data = read(path)
    if line := loads_extension(data):
        return f"Loaded at every start of IPython by line {line} of {path}, as before"
    copy = back_up(path, data)
    whole = not data or data.endswith(b"\n")
    block = HEAD % b"nothing" + BODY if whole else b"\n" + HEAD % b"break" + BODY
    if b"\r\n" in data:
        block = block.replace(b"\n", b"\r\n")
    with open(path, "r+b", buffering=0) as file:
        try:
            file.seek(0, os.SEEK_END)
            if file.write(block) < len(block):
                raise OSError(f"no room for {len(block)} bytes more in {path}")
        except OSError:
            file.truncate(len(data))
            raise
    return f"Loaded at every start of IPython by the end of {path} (backup: {os.path.basename(copy)})"


def remove(path):
    """Take out the lines as they were added and nothing else: lines that were edited since are the user's."""
    if not os.path.isfile(path):
        print(f"Nothing to take out: there is no {path}")
        return
    data = rest = read(path)
    new, folders = b"", 0
    while found := BLOCK.search(rest):
        new, folders, newline = found[1], int(found[2] or 0), found[3]
        before, after = rest[: found.start()], rest[found.end() :]
        rest = (before.removesuffix(newline) if new == b"break" and not after else before) + after
    if rest == data:
        print(f"Nothing to take out of {path}")
    elif new == b"file" and not rest:
        os.remove(os.path.realpath(path))
        for folder in folders_of(path)[::-1][:folders]:
            if not os.listdir(folder):
                os.rmdir(folder)
        print(f"Removed {path}, which held nothing else")
    else:
        with open(path, "r+b") as file:
            file.write(rest)
            file.truncate()
        for copy in itertools.takewhile(os.path.isfile, backups(path)):
            if read(copy) == rest:
                os.remove(copy)
        print(f"Taken out of {path}; the rest of it is as it was")
    if marker := MARKER.search(rest):
        line = rest[: marker.start()].count(b"\n") + 1
        fail(f"the lines added at line {line} of {path} have been edited since and stay; remove them by hand")
    if line := loads_extension(rest):
        print(f"Left as it is: line {line} of {path}, which loads reserve_gpu and is your own")


def check_python(here):
    """Leave where pip is missing, or would refuse: https://peps.python.org/pep-0668/."""
    notice = os.path.join(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED")
    if sys.prefix == sys.base_prefix and os.path.exists(notice):
        python, script = shlex.quote(sys.executable), shlex.quote(os.path.join(here, "install.sh"))
        apt = "" if importlib.util.find_spec("ensurepip") else "  sudo apt install python3-venv\n"
        fail(
            f"{sys.executable} is externally managed: it is not for pip to install into\n"
            f"({notice}). Nothing was changed.\n"
            f"Make a virtual environment and install there:\n{apt}"
            f"  {python} -m venv ~/.venvs/reserve_gpu\n"
            f"  . ~/.venvs/reserve_gpu/bin/activate\n"
            f"  sh {script}"
        )
    if not importlib.util.find_spec("pip"):
        fail(f"{sys.executable} has no pip; add it: {shlex.quote(sys.executable)} -m ensurepip --upgrade")


def installed():
    try:
        return importlib.metadata.distribution("reserve_gpu")
    except importlib.metadata.PackageNotFoundError:
        return None


def main(here, what):
    path = config_path()
    if what == "check-install":
        check_python(here)
        check_config(path)
    elif what == "add":
        package = installed() or fail(f"pip installed reserve_gpu where {sys.executable} does not look for packages")
        print(f"Installed reserve_gpu {package.version} in {package.locate_file('')} for {sys.executable}")
        print(create(path) if not os.path.exists(path) else append(path))
        beside = os.path.join(os.path.dirname(sys.executable), "ipython")
        command = "ipython" if shutil.which("ipython") == beside else f"{shlex.quote(sys.executable)} -m IPython"
        print(f"Try it: {command} -c '%reserve_gpu'")
    elif what == "check-uninstall":
        if os.path.lexists(path):
            check_config(path)
        if installed() and not importlib.util.find_spec("pip"):
            fail(f"{sys.executable} has no pip; add it: {shlex.quote(sys.executable)} -m ensurepip --upgrade")
    elif what == "remove":
        remove(path)
    elif what == "is-installed":
        sys.exit(not installed())


try:
    main(*sys.argv[1:])
except OSError as error:
    fail(error)
EOF
}

# What pip builds goes here: the checkout stays as it is, and may be read-only.
# https://setuptools.pypa.io/en/latest/deprecated/distutils/configfile.html
install_package() {
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
    mkdir "$scratch/info"
    echo "Installing reserve_gpu into $PYTHON ..."
    cat >"$scratch/setup.cfg" <<EOF
[build]
build_base = $scratch/build
[egg_info]
egg_base = $scratch/info
EOF
    (
        cd "$here"
        DIST_EXTRA_CONFIG="$scratch/setup.cfg" PIP_DISABLE_PIP_VERSION_CHECK=1 \
            "$PYTHON" -m pip install --quiet .
    ) || fail "pip could not install reserve_gpu into $PYTHON (see above); IPython's configuration was not touched"
}

uninstall_package() {
    if step is-installed; then
        if ! "$PYTHON" -m pip uninstall --quiet --yes reserve_gpu || step is-installed; then
            fail "pip could not uninstall reserve_gpu from $PYTHON (see above); nothing else was changed"
        fi
        echo "Uninstalled reserve_gpu from $PYTHON; what it depends on stays installed"
    else
        echo "Nothing to uninstall: reserve_gpu is not installed for $PYTHON"
    fi
}

action=install
for argument in "$@"; do
    case $argument in
        --uninstall) action=uninstall ;;
        -h | --help) usage && exit ;;
        *) printf 'install.sh: unknown argument: %s\n\n' "$argument" >&2 && usage >&2 && exit 2 ;;
    esac
done

case $0 in
    */*) here=$(CDPATH='' cd -- "${0%/*}/" && pwd) ;;
    *) here=$PWD ;;
esac
[ -f "$here/reserve_gpu/__init__.py" ] || fail "start it from its checkout: sh /path/to/reserve_gpu/install.sh"
find_python
step "check-$action"
if [ $action = install ]; then
    install_package
    step add
else
    uninstall_package
    step remove
fi
