#!/usr/bin/env bash
# Measures what docs/results/smollm2.md reports: all steps in their order, or the ones that are named. The results of a
# step are in runs/smollm2/STEP, gates and statistics in runs. A step that was stopped continues where it stopped.
#     bash scripts/smollm2_results.sh           # all steps; takes many hours
#     bash scripts/smollm2_results.sh STEP ...
#     bash scripts/smollm2_results.sh --list    # the steps, and the minutes that docs/results/smollm2.md has for them
set -euo pipefail
cd "$(dirname "$0")/.."

# A step that has a file in configs/smollm2 runs its grid and makes the report.
list() {
    cat <<'END'
train_fastkvzip      48, on two cores
train_kvzap          16
train_duo_attention  24
statistics           not recorded
tasks                33
needles              not recorded
later                94, at a quarter, on two cores
matching             not recorded
ratios               not recorded
longer               18
longest              14
grid                 20
values               31
pooling              not recorded
needles_unknown      not recorded
later_unknown        35, of 30 prompts
longer_unknown       100, of which about 40 paused
grid_unknown         42
gates                not recorded
retention            not recorded
language             not recorded
language_8192        44
answers              not recorded
speed                13, on two cores
bits_seen            not recorded
search_seen          33
search_unknown       103
search_answers       40
search_dialogue      100
END
}

names=$(list | cut -d ' ' -f 1)
if [ "$*" = --list ]; then
    list
    exit
fi
for step in "$@"; do
    if ! grep -qxF -e "$step" <<<"$names"; then
        echo "unknown step $step: expected --list, or some of" $names >&2
        exit 1
    fi
done

source scripts/setup_venv.sh gguf plot eval train
data=$(python -m scripts.fetch_real_model)
model="$data/smollm2"
if [ ! -e "$model/config.json" ]; then
    kvjax convert "$data/SmolLM2-135M-Instruct.Q4_1.gguf" "$model"
fi

# `kvjax train-gates` continues an interrupted run, and refuses a folder that has gates.
train() { # METHOD OPTION...
    python -m scripts.gate_texts "$data" runs/texts
    if [ ! -e "runs/gates/$1/config.json" ]; then
        kvjax train-gates "$model" --method "$1" --data runs/texts/train --out "runs/gates/$1" "${@:2}"
    fi
}

train_fastkvzip() { train fastkvzip --steps 600 --length 1024 --distinct 75; }
train_kvzap() { train kvzap --steps 600 --length 1024 --distinct 75; }
train_duo_attention() {
    train duo_attention --steps 100 --length 640 --sinks 16 --recent 64
    python - <<'END' # the same shares of heads at every budget, which lukv reads
import numpy as np
from safetensors.numpy import load_file

gates = load_file("runs/gates/duo_attention/model.safetensors")
np.save("runs/gates/curve.npy", [[1 - gates[f"layers.{i}.gates"] for i in range(30)]] * 99)
END
}

statistics() {
    if [ ! -e runs/statistics/README.md ]; then
        kvjax measure-statistics "$model" --data "$data/PaulGrahamEssays" --out runs/statistics --batches 20 \
            --length 1024
    fi
}

evaluate() { # CONFIG DATA
    kvjax eval --config "configs/smollm2/$1.yaml" --model "$model" --data "$2" --out "runs/smollm2/$1"
    kvjax report "runs/smollm2/$1" --overwrite >/dev/null
}

# The output of a command, which ends with its table, is also in output.txt as soon as the command has ended.
show() { # STEP COMMAND...
    local output="runs/smollm2/$1/output.txt"
    mkdir -p "runs/smollm2/$1"
    "${@:2}" | tee "$output.part"
    mv "$output.part" "$output"
}

search() { # STEP USE OPTION...
    show "$1" python -m scripts.search_policy "$model" "$data" --use "$2" --out "runs/smollm2/$1" "${@:3}"
}

# 8 and 4 bits hold 1.88 and 3.56 times the entries of a tenth in the same bytes.
bits_seen() {
    search bits_seen seen --compare snapkv:budget=0.1,kernel=31 full \
        quantize:policy=snapkv,policy.budget=0.1882,policy.kernel=31,bits=8 \
        quantize:policy=dynamickv,policy.budget=0.1882,policy.kernel=31,bits=8 \
        quantize:policy=snapkv,policy.budget=0.3556,policy.kernel=31,bits=4 \
        quantize:policy=dynamickv,policy.budget=0.3556,policy.kernel=31,bits=4 \
        pyramidkv:budget=0.1,kernel=31 dynamickv:budget=0.1,kernel=31 snapkv:budget=0.1 pyramidkv:budget=0.1 \
        dynamickv:budget=0.1 streaming_llm:budget=0.1
}

for step in ${*:-$names}; do
    echo "$step"
    out="runs/smollm2/$step"
    case "$step" in
        train_* | statistics | bits_seen) "$step" ;;
        later)
            train_fastkvzip
            train_kvzap
            statistics
            evaluate later "$data"
            ;;
        later_unknown)
            statistics
            evaluate later_unknown "$data"
            ;;
        gates)
            train_fastkvzip
            train_kvzap
            evaluate gates runs/texts/test # essays that training has not seen
            ;;
        # This script alone does not resume, so that a whole table is not measured again.
        retention) [ -e "$out/output.txt" ] || show "$step" python -m benchmarks.measure_retention "$model" "$data" ;;
        language)
            show "$step" python -m benchmarks.measure_language "$model" "$data/PaulGrahamEssays" --out "$out" \
                --tokens 2048 --budgets 128 256 512
            ;;
        language_8192)
            show "$step" python -m benchmarks.measure_language "$model" "$data/PaulGrahamEssays" --out "$out" \
                --tokens 8192 --texts 4 --budgets 512 \
                --policies full 'streaming_llm:budget={budget}' 'h2o:budget={budget}' 'morphkv:budget={budget},window=32'
            ;;
        answers) show "$step" python -m benchmarks.measure_answers "$model" --out "$out" ;;
        speed) show "$step" python -m benchmarks.bench_answers "$model" --out "$out" ;;
        search_seen | search_unknown) search "$step" "${step#search_}" --budget 0.1 --samples 8 ;;
        search_*) search "$step" "${step#search_}" --budget 128 --length 512 --samples 8 --rounds 1 ;;
        *) evaluate "$step" "$data" ;;
    esac
done
