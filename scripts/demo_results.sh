#!/usr/bin/env bash
# A grid of configs/demo on the model that ships: answers in a folder, their report in docs/results.
# Two processes share the work on two cores; one that was stopped goes on where it was.
#     bash scripts/demo_results.sh policies [FOLDER]   # every preset at eight ratios, 512 tokens
#     bash scripts/demo_results.sh methods [FOLDER]    # every method at four, 1,024 tokens, 100 questions a task: hours
#     bash scripts/demo_results.sh kvcrush [FOLDER]    # what KVCrush's representatives add
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_venv.sh plot
grid="${1:?the name of a grid in configs/demo}"
out="${2:-demo_output/$grid}"

kvjax eval --config "configs/demo/$grid.yaml" --out "$out" --host 0/2 &
first=$!
kvjax eval --config "configs/demo/$grid.yaml" --out "$out" --host 1/2
wait "$first"
kvjax report "$out" --out "$out/report" --against snapkv >/dev/null
mkdir -p "docs/results/$grid"
cp "$out"/report/report.md "$out"/report/*.png "docs/results/$grid/"
