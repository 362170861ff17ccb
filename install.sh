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

# step NAME: what needs Python. It is this checkout's, as nothing is installed yet; but neither the checkout nor the
# current folder is where an installed package would be, and -B leaves nothing in them.
step() {
    "$PYTHON" -B -c '
import sys
sys.path = [sys.argv[1], *filter(None, sys.path)]
from reserve_gpu.installer import main
del sys.path[0]
main(sys.argv[2])' "$here" "$1"
}

# pip ARGUMENT...: not from the current folder, whose files Python would take for modules of its own.
pip() {
    (cd "$here" && PIP_DISABLE_PIP_VERSION_CHECK=1 "$PYTHON" -m pip "$@")
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
    export DIST_EXTRA_CONFIG="$scratch/setup.cfg"
    pip install --quiet . ||
        fail "pip could not install reserve_gpu into $PYTHON (see above); IPython's configuration was not touched"
}

uninstall_package() {
    if step is-installed; then
        if ! pip uninstall --quiet --yes reserve_gpu || step is-installed; then
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
