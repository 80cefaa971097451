#!/usr/bin/env bash
# A published model, SmolLM2-135M-Instruct, finds needles in essays under six policies. The first run downloads 93 MB into
# ~/.cache/kvjax/real, or the folder KVJAX_REAL, outside of the repository. Arguments go to `kvjax demo`.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_venv.sh gguf plot eval
folder=$(python -m scripts.fetch_real_model)
if [ ! -e "$folder/smollm2/config.json" ]; then
    kvjax convert "$folder/SmolLM2-135M-Instruct.Q4_1.gguf" "$folder/smollm2"
fi
exec kvjax demo --model "$folder/smollm2" --data "$folder" --out "$folder/output" "$@"
