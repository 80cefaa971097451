#!/usr/bin/env bash
# Some tests under the oldest versions that pyproject.toml allows: Python 3.11 with the lowest version of each dependency.
#     PYTHON=/path/to/python3.11 bash scripts/test_oldest.sh
#     bash scripts/test_oldest.sh -k name      any argument of pytest
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHON="${PYTHON:-python3.11}" VENV=.venv-oldest
mkdir -p "$VENV"
"$PYTHON" -m scripts.oldest_versions >"$VENV/constraints.txt"
export PIP_CONSTRAINT="$PWD/$VENV/constraints.txt"
source scripts/setup_venv.sh dev plot parity

export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$PWD/.jax_cache}"
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0
if [ $# = 0 ]; then
    # With the long ones: the oldest versions differ most where whole paths run.
    set -- -m "not slow and not exhaustive and not aot and not real" \
        tests/test_generate.py tests/test_stream.py tests/test_kv_cache.py tests/methods/test_kvpress.py \
        tests/models/test_families.py tests/models/test_parity.py tests/pallas_kernels/test_mosaic_gpu.py \
        tests/checkpoint tests/engine tests/serve/test_answers.py tests/cli/test_cli.py
fi
exec python -m pytest -n 2 --dist worksteal "$@"
