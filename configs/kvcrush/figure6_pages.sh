#!/usr/bin/env bash
# KVCrush, Figure 6: pages of 32 tokens on GSM8K and XSum, by lm-evaluation-harness. MODEL is
# microsoft/Phi-3-mini-4k-instruct, meta-llama/Meta-Llama-3-8B-Instruct or meta-llama/Llama-2-7b-chat-hf. The baseline,
# H2O by pages, is a share of representatives of one page. XSum is one of the harness's unitxt tasks: pip install
# "lm-eval[unitxt]".
#     bash configs/kvcrush/figure6_pages.sh MODEL [any option of lm_eval, such as --limit 100]
set -euo pipefail
model=$1
shift
for policy in \
    "full" \
    "kvcrush:base=h2o;base.budget=672;base.recent=128;share=0.048;granularity=page;page=32" \
    "kvcrush:base=h2o;base.budget=672;base.recent=128;share=0.25;granularity=page;page=32"; do
    python -m kvjax.evaluation.lm_eval_model --model kvjax --model_args "pretrained=$model,policy=$policy" \
        --tasks gsm8k,xsum "$@"
done
