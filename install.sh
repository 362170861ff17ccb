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

# --- ipython_config.py: a block between two marks, which names the Pythons that it was added for ---

# Sets config to the file that IPython reads.
find_config() {
    folder=$(fact folder)
    [ -n "$folder" ] || fail "this user has no home directory; set HOME or IPYTHONDIR"
    if [ -n "${IPYTHONDIR+set}" ]; then IPYTHONDIR=$folder; fi # is_loaded starts IPython in another folder
    config=$folder/profile_default/ipython_config.py
    copy=$config.before-reserve_gpu
}

# Reads the file into $scratch/before and sets: first and last, the lines of the marks, empty where there is no block;
# named, this Python where the block names it; others, those that it names besides (a block of version 2.0.0 names none);
# cr, what stands before this file's line feeds. With LC_ALL=C its encoding does not matter.
read_config() {
    : >"$scratch/before"
    if [ -f "$config" ]; then cat "$config" >"$scratch/before" || fail "no permission to read $config"; fi
    first=$(LC_ALL=C sed -n '/^# >>> reserve_gpu /=' "$scratch/before")
    last=$(LC_ALL=C sed -n '/^# <<< reserve_gpu /=' "$scratch/before")
    [ -z "$first$last" ] || [ "$first" -lt "$last" ] 2>/dev/null ||
        fail "the lines added to $config have lost one of their marks, or are there twice; remove them by hand"
    names=$([ -z "$first" ] || LC_ALL=C sed -n "$first,$last s/^# for //p" "$scratch/before" | tr -d '\r')
    named=$(printf '%s\n' "$names" | grep -xF -e "$(fact name)" || :)
    others=$(printf '%s\n' "$names" | grep -vxF -e "$(fact name)" || :)
    cr=$(printf '\r')
    LC_ALL=C grep -q "$cr\$" "$scratch/before" || cr=''
}

has_own_line() {
    LC_ALL=C grep -qs '^[^#]*reserve_gpu' "$1"
}

check_change() {
    [ -w "$config" ] || fail "no permission to change $config"
    [ -w "${config%/*}" ] || fail "no permission to change ${config%/*}" # a copy of the file goes there
}

# Looks whether the block can be added. Where a line of the user's own may load the extension, it need not be.
check_add() {
    place=$config
    while [ ! -e "$place" ] && [ ! -L "$place" ]; do place=${place%/*} && place=${place:-/}; done
    if [ -f "$config" ]; then
        [ -n "$named" ] || { [ -z "$first" ] && has_own_line "$config"; } || check_change
    elif [ "$place" = "$config" ] || [ ! -d "$place" ] || [ ! -w "$place" ]; then
        fail "$config cannot be made: $place is no folder to write in; IPYTHONDIR names another place"
    fi
}

# Makes the file what $scratch/new is. It stays the same file: symbolic links, owner and mode are kept.
write_config() {
    cat "$scratch/new" >"$config" && return
    cat "$scratch/before" >"$config" || { trap - EXIT && fail "$config is damaged; what it was is in $scratch/before"; }
    fail "$config could not be written (see above), and is as it was"
}

# put_block PYTHONS: writes the block with these names, in its place or at the end of the file. Its guard is for the
# environments without the package, which share the file. A folder of that name without an __init__.py has no origin.
put_block() {
    end=$(($(wc -l <"$scratch/before") + 2))
    {
        LC_ALL=C sed "${first:-$end},\$d" "$scratch/before"
        if [ -z "$first" ] && [ -n "$(tail -c 1 "$scratch/before")" ]; then printf '%s\n' "$cr"; fi
        sed "s/\$/$cr/" <<EOF
# >>> reserve_gpu (added by install.sh, which takes it away with --uninstall) >>>
$(printf '%s\n' "$1" | sed 's/^/# for /')
import importlib.util
if getattr(importlib.util.find_spec("reserve_gpu"), "origin", None):
    get_config().InteractiveShellApp.extensions.append("reserve_gpu")
# <<< reserve_gpu <<<
EOF
        LC_ALL=C sed "1,${last:-$end}d" "$scratch/before"
    } >"$scratch/new"
    write_config
}

# Only a file that was there before the block has a copy.
add_name() {
    if [ ! -f "$config" ]; then
        mkdir -p "${config%/*}"
    else
        check_change
        [ -n "$first" ] || [ -e "$copy" ] || cp -p "$config" "$copy" ||
            { rm -f "$copy" && fail "$config could not be copied (see above)"; }
    fi
    put_block "${others:+$others
}$(fact name)"
}

# Without a copy and without other lines, the file was made for the block. Where the copy is what the block was added to,
# it goes too, and with it the line break that was put between the two.
take_out_block() {
    LC_ALL=C sed "$first,${last}d" "$scratch/before" >"$scratch/new"
    if [ ! -s "$scratch/new" ] && [ ! -e "$copy" ]; then
        rm "$(readlink -f "$config")"
        echo "Removed $config, which held nothing else"
        return
    fi
    if [ -f "$copy" ] && { cat "$copy" && printf '%s\n' "$cr"; } | cmp -s - "$scratch/new"; then
        cp "$copy" "$scratch/new"
    fi
    write_config
    if [ -f "$copy" ] && cmp -s "$copy" "$config"; then rm "$copy"; fi
    echo "Taken out of $config; the rest of it is as it was"
}

take_out_name() {
    if [ -n "$others" ]; then
        if [ -n "$named" ]; then put_block "$others"; fi
        printf 'The lines in %s stay for\n%s\n' "$config" "$others"
    elif [ -n "$first" ]; then
        take_out_block
    else
        echo "Nothing to take out of $config"
    fi
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
    check_add
    install_package
    read_config # again, as it may have changed meanwhile
    if [ -z "$first" ] && look && [ -z "$missing" ]; then
        echo "Loaded at every start of $programs already, by your configuration or the system's; nothing was added to it"
    else
        found=$(find_extension appends)
        [ -z "$found" ] || fail "the lines for $config would keep IPython or kernels from starting: $found"
        [ -n "$named" ] || add_name
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
    [ -z "$first" ] || { [ -n "$others" ] && [ -z "$named" ]; } || check_change
    uninstall_package
    read_config
    take_out_name
    [ -z "$others" ] || return 0
    for file in "$config" "${config%/*}/ipython_kernel_config.py"; do
        if [ -f "$file" ] && has_own_line "$file"; then echo "Left as it is: a line of your own in $file names reserve_gpu"; fi
    done
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
trap 'exit 130' INT
trap 'exit 143' TERM
find_python
ask_python
find_config
read_config
$action
