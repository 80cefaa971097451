#!/usr/bin/env bash
# Format, lint, types and tests, in an environment it makes itself.
#     bash scripts/test.sh              what a change can break
#     bash scripts/test.sh -k name      any argument of pytest; of the tests that these choose, also those marked long
#     bash scripts/test.sh --all        also published models, other machines, and the day's part of slow tests and of all
#                                       products of options; downloads PyTorch, Ray, compilers for GPUs and TPUs (1.2 GB),
#                                       a model. With further arguments it runs all slow tests that these choose
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_venv.sh dev plot eval

if [ "${1:-}" = --all ]; then
    shift
    set -- -m "" "$@"
    day=$((10#$(date +%j)))
    export EXHAUSTIVE="${EXHAUSTIVE:-$((day % 32))/32}"
    [ $# -gt 2 ] || export SLOW="${SLOW:-$((day % 8))/8}"
    setup_venv dev plot eval parity lm-eval ray
    source scripts/setup_compilers.sh
else
    setup_small_torch dev plot eval
    [ $# = 0 ] || set -- -m "not slow and not exhaustive and not aot and not real" "$@"
fi

# Workers and later runs share what XLA has compiled.
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$PWD/.jax_cache}"
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0

python -m ruff format --check .
python -m ruff check .
python -m mypy
exec python -m pytest -n 2 --dist worksteal --durations=20 "$@"
