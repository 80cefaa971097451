#!/usr/bin/env bash
# KVCrush, Figure 6: pages of 32 tokens on GSM8K and XSum, by lm-evaluation-harness. MODEL is
# microsoft/Phi-3-mini-4k-instruct, meta-llama/Meta-Llama-3-8B-Instruct or meta-llama/Llama-2-7b-chat-hf. XSum is one of
# the harness's unitxt tasks: pip install "lm-eval[unitxt]".
#     bash configs/kvcrush/figure6_pages.sh MODEL [any option of lm_eval, such as --limit 100]
# 672 entries are 32 initial, 512 middle and 128 recent ones (Table 1): 16 pages of the middle. Paged H2O, the baseline,
# is share=0.0: the pages with the highest mean scores. With KVCrush, 4 of the 16 pages are representatives.
# A page has the bits of its tokens, one per query head, side by side.
set -euo pipefail
model=$1
shift
base="base=h2o;base.budget=672;base.sinks=32;base.recent=128"
for policy in \
    "full" \
    "kvcrush:$base;share=0.0;granularity=page;page=32" \
    "kvcrush:$base;share=0.1905;bits=query;granularity=page;page=32"; do
    python -m kvjax.evaluation.lm_eval_model --model kvjax --model_args "pretrained=$model,policy=$policy" \
        --tasks gsm8k,xsum "$@"
done
