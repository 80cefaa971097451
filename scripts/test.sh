#!/usr/bin/env bash
# Format, lint, types and tests, in an environment it makes itself.
#     bash scripts/test.sh              everything
#     bash scripts/test.sh --fast       without the tests marked slow or real, and those that compile for GPUs and TPUs
#     bash scripts/test.sh --all        with the tests marked exhaustive: all of each product of options
#     bash scripts/test.sh -k name      any argument of pytest
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_venv.sh dev parity plot eval lm-eval ray

if [ "${1:-}" = --fast ]; then
    shift
    set -- -m "not slow and not aot and not real and not exhaustive" "$@"
else
    if [ "${1:-}" = --all ]; then
        shift
        set -- -m "" "$@"
    fi
    source scripts/setup_compilers.sh
fi

# Workers and later runs share what XLA has compiled.
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$PWD/.jax_cache}"
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0

python -m ruff format --check .
python -m ruff check .
python -m mypy
exec python -m pytest -n 2 --dist worksteal --durations=20 "$@"
