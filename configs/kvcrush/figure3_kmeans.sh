#!/usr/bin/env bash
# KVCrush, Figure 3: representatives by k-means and by rank, GSM8K, by lm-evaluation-harness. MODEL is
# microsoft/Phi-3-mini-4k-instruct or meta-llama/Meta-Llama-3-8B-Instruct.
#     bash configs/kvcrush/figure3_kmeans.sh MODEL [any option of lm_eval, such as --limit 100]
set -euo pipefail
model=$1
shift
for policy in \
    "h2o:budget=672;recent=128" \
    "kvcrush:base=h2o;base.budget=672;base.recent=128;share=0.25" \
    "kvcrush:base=h2o;base.budget=672;base.recent=128;share=0.25;pick=kmeans"; do
    python -m kvjax.evaluation.lm_eval_model --model kvjax --model_args "pretrained=$model,policy=$policy" --tasks gsm8k "$@"
done
