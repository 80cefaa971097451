#!/usr/bin/env bash
# KVCrush, Table 2: anchors on GSM8K, by lm-evaluation-harness. MODEL is microsoft/Phi-3-mini-4k-instruct,
# meta-llama/Meta-Llama-3-8B-Instruct or meta-llama/Llama-2-7b-chat-hf.
#     bash configs/kvcrush/table2_gsm8k.sh MODEL [any option of lm_eval, such as --limit 100]
# 672 entries are 32 initial, 512 middle and 128 recent ones (Table 1). The rows of Table 2 say 128-384, so three
# quarters of the middle, 384 of 672 entries, are representatives; the paper's text and Table 1 say one quarter. A token
# has a bit per query head (section 4.3.3).
set -euo pipefail
model=$1
shift
base="base=h2o;base.budget=672;base.sinks=32;base.recent=128"
for policy in \
    "h2o:budget=672;sinks=32;recent=128" \
    "kvcrush:$base;share=0.5715;bits=query;anchor=0" \
    "kvcrush:$base;share=0.5715;bits=query;anchor=mean" \
    "kvcrush:$base;share=0.5715;bits=query;anchor=alternate"; do
    python -m kvjax.evaluation.lm_eval_model --model kvjax --model_args "pretrained=$model,policy=$policy" \
        --tasks gsm8k "$@"
done
