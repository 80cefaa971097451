"""Measures the speed on a GPU of kvjax, of transformers, and of kvpress's SnapKV, with the same random weights.

    python -m benchmarks.bench_gpu --peer-python .venv-kvpress/bin/python > bench_gpu.jsonl

It is `bench_cpu.py` with a model of Llama-3.1-8B's shape in bfloat16. The script first writes the 16 GB of
weights to `--folder`, and each side loads them. The environment of the peer needs a torch for GPUs.
"""

from __future__ import annotations

from benchmarks.bench_cpu import GPU, main
from kvjax.runtime.gpu_flags import set_gpu_flags

if __name__ == "__main__":
    set_gpu_flags()  # the sides inherit them
    main(__doc__, GPU)
