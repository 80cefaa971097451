# Source this at the root of a checkout: `source scripts/setup_venv.sh EXTRA...` makes .venv, or reuses it, with kvjax
# installed editable with these extras, and puts it first on the path. It installs nothing if pyproject.toml has not
# changed since. PYTHON names the interpreter that .venv is made with, and VENV another folder than .venv.

find_python() {
    local candidate candidates=(python3 python python3.13 python3.12 python3.11)
    if [ -n "${PYTHON:-}" ]; then candidates=("$PYTHON"); fi
    for candidate in "${candidates[@]}"; do
        if "$candidate" -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
            >/dev/null 2>&1; then
            echo "$candidate"
            return
        fi
    done
    echo "kvjax needs Python 3.11, 3.12 or 3.13 with its venv module; tried: ${candidates[*]}." \
        "PYTHON=/path/to/python names another." >&2
    return 1
}

setup_venv() {
    local extra wanted python state venv=${VENV:-.venv}
    # Entry points hold absolute paths, so a checkout that has moved is installed again.
    state="$PWD $(cksum <pyproject.toml)"
    for extra in "$@"; do
        if [ "$(cat "$venv/kvjax-$extra" 2>/dev/null)" != "$state" ]; then wanted=yes; fi
    done
    if [ -n "${wanted:-}" ]; then
        # Also completes an environment that was left half made.
        if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
            python=$(find_python) || return 1
            "$python" -m venv --upgrade-deps "$venv" || return 1
        fi
        extra=$(IFS=,; echo "$*")
        echo "Installing kvjax[$extra] in $venv; this can take a few minutes." >&2
        # Python compiles a module when it is first imported, and most modules of these packages never are.
        "$venv/bin/python" -m pip install -qq --disable-pip-version-check --no-compile --editable ".[$extra]" || return 1
        for extra in "$@"; do echo "$state" >"$venv/kvjax-$extra"; done
    fi
    export PATH="$PWD/$venv/bin:$PATH"
}

# Adds the extra `parity` to these, if pip finds a PyTorch without CUDA's libraries, which are several gigabytes.
setup_small_torch() {
    local wanted
    wanted=$(grep -o 'torch==[0-9.]*' pyproject.toml)
    if [ -f "${VENV:-.venv}/kvjax-parity" ] || python -m pip install -qq --disable-pip-version-check --retries 0 \
        --no-deps --dry-run --report - "$wanted" 2>/dev/null | python -c '
import json, sys
from pip._vendor.packaging.requirements import Requirement

stated = [Requirement(line) for found in json.load(sys.stdin)["install"] for line in found["metadata"]["requires_dist"]]
needed = [each.name for each in stated if each.marker is None or each.marker.evaluate({"extra": ""})]
sys.exit(any(name.startswith(("cuda", "nvidia")) for name in needed))' 2>/dev/null; then
        setup_venv "$@" parity
    else
        echo "pip finds no PyTorch without CUDA's libraries; the tests that compare with it are skipped." >&2
    fi
}

setup_venv "$@"
