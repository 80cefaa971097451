"""Measures transformers alone on a GPU: a decoder of Llama-3.1-8B's shape with random bfloat16 weights, greedy answers.

    python -m benchmarks.bench_transformers > bench_transformers.jsonl

It needs a torch for GPUs, and no kvjax. `bench_decode.py --case roofline` measures kvjax on the same shape and
the same number of slots. `bench_gpu.py` measures both sides with the same weights, in turns, and kvpress too.
The output is JSON lines: the versions, then for each batch the time to read the prompts and the tokens/s of all rows
together, as medians of `--repeats`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
import transformers

LLAMA_8B = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rope_theta": 500_000.0,
}
SMALL = LLAMA_8B | {"vocab_size": 1000, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}


def model(sizes: dict[str, float], device: torch.device) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with device:
        return transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**sizes)).eval()


def seconds(decoder: transformers.PreTrainedModel, prompt: torch.Tensor, new: int) -> float:
    """The time of an answer of `new` tokens, the reading of the prompt included."""
    synchronize(prompt.device)
    started = time.perf_counter()
    with torch.inference_mode():
        mask = torch.ones_like(prompt)
        decoder.generate(prompt, attention_mask=mask, do_sample=False, min_new_tokens=new, max_new_tokens=new)
    synchronize(prompt.device)
    return time.perf_counter() - started


def synchronize(device: torch.device) -> None:
    """Waits for a GPU; a CPU has nothing to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt", type=int, default=1920, help="tokens in a prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens that take a step each")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--small", action="store_true", help="a small model and short prompts, on the CPU of any machine"
    )
    given = parser.parse_args()
    device = torch.device("cpu" if given.small else "cuda")
    if given.small:
        given.prompt = min(given.prompt, 128)
    decoder = model(SMALL if given.small else LLAMA_8B, device)
    facts = {"device": "cpu" if given.small else torch.cuda.get_device_name(), "torch": torch.__version__}
    print(json.dumps(facts | {"transformers": transformers.__version__}), flush=True)
    for batch in given.batch:
        prompt = torch.randint(0, decoder.config.vocab_size, (batch, given.prompt), device=device)
        seconds(decoder, prompt, 4)
        one, many = (
            statistics.median(seconds(decoder, prompt, new) for _ in range(given.repeats)) for new in (1, 1 + given.new)
        )
        rate = batch * given.new / (many - one)
        print(json.dumps({"batch": batch, "prefill_seconds": one, "decode_tokens_per_second": rate}), flush=True)


if __name__ == "__main__":
    main()
