#!/bin/sh
# Install this checkout of reserve_gpu, and make IPython and Jupyter load it at every start. See usage().
set -eu

usage() {
    cat <<'EOF'
Usage: sh install.sh [--uninstall]

Install reserve_gpu, and make your IPython shells and Jupyter kernels load it automatically. The script
adds a few marked lines to ipython_config.py in IPython's default profile.

  --uninstall   remove those lines and the package
  -h, --help    show this text

Environment variables:
  PYTHON        the Python to install into; by default the first python3 on PATH, which is the active
                virtual environment's
  IPYTHONDIR    the directory of IPython's profiles; by default ~/.ipython
EOF
}

fail() {
    printf 'install.sh: %s\n' "$*" >&2
    exit 1
}

# --- Python and the package ---

# Set PYTHON to the absolute path of the Python to install into.
find_python() {
    program=$(command -v "${PYTHON:-python3}" || command -v "${PYTHON:-python}") ||
        fail "${PYTHON:-python3}: not found. Install Python 3.10 or newer, or choose one: PYTHON=/path/to/python sh install.sh"
    case $program in
        /*) PYTHON=$program ;;
        *) PYTHON=$PWD/$program ;;
    esac
}

# Set facts to NAME=VALUE lines about this Python; "fact NAME" prints one value. The code runs in / because Python
# imports from the current directory. The name is the same for python and python3 of one environment, and it is ASCII,
# so that it fits into any file. The folder is IPython's directory, by the rules of IPython.paths.get_ipython_dir.
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
        3) fail "$PYTHON is older than 3.10. Choose a newer Python: PYTHON=/path/to/python sh install.sh" ;;
        *) fail "$PYTHON does not run as a Python. Choose another: PYTHON=/path/to/python sh install.sh" ;;
    esac
}

fact() {
    printf '%s\n' "$facts" | LC_ALL=C sed -n "s/^$1=//p"
}

check_pip() {
    [ -n "$(fact pip)" ] || fail "$PYTHON has no pip. Install it: \"$PYTHON\" -m ensurepip --upgrade"
}

# pip refuses to install into a Python that the distribution manages: https://peps.python.org/pep-0668/
check_not_managed() {
    [ -z "$(fact managed)" ] || fail "$PYTHON is externally managed, so pip can't install into it
($(fact managed)). Nothing was changed.
Create a virtual environment and install there:
  \"$PYTHON\" -m venv ~/.venvs/reserve_gpu
  . ~/.venvs/reserve_gpu/bin/activate
  sh \"$here/install.sh\""
}

# pip ARGUMENT...: run pip in the checkout, because files in the current directory could shadow Python's modules.
pip() {
    (cd "$here" && PIP_DISABLE_PIP_VERSION_CHECK=1 "$PYTHON" -m pip "$@")
}

# Build in the scratch directory, because the checkout may be read-only.
# https://setuptools.pypa.io/en/latest/deprecated/distutils/configfile.html
install_package() {
    echo "Installing reserve_gpu into $PYTHON ..."
    mkdir "$scratch/info"
    printf '[build]\nbuild_base = %s\n[egg_info]\negg_base = %s\n' "$scratch/build" "$scratch/info" >"$scratch/setup.cfg"
    DIST_EXTRA_CONFIG="$scratch/setup.cfg" pip install --quiet . ||
        fail "pip could not install reserve_gpu into $PYTHON (see above). IPython's configuration was not changed."
    ask_python
    [ -n "$(fact installed)" ] || fail "pip installed reserve_gpu into a directory that $PYTHON does not import from"
    echo "Installed reserve_gpu $(fact installed) for $PYTHON"
}

uninstall_package() {
    if [ -z "$(fact installed)" ]; then
        echo "Nothing to uninstall: reserve_gpu is not installed for $PYTHON"
        return
    fi
    if pip uninstall --quiet --yes reserve_gpu; then ask_python; fi
    [ -z "$(fact installed)" ] || fail "pip could not uninstall reserve_gpu from $PYTHON (see above). Nothing else was changed."
    echo "Uninstalled reserve_gpu from $PYTHON; its dependencies stay installed"
}

# --- ipython_config.py, which reserve_gpu/ipython/config_file.py edits ---

# Set config to the configuration file that IPython reads.
find_config() {
    folder=$(fact folder)
    [ -n "$folder" ] || fail "this user has no home directory. Set HOME or IPYTHONDIR."
    if [ -n "${IPYTHONDIR+set}" ]; then IPYTHONDIR=$folder; fi # is_loaded starts IPython in another directory
    config=$folder/profile_default/ipython_config.py
}

# edit check-add|check-remove|has-block|add|remove: edit or check the configuration file for this Python. It uses the
# checkout's code, because the package may not be installed.
edit() {
    (cd / && "$PYTHON" "$here/reserve_gpu/ipython/config_file.py" "$1" "$config" "$(fact name)" </dev/null)
}

# --- install and uninstall ---

# Start IPython as it starts for the user, and check that the magic exists. TERM=dumb keeps window titles out of the
# output.
is_loaded() {
    check='if get_ipython().find_line_magic("reserve_gpu"): print("\n%reserve_gpu is loaded")'
    (cd / && TERM=dumb "$PYTHON" -m IPython --no-banner --colors=NoColor -c "$check") >"$scratch/terminal" 2>&1 </dev/null || :
    grep -qx '%reserve_gpu is loaded' "$scratch/terminal"
}

# find_extension terminal|kernel|appends [OUTPUT]: print the answer of tools/find_extension.py.
find_extension() {
    : >"$scratch/answer"
    (cd / && "$PYTHON" "$here/tools/find_extension.py" "$1" "$scratch/answer") >"${2:-/dev/null}" 2>&1 </dev/null || :
    cat "$scratch/answer"
}

# reason ANSWER OUTPUT: print the answer, or the last error in the file OUTPUT if the answer is empty.
reason() {
    if [ -n "$1" ]; then
        printf '%s\n' "$1"
    else
        errors=$(grep -E '^[A-Za-z0-9_.]*(Error|Exception|Exit|Interrupt)(:|$)' "$2" || cat "$2")
        printf '%s\n' "${errors:-unknown reason}" | tail -n 1
    fi
}

# Start IPython and a kernel, because kernels read more configuration files. Set programs to the programs that load the
# extension, and failure to the reason why one of them does not.
check_loaded() {
    programs=IPython
    failure=''
    if ! is_loaded; then
        failure="IPython does not load reserve_gpu despite the lines in $config: $(reason "$(find_extension terminal)" "$scratch/terminal")"
        return
    fi
    answer=$(find_extension kernel "$scratch/kernel")
    case $answer in
        loaded) programs='IPython and Jupyter kernels' ;;
        'no kernels') ;;
        *) failure="kernels do not load reserve_gpu despite the lines in $config: $(reason "$answer" "$scratch/kernel")" ;;
    esac
}

install() {
    check_not_managed
    check_pip
    edit check-add || exit
    install_package
    if ! edit has-block && check_loaded && [ -z "$failure" ]; then
        echo "Your configuration, or the system's, already loads it at every start of $programs; nothing was added"
    else
        conflict=$(find_extension appends)
        [ -z "$conflict" ] || fail "the lines for $config would prevent IPython or kernels from starting: $conflict"
        edit add || exit
        check_loaded
        [ -z "$failure" ] || fail "$failure"
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
[ -f "$here/reserve_gpu/__init__.py" ] || fail "run this script from its checkout: sh /path/to/reserve_gpu/install.sh"
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
