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

# --- Python and the package ---

# Sets PYTHON to the absolute path of the Python to install into.
find_python() {
    program=$(command -v "${PYTHON:-python3}" || command -v "${PYTHON:-python}") ||
        fail "no program ${PYTHON:-python3}; install Python 3.10 or newer, or name one: PYTHON=/path/to/python sh install.sh"
    case $program in
        /*) PYTHON=$program ;;
        *) PYTHON=$PWD/$program ;;
    esac
}

# Sets facts to lines NAME=VALUE about this Python; "fact NAME" prints one. It runs in /, as Python imports from the
# current folder. The name is the same for python and python3 of one environment, and ASCII, to fit into any file.
# The folder is IPython's, by the rules of IPython.paths.get_ipython_dir.
ask_python() {
    facts=$(from=$PWD && cd / && "$PYTHON" -c '
import sys
if sys.version_info < (3, 10):
    sys.exit(3)
import importlib.metadata, importlib.util, os, sysconfig
sys.stdout.reconfigure(errors="surrogateescape")
print("name=" + ascii("%s/bin/python%d.%d" % ((os.path.realpath(sys.prefix),) + sys.version_info[:2]))[1:-1])
print("pip=" + "yes" * bool(importlib.util.find_spec("pip")))
notice = os.path.join(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED")
is_forced = os.environ.get("PIP_BREAK_SYSTEM_PACKAGES", "").lower() in ("1", "on", "t", "true", "y", "yes")
if sys.prefix == sys.base_prefix and os.path.exists(notice) and not is_forced:
    print("managed=" + notice)
for package in list(importlib.metadata.distributions(name="reserve_gpu"))[:1]:
    print("installed=%s in %s" % (package.version, package.locate_file("")))
home = os.path.realpath(os.path.expanduser("~"))
folder = os.path.join(home, ".ipython")
xdg = os.path.join(os.environ.get("XDG_CONFIG_HOME") or os.path.join(home, ".config"), "ipython")
if not os.path.exists(folder) and os.access(xdg, os.W_OK) and os.path.isdir(xdg) and not os.path.islink(xdg):
    folder = xdg
folder = os.path.expanduser(os.environ.get("IPYTHONDIR", folder))
if not folder.startswith("/~/"):
    print("folder=" + os.path.normpath(os.path.join(sys.argv[1], folder)))
' "$from" 2>/dev/null </dev/null) || case $? in
        3) fail "$PYTHON is older than 3.10; name a newer one: PYTHON=/path/to/python sh install.sh" ;;
        *) fail "$PYTHON does not run as a Python; name another: PYTHON=/path/to/python sh install.sh" ;;
    esac
}

fact() {
    printf '%s\n' "$facts" | LC_ALL=C sed -n "s/^$1=//p"
}

check_pip() {
    [ -n "$(fact pip)" ] || fail "$PYTHON has no pip; add it: \"$PYTHON\" -m ensurepip --upgrade"
}

# Where the distribution manages this Python, pip refuses: https://peps.python.org/pep-0668/
check_not_managed() {
    [ -z "$(fact managed)" ] || fail "$PYTHON is externally managed: it is not for pip to install into
($(fact managed)). Nothing was changed.
Make a virtual environment and install there:
  \"$PYTHON\" -m venv ~/.venvs/reserve_gpu
  . ~/.venvs/reserve_gpu/bin/activate
  sh \"$here/install.sh\""
}

# pip ARGUMENT...: from the checkout, as files of the current folder could be taken for Python's own modules.
pip() {
    (cd "$here" && PIP_DISABLE_PIP_VERSION_CHECK=1 "$PYTHON" -m pip "$@")
}

# What pip builds goes to the scratch folder: the checkout stays as it is, and may be read-only.
# https://setuptools.pypa.io/en/latest/deprecated/distutils/configfile.html
install_package() {
    echo "Installing reserve_gpu into $PYTHON ..."
    mkdir "$scratch/info"
    printf '[build]\nbuild_base = %s\n[egg_info]\negg_base = %s\n' "$scratch/build" "$scratch/info" >"$scratch/setup.cfg"
    DIST_EXTRA_CONFIG="$scratch/setup.cfg" pip install --quiet . ||
        fail "pip could not install reserve_gpu into $PYTHON (see above); IPython's configuration was not touched"
    ask_python
    [ -n "$(fact installed)" ] || fail "pip installed reserve_gpu where $PYTHON does not look for packages"
    echo "Installed reserve_gpu $(fact installed) for $PYTHON"
}

uninstall_package() {
    if [ -z "$(fact installed)" ]; then
        echo "Nothing to uninstall: reserve_gpu is not installed for $PYTHON"
        return
    fi
    if pip uninstall --quiet --yes reserve_gpu; then ask_python; fi
    [ -z "$(fact installed)" ] || fail "pip could not uninstall reserve_gpu from $PYTHON (see above); nothing else was changed"
    echo "Uninstalled reserve_gpu from $PYTHON; what it depends on stays installed"
}

# --- ipython_config.py, which reserve_gpu/ipython/config_file.py changes ---

# Sets config to the file that IPython reads.
find_config() {
    folder=$(fact folder)
    [ -n "$folder" ] || fail "this user has no home directory; set HOME or IPYTHONDIR"
    if [ -n "${IPYTHONDIR+set}" ]; then IPYTHONDIR=$folder; fi # is_loaded starts IPython in another folder
    config=$folder/profile_default/ipython_config.py
}

# edit check-add|check-remove|has-block|add|remove: does that for this Python, from the checkout: the package may not be
# installed.
edit() {
    (cd / && "$PYTHON" "$here/reserve_gpu/ipython/config_file.py" "$1" "$config" "$(fact name)" </dev/null)
}

# --- the whole ---

# Starts IPython as it starts for the user, and looks whether the magic is there. TERM: no window title in its output.
is_loaded() {
    look='if get_ipython().find_line_magic("reserve_gpu"): print("\n%reserve_gpu is there")'
    (cd / && TERM=dumb "$PYTHON" -m IPython --no-banner --colors=NoColor -c "$look") >"$scratch/terminal" 2>&1 </dev/null || :
    grep -qx '%reserve_gpu is there' "$scratch/terminal"
}

# find_extension terminal|kernel|appends [OUTPUT]: prints what tools/find_extension.py answers.
find_extension() {
    : >"$scratch/answer"
    (cd / && "$PYTHON" "$here/tools/find_extension.py" "$1" "$scratch/answer") >"${2:-/dev/null}" 2>&1 </dev/null || :
    cat "$scratch/answer"
}

# why ANSWER OUTPUT: prints the answer, or the last error in the file OUTPUT if the answer is empty.
why() {
    if [ -n "$1" ]; then
        printf '%s\n' "$1"
    else
        words=$(grep -E '^[A-Za-z0-9_.]*(Error|Exception|Exit|Interrupt)(:|$)' "$2" || cat "$2")
        printf '%s\n' "${words:-it does not say why}" | tail -n 1
    fi
}

# Sets programs to those that were started, and missing to the reason if one of them does not load the extension.
# A kernel reads more files than a terminal's IPython.
look() {
    programs=IPython
    missing=''
    if ! is_loaded; then
        missing="IPython does not load reserve_gpu in spite of the lines in $config: $(why "$(find_extension terminal)" "$scratch/terminal")"
        return
    fi
    found=$(find_extension kernel "$scratch/kernel")
    case $found in
        loaded) programs='IPython and of kernels' ;;
        'no kernels') ;;
        *) missing="kernels do not load reserve_gpu in spite of the lines in $config: $(why "$found" "$scratch/kernel")" ;;
    esac
}

install() {
    check_not_managed
    check_pip
    edit check-add || exit
    install_package
    if ! edit has-block && look && [ -z "$missing" ]; then
        echo "Loaded at every start of $programs already, by your configuration or the system's; nothing was added to it"
    else
        found=$(find_extension appends)
        [ -z "$found" ] || fail "the lines for $config would keep IPython or kernels from starting: $found"
        edit add || exit
        look
        [ -z "$missing" ] || fail "$missing"
        echo "Loaded at every start of $programs by $config"
    fi
    ipython="\"$PYTHON\" -m IPython"
    if [ "$(command -v ipython)" = "${PYTHON%/*}/ipython" ]; then ipython=ipython; fi
    echo "Try it: $ipython -c '%reserve_gpu'"
}

uninstall() {
    [ -z "$(fact installed)" ] || check_pip
    edit check-remove || exit
    uninstall_package
    edit remove || exit
}

action=install
for argument in "$@"; do
    case $argument in
        --uninstall) action=uninstall ;;
        -h | --help) usage && exit ;;
        *) printf 'install.sh: unknown argument: %s\n\n' "$argument" >&2 && usage >&2 && exit 2 ;;
    esac
done

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
[ -f "$here/reserve_gpu/__init__.py" ] || fail "start it from its checkout: sh /path/to/reserve_gpu/install.sh"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 131' QUIT
trap 'exit 143' TERM
find_python
ask_python
find_config
$action
