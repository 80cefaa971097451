#!/usr/bin/env bash
# Builds a source distribution and a wheel, installs each into an empty environment, and runs `kvjax demo` there.
# PYTHON names the interpreter of the environment.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_venv.sh dev
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

python -m build --outdir "$work/dist" . >"$work/build.log" 2>&1 || { cat "$work/build.log" >&2; exit 1; }
python -m venv --upgrade-deps "$work/venv"

# The demo in a folder of its own: nothing of the checkout is on the path.
try() {
    "$work/venv/bin/python" -m pip install -qq --disable-pip-version-check --force-reinstall "$@"
    (
        cd "$work"
        env -u PYTHONPATH "$work/venv/bin/kvjax" --version
        env -u PYTHONPATH "$work/venv/bin/kvjax" demo --length 256 --examples 1 --budget 48
    )
}

try "$work"/dist/*.whl
try --no-deps "$work"/dist/*.tar.gz
