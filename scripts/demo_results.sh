#!/usr/bin/env bash
# Every preset on the model that ships, at eight ratios and in both settings: the results in a folder, the report in
# docs/results. Two processes share the work on two cores; one that was stopped goes on where it was.
#     bash scripts/demo_results.sh [FOLDER]
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_venv.sh plot
out="${1:-demo_output/results}"

kvjax eval --config configs/demo/policies.yaml --out "$out" --host 0/2 &
first=$!
kvjax eval --config configs/demo/policies.yaml --out "$out" --host 1/2
wait "$first"
kvjax report "$out" --out docs/results --against snapkv >/dev/null
