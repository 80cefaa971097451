#!/usr/bin/env bash
# KVCrush, Table 2: anchors on GSM8K, by lm-evaluation-harness. MODEL is microsoft/Phi-3-mini-4k-instruct,
# meta-llama/Meta-Llama-3-8B-Instruct or meta-llama/Llama-2-7b-chat-hf.
#     bash configs/kvcrush/table2_gsm8k.sh MODEL [any option of lm_eval, such as --limit 100]
# 672 entries are 32 initial, 512 middle and 128 recent ones; the rows say 128-384, so three quarters of the middle are
# representatives (the paper's text says one quarter).
set -euo pipefail
model=$1
shift
for policy in \
    "h2o:budget=672;recent=128" \
    "kvcrush:base=h2o;base.budget=672;base.recent=128;share=0.571;anchor=random" \
    "kvcrush:base=h2o;base.budget=672;base.recent=128;share=0.571;anchor=mean" \
    "kvcrush:base=h2o;base.budget=672;base.recent=128;share=0.571;anchor=alternate"; do
    python -m kvjax.evaluation.lm_eval_model --model kvjax --model_args "pretrained=$model,policy=$policy" --tasks gsm8k "$@"
done
