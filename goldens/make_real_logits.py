"""Makes tests/golden/smollm2_logits.npz: what transformers computes with SmolLM2, as it reads the GGUF file itself.

tests/golden/README.md describes the format. The script needs the extras `gguf` and `parity`:

    python -m goldens.make_real_logits "$(python -m scripts.fetch_real_model)"
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

import kvjax
from scripts.fetch_real_model import ESSAYS, MODEL

LENGTH, NEW, EVERY = 512, 64, 1024
CHAT = [{"role": "user", "content": "Write a short story about a lighthouse."}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    _, tokenizer = kvjax.load(folder / MODEL)
    assert tokenizer is not None
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=MODEL, dtype=torch.float32)
    essay = tokenizer((folder / ESSAYS / "worked.txt").read_text(), add_special_tokens=False).input_ids[:LENGTH]
    prompt = torch.tensor([tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)])
    with torch.no_grad():
        logits = model(torch.tensor([essay])).logits[0, :, ::EVERY].numpy()
        # Without a mask, transformers masks the tokens that end a turn, because they also pad.
        answer = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW, do_sample=False, eos_token_id=None
        )
    np.savez_compressed(
        Path(__file__).parents[1] / "tests" / "golden" / "smollm2_logits.npz",
        essay=np.array(essay, np.uint16),
        logits=logits,
        prompt=prompt[0].numpy().astype(np.uint16),
        answer=answer[0, prompt.shape[1] :].numpy().astype(np.uint16),
    )


if __name__ == "__main__":
    main()
