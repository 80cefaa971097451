"""The tiny random models of `make_goldens.py`, which runs in the environment that it describes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedModel

VOCABULARY = 256


@dataclass(frozen=True)
class TinyModel:
    seed: int
    heads: int
    kv_heads: int
    head_dim: int
    family: str = "llama"
    layers: int = 3
    tied: bool = False

    def build(self) -> PreTrainedModel:
        """Returns a model with weights of standard deviation 0.16, so that scores do not nearly tie.

        The 0.02 of transformers makes attention almost uniform.
        """
        shape = {
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": self.tied,
            "bos_token_id": None,
            "eos_token_id": None,
        }
        model: PreTrainedModel
        if self.family == "mistral":
            model = MistralForCausalLM(MistralConfig(**shape, sliding_window=None))
        else:
            model = LlamaForCausalLM(LlamaConfig(**shape))
        generator = torch.Generator().manual_seed(self.seed)
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.data = 1 + 0.2 * noise if "norm" in name else 0.16 * noise
        return model.eval()


MODELS = {
    "llama_group1": TinyModel(seed=1, heads=4, kv_heads=4, head_dim=16),
    "llama_group4": TinyModel(seed=2, heads=8, kv_heads=2, head_dim=16, tied=True),
    "llama_group7": TinyModel(seed=3, heads=14, kv_heads=2, head_dim=8),
    "mistral": TinyModel(seed=5, heads=8, kv_heads=2, head_dim=8, family="mistral", layers=4),
}
