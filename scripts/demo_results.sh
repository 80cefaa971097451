#!/usr/bin/env bash
# Runs a grid of configs/demo on the model that ships with kvjax and copies its report to docs/results.
# Two workers divide the work on two cores. A run that was stopped continues where it stopped.
#     bash scripts/demo_results.sh policies [FOLDER]   # presets that need no training at eight ratios, 512 tokens
#     bash scripts/demo_results.sh later [FOLDER]      # presets that came after these, at three ratios
#     bash scripts/demo_results.sh methods [FOLDER]    # every method at four ratios, 1,024 tokens, 100 questions per task; takes hours
#     bash scripts/demo_results.sh once [FOLDER]       # policies that read a text once, question unknown, 1,024 tokens
#     bash scripts/demo_results.sh kvcrush [FOLDER]    # the effect of KVCrush's representatives
#     bash scripts/demo_results.sh statistics [FOLDER] # policies that read statistics of queries
#     bash scripts/demo_results.sh gates [FOLDER]      # policies that read trained gates, beside KVzip
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_venv.sh plot ray
grid="${1:?the name of a grid in configs/demo}"
out="${2:-demo_output/$grid}"

kvjax eval --config "configs/demo/$grid.yaml" --out "$out" --ray local --workers 2
kvjax report "$out" --out "$out/report" --against snapkv --overwrite >/dev/null
mkdir -p "docs/results/$grid"
cp "$out"/report/report.md "$out"/report/*.png "docs/results/$grid/"
