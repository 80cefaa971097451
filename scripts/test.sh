#!/usr/bin/env bash
# Format, lint, types and tests, in an environment it makes itself.
#     bash scripts/test.sh              what a change can break
#     bash scripts/test.sh --all        all tests; downloads PyTorch, Ray, compilers for GPUs and TPUs (1.2 GB), a model
#     bash scripts/test.sh -k name      any argument of pytest
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_venv.sh dev plot eval

# Whether PyTorch is installed, or pip finds a build without CUDA's libraries. Those are several gigabytes.
small_torch() {
    if [ -f .venv/kvjax-parity ]; then return; fi
    python -m pip install -qq --disable-pip-version-check --retries 0 --no-deps --dry-run --report - \
        "$(grep -o 'torch==[0-9.]*' pyproject.toml)" 2>/dev/null | python -c '
import json, sys
from pip._vendor.packaging.requirements import Requirement

stated = [Requirement(line) for found in json.load(sys.stdin)["install"] for line in found["metadata"]["requires_dist"]]
needed = [each.name for each in stated if each.marker is None or each.marker.evaluate({"extra": ""})]
sys.exit(any(name.startswith(("cuda", "nvidia")) for name in needed))' 2>/dev/null
}

if [ "${1:-}" = --all ]; then
    shift
    set -- -m "" "$@"
    setup_venv dev plot eval parity lm-eval ray
    source scripts/setup_compilers.sh
elif small_torch; then
    setup_venv dev plot eval parity
else
    echo "pip finds no PyTorch without CUDA's libraries; the tests that compare with it are skipped." >&2
fi

# Workers and later runs share what XLA has compiled.
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$PWD/.jax_cache}"
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0

python -m ruff format --check .
python -m ruff check .
python -m mypy
exec python -m pytest -n 2 --dist worksteal --durations=20 "$@"
