"""Speed on a GPU: kvjax against transformers, and against kvpress's SnapKV, on the same card and random weights.

    python scripts/bench_gpu.py --peer-python .venv-kvpress/bin/python > bench_gpu.jsonl

It is scripts/bench_cpu.py with a model of Llama-3.1-8B's shape in bfloat16, 16 GB that are written to `--folder` first,
and held by either side. The peer's environment needs a torch for GPUs.
"""

from __future__ import annotations

from bench_cpu import GPU, main

if __name__ == "__main__":
    main(__doc__, GPU)
