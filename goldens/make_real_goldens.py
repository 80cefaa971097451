"""Makes tests/golden/smollm2.npz: the entries that kvpress retains of an essay's first 600 tokens on SmolLM2.

tests/golden/README.md describes the format. The script runs in the environment of `make_goldens.py`, on a folder
that `kvjax convert` wrote:

    kvjax convert SmolLM2-135M-Instruct.Q4_1.gguf smollm2
    .venv-kvpress/bin/python -m goldens.make_real_goldens smollm2 PaulGrahamEssays/worked.txt
"""

from __future__ import annotations

import argparse
import json
from importlib.metadata import version
from pathlib import Path

import kvpress
import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from goldens.golden_presses import described
from goldens.make_goldens import positions, run, unhidden

LENGTH = 600
# Each retains a number of tokens per head, or on average, that needs no rounding.
PRESSES: dict[str, kvpress.BasePress] = {
    "snapkv": kvpress.SnapKVPress(0.75, window_size=32, kernel_size=7),
    "pyramidkv": kvpress.PyramidKVPress(0.75, window_size=16, kernel_size=5, beta=10),
    "tova": kvpress.TOVAPress(0.75),
    "kvcompose": kvpress.KVComposePress(compression_ratio=0.75),
    "adakv": kvpress.AdaKVPress(kvpress.SnapKVPress(0.75, window_size=32, kernel_size=7)),
    "expected_attention": kvpress.ExpectedAttentionPress(0.75),
    "keydiff": kvpress.KeyDiffPress(0.75),
    "lagkv": kvpress.LagKVPress(0.75, lag_size=59),  # retains 9 of each of 9 partitions, so no ranks tie
}
DESCRIPTIONS = {label: described(press) for label, press in PRESSES.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "tests" / "golden" / "smollm2.npz")
    given = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    prompt = torch.tensor(tokenizer(given.text.read_text(), add_special_tokens=False).input_ids[:LENGTH])
    full = {attention: run(model, prompt, attention) for attention in ("sdpa", "eager")}
    arrays = {"prompt": prompt.numpy().astype(np.uint16)}
    for label, press in PRESSES.items():
        out = run(model, prompt, "sdpa", press)
        if any(out["hidden"]):
            found = unhidden(out["hidden"], model.config.num_key_value_heads, LENGTH)
        else:
            reading = "eager" if isinstance(press, kvpress.KVComposePress) else "sdpa"  # the press selects it itself
            found = positions(out["kept"], full[reading]["kept"], press)
        kept = np.zeros((*found.shape[:2], LENGTH + 1), bool)  # the padding, -1, marks the last column
        np.put_along_axis(kept, found, True, axis=-1)
        arrays[label] = np.packbits(kept[..., :-1], axis=-1)
        print(label, kept[..., :-1].sum(-1).mean())
    packages = {name: version(name) for name in ("torch", "transformers", "kvpress")}
    np.savez_compressed(given.out, meta=json.dumps({"presses": DESCRIPTIONS, "versions": packages}), **arrays)


if __name__ == "__main__":
    main()
