#!/usr/bin/env bash
# Makes docs/leaderboard.md's results: RULER at 4,096 tokens on one model, step by step. A step that was stopped goes on.
#     bash scripts/leaderboard.sh MODEL DATA            # all steps, each at 5 and then at 10 prompts per task
#     bash scripts/leaderboard.sh MODEL DATA STEP...    # some of them, at PROMPTS prompts per task (10)
#     bash scripts/leaderboard.sh --list                # the steps, and the minutes that they took
#     bash scripts/leaderboard.sh --small               # ten minutes: a small model, which it downloads
# MODEL is what `kvjax.load` takes, DATA a folder with RULER's PaulGrahamEssays.json, squad.json and hotpotqa.json.
set -euo pipefail
cd "$(dirname "$0")/.."

# A step is a grid of configs/leaderboard. The minutes are those of two cores.
list() {
    cat <<'END'
statistics  the numbers that qfilter, expected_attention_stats and triattention read    5, beside other work
once        the presets that read the text once, 75 % removed                           9 to 35 for 190 answers, beside other work
decoding    the presets that evict while decoding too                                   6 to 13 for 75 answers, beside other work
gates       presets that read gates, which it trains on the model                       70 to train, beside other work
twice       the presets that read it twice                                              6 to 11 for 10 answers of one method, beside other work
costly      presets that take longer to compress it than the model takes to read it      not recorded
composed    compositions of the best with other parts, 75 and 87.5 % removed            83 for 180 answers, beside other work
shares      the papers' methods and the best, 25, 50 and 87.5 % removed                 not recorded
seen        the same with the question seen, 75 and 87.5 % removed                      7 for 275 answers
smaller     the same with SmolLM2-135M-Instruct at 1,024 tokens                         100 for 1,800 answers, beside other work
varied      a part of once, with a text of its own for each prompt                      4 to 7 for 100 answers
page        runs/leaderboard/board.html, from the results that are there                not recorded
END
}

steps=$(list | cut -d ' ' -f 1)
case "${1:-}" in
    --list)
        list
        exit
        ;;
    --small)
        source scripts/setup_venv.sh gguf eval
        data=$(python -m scripts.fetch_real_model)
        kvjax eval --config configs/leaderboard/small.yaml --model "$data/SmolLM2-135M-Instruct.Q4_1.gguf" --data "$data" \
            --out runs/leaderboard/small
        exec kvjax report runs/leaderboard/small --leaderboard runs/leaderboard/small.html --overwrite
        ;;
esac
if [ $# -lt 2 ]; then
    echo "expected MODEL DATA, --list or --small: see the beginning of scripts/leaderboard.sh" >&2
    exit 1
fi
model=$1 data=$2
shift 2
for step in "$@"; do
    if ! grep -qxF -e "$step" <<<"$steps"; then
        echo "unknown step $step: expected some of" $steps >&2
        exit 1
    fi
done

source scripts/setup_venv.sh gguf eval

statistics() {
    if [ ! -e runs/leaderboard/statistics/README.md ]; then
        python -c 'import json, pathlib, sys; print(json.loads(pathlib.Path(sys.argv[1]).read_bytes())["text"])' \
            "$data/PaulGrahamEssays.json" >runs/leaderboard/essays.txt
        kvjax measure-statistics "$model" --data runs/leaderboard/essays.txt --out runs/leaderboard/statistics \
            --batches 20 --length 1024
    fi
}

train() { # METHOD TEXTS OPTIONS...
    if [ ! -e "runs/leaderboard/trained/$1/model.safetensors" ]; then
        kvjax train-gates "$model" --method "$1" --data "runs/leaderboard/texts/$2" --out "runs/leaderboard/trained/$1" \
            --learning-rate 0.002 "${@:3}"
    fi
}

train_gates() {
    if [ ! -e runs/leaderboard/texts/prompts ]; then
        python -m scripts.board_texts "$model" "$data" runs/leaderboard/texts
    fi
    train fastkvzip texts --length 1024 --steps 320 --distinct 40
    train lookaheadkv prompts --length 512 --steps 120 --tokens 16 --answer 16
    train restorekv prompts --length 512 --steps 40 --question 48 --answer 16 --base compactor:budget=0.25
}

page() {
    local runs=()
    for step in once decoding gates twice costly composed shares seen smaller varied; do
        [ ! -e "runs/leaderboard/$step/run.json" ] || runs+=("runs/leaderboard/$step")
    done
    kvjax report "${runs[@]}" --leaderboard runs/leaderboard/board.html \
        --beside docs/results/leaderboard/published.csv --overwrite
}

ask() { # STEP PROMPTS MODEL
    kvjax eval --config "configs/leaderboard/$1.yaml" --model "$3" --data "$data" --out "runs/leaderboard/$1" --limit "$2"
}

run() { # PROMPTS STEP...
    for step in "${@:2}"; do
        echo "$step, $1 prompts per task"
        case "$step" in
            statistics | page) "$step" ;;
            smaller) ask "$step" "$1" "$(python -m scripts.fetch_real_model)/SmolLM2-135M-Instruct.Q4_1.gguf" ;;
            gates)
                train_gates
                ask "$step" "$1" "$model"
                ;;
            *)
                statistics
                ask "$step" "$1" "$model"
                ;;
        esac
    done
}

mkdir -p runs/leaderboard
if [ $# -gt 0 ]; then
    run "${PROMPTS:-10}" "$@"
else
    run 5 $steps
    run 10 $steps
fi
