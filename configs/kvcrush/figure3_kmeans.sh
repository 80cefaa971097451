#!/usr/bin/env bash
# KVCrush, Figure 3: representatives by k-means and by rank, GSM8K, by lm-evaluation-harness. MODEL is
# microsoft/Phi-3-mini-4k-instruct or meta-llama/Meta-Llama-3-8B-Instruct.
#     bash configs/kvcrush/figure3_kmeans.sh MODEL [any option of lm_eval, such as --limit 100]
# 672 entries are 32 initial, 512 middle and 128 recent ones (Table 1). One quarter of the middle, 128 of 672 entries,
# are representatives. A token has a bit per query head (section 4.3.3).
set -euo pipefail
model=$1
shift
base="base=h2o;base.budget=672;base.sinks=32;base.recent=128"
for policy in \
    "h2o:budget=672;sinks=32;recent=128" \
    "kvcrush:$base;share=0.1905;bits=query" \
    "kvcrush:$base;share=0.1905;bits=query;pick=kmeans"; do
    python -m kvjax.evaluation.lm_eval_model --model kvjax --model_args "pretrained=$model,policy=$policy" \
        --tasks gsm8k "$@"
done
