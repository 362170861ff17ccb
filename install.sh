#!/bin/sh
# Install this checkout of reserve_gpu with pip, and run `reserve-gpu setup`. See the usage below.
set -eu

usage='Usage: sh install.sh [--uninstall]

Install this checkout with pip into the first python3 on PATH, and run `reserve-gpu setup`, which makes
IPython and Jupyter kernels load the extension when they start. To choose another Python, run
PYTHON=/path/to/python sh install.sh

  --uninstall   run `reserve-gpu setup --undo`, and uninstall the package
  -h, --help    show this text'

fail() {
    printf 'install.sh: %s\n' "$*" >&2
    exit 1
}

case ${1-} in
    -h | --help) printf '%s\n' "$usage" && exit ;;
    '' | --uninstall) ;;
    *) printf 'install.sh: unknown argument: %s\n\n%s\n' "$1" "$usage" >&2 && exit 2 ;;
esac
export PIP_DISABLE_PIP_VERSION_CHECK=1
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
python=$(command -v "${PYTHON:-python3}") || fail "${PYTHON:-python3}: not found. Install Python 3.10 or newer."
case $python in /*) ;; *) python=$PWD/$python ;; esac

if [ "${1-}" = --uninstall ]; then
    PYTHONPATH=$here "$python" -m reserve_gpu setup --undo || fail "Nothing was uninstalled."
    cd / # in the checkout, pip could mistake the results of a build for the installed package
    exec "$python" -m pip uninstall --yes reserve_gpu
fi

# Build in a temporary directory, because the checkout might be read-only, and might contain files of an older build.
# https://setuptools.pypa.io/en/latest/deprecated/distutils/configfile.html
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM
mkdir "$scratch/info"
printf '[build]\nbuild_base=%s\n[egg_info]\negg_base=%s\n' "$scratch/build" "$scratch/info" >"$scratch/setup.cfg"
echo "Installing reserve_gpu into $python ..."
(cd "$here" && DIST_EXTRA_CONFIG=$scratch/setup.cfg "$python" -m pip install --quiet .) ||
    fail "pip could not install reserve_gpu (see above). Nothing else was changed."
"$python" -m reserve_gpu setup || fail "reserve_gpu is installed, but IPython does not load it when it starts (see above)."
