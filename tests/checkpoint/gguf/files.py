"""Small GGUF files as llama.cpp's converter makes them of Hugging Face checkpoints, written by the `gguf` library."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from safetensors.numpy import load_file, save_file

from kvjax.checkpoint import save_hf
from tests.checkpoint.folders import WEIGHTS, decoder

# llama.cpp's name of each tensor, by a Hugging Face name without its layer.
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.tok_embeddings": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "output": "output",
    "input_layernorm": "attn_norm",
    "attention_norm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "attention.wo": "attn_output",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "ffn_norm": "ffn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "mlp.gate_proj": "ffn_gate",
    "feed_forward.w1": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "feed_forward.w3": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "feed_forward.w2": "ffn_down",
}


@dataclass(frozen=True)
class Case:
    """A model of a family.

    Attributes:
        arch: GGUF's name of the architecture.
        hf: fields of its Hugging Face config, beyond the sizes.
        keys: keys of the metadata, beyond those of the sizes.
        permuted: whether llama.cpp's converter reorders the rows of q and k.

    llama.cpp's converter adds 1 to the norms of Gemma.
    """

    arch: str
    hf: dict[str, Any]
    keys: dict[str, Any] = field(default_factory=dict)
    permuted: bool = False

    @property
    def gemma(self) -> bool:
        return self.arch.startswith("gemma")

    def with_keys(self, **keys: Any) -> Case:
        """The case with other keys; `__` stands for a dot."""
        return dataclasses.replace(self, keys=self.keys | {key.replace("__", "."): keys[key] for key in keys})


YARN = {"factor": 4.0, "original_max_position_embeddings": 512, "rope_type": "yarn", "rope_theta": 1e6}
CASES = {
    "llama": Case("llama", {"model_type": "llama"}, permuted=True),
    "llama tied, biases": Case(
        "llama",
        {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        permuted=True,
    ),
    "mistral": Case(
        "llama", {"model_type": "mistral", "sliding_window": 7}, {"attention.sliding_window": 7}, permuted=True
    ),
    "qwen2": Case("qwen2", {"model_type": "qwen2", "tie_word_embeddings": True}),
    "qwen2 yarn": Case(
        "qwen2",
        {"model_type": "qwen2", "rope_parameters": YARN, "max_position_embeddings": 2048},
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 512,
            "rope.freq_base": 1e6,
        },
    ),
    "qwen3": Case("qwen3", {"model_type": "qwen3"}, {}),
    "phi3": Case("phi3", {"model_type": "phi3", "sliding_window": 9}, {"attention.sliding_window": 9}),
    "gemma2": Case(
        "gemma2",
        {"model_type": "gemma2", "sliding_window": 5, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 1.5},
        {"attention.sliding_window": 5, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 30.0},
    ),
    "gemma3": Case(
        "gemma3",
        {"model_type": "gemma3_text", "sliding_window": 5, "query_pre_attn_scalar": 8, "rope_theta": 1e6},
        {"attention.sliding_window": 5, "rope.freq_base": 1e6},
    ),
    "internlm2": Case("internlm2", {"model_type": "internlm2", "bias": False}, permuted=True),
}
SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
}
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "head_dim": 64}  # K-quants need 256


def permute(weights: np.ndarray, heads: int) -> np.ndarray:
    """The order of q's and k's rows in llama.cpp."""
    return weights.reshape(heads, 2, len(weights) // heads // 2, -1).swapaxes(1, 2).reshape(weights.shape)


def quantised(weights: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """The bytes of a matrix in a type. Where the library cannot quantise, they are random, with finite scales."""
    try:
        return gguf.quantize(weights, kind)
    except NotImplementedError:
        block, size = GGML_QUANT_SIZES[kind]
        shape = (len(weights), weights.shape[1] // block * size)
        return np.random.default_rng(0).integers(0, 64, shape, np.uint8)


def write(
    case: Case,
    path: Path,
    kind: str = "F32",
    folder: Path | None = None,
    tokenizer: Mapping[str, Any] | None = None,
    **sizes: Any,
) -> None:
    """Writes a random model as a GGUF file, and the same values as a Hugging Face folder.

    Args:
        case: the family.
        path: the file.
        kind: the type of the matrices.
        folder: the folder.
        tokenizer: the keys of a tokenizer.
        sizes: fields of SIZES to replace.
    """
    sizes = SIZES | sizes
    hf = sizes | case.hf
    folder = folder or path.with_suffix(".hf")
    save_hf(decoder(**hf), folder)
    stored, written = load_file(folder / WEIGHTS), {}
    out = gguf.GGUFWriter(path, case.arch)
    metadata(out, case, hf)
    for key, value in (tokenizer or {}).items():
        add(out, key, value)
    served = GGMLQuantizationType[kind]
    for name, weights in sorted(stored.items()):
        if weights.ndim == 1:
            written[name] = weights
            shifted = case.gemma and name.endswith("norm.weight")
            raw, kept = weights + np.float32(shifted), GGMLQuantizationType.F32
        else:
            raw, kept = quantised(weights, served), served
            written[name] = gguf.dequantize(raw, served)
        for part, rows in parts(name, raw, case, hf):
            out.add_tensor(part, np.ascontiguousarray(rows), raw_dtype=kept)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    save_file({name: np.ascontiguousarray(weights) for name, weights in written.items()}, folder / WEIGHTS)


def parts(name: str, raw: np.ndarray, case: Case, hf: dict[str, Any]) -> list[tuple[str, np.ndarray]]:
    """The tensors of the file that a tensor of the folder becomes: three of InternLM2's fused one."""
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)", name)
    base, suffix = (layer[2], layer[3]) if layer else name.rsplit(".", 1)
    prefix = f"blk.{layer[1]}." if layer else ""
    heads = {"attn_q": hf["num_attention_heads"], "attn_k": hf["num_key_value_heads"]}
    if base == "attention.wqkv":
        count, size = hf["num_key_value_heads"], hf["head_dim"]
        grouped = raw.reshape(count, -1, size, raw.shape[-1])
        found = {"attn_q": grouped[:, :-2], "attn_k": grouped[:, -2], "attn_v": grouped[:, -1]}
        split = {key: rows.reshape(-1, raw.shape[-1]) for key, rows in found.items()}
    else:
        own = {"post_attention_layernorm": "post_attention_norm"} if case.gemma else {}
        split = {(NAMES | own)[base]: raw}
    return [
        (f"{prefix}{key}.{suffix}", permute(rows, heads[key]) if case.permuted and key in heads else rows)
        for key, rows in split.items()
    ]


def metadata(out: gguf.GGUFWriter, case: Case, hf: dict[str, Any]) -> None:
    """Writes the keys that describe the model."""
    out.add_block_count(hf["num_hidden_layers"])
    out.add_context_length(hf["max_position_embeddings"])
    out.add_embedding_length(hf["hidden_size"])
    out.add_feed_forward_length(hf["intermediate_size"])
    out.add_head_count(hf["num_attention_heads"])
    out.add_head_count_kv(hf["num_key_value_heads"])
    out.add_layer_norm_rms_eps(hf["rms_norm_eps"])
    out.add_vocab_size(hf["vocab_size"])
    if case.arch == "qwen3" or case.gemma:
        out.add_key_length(hf["head_dim"])
        out.add_value_length(hf["head_dim"])
    for key, value in ({"rope.freq_base": hf["rope_theta"]} | case.keys).items():
        add(out, f"{case.arch}.{key}", value)


def add(out: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Writes a key in the type that llama.cpp's converter gives such a value."""
    {bool: out.add_bool, int: out.add_uint32, float: out.add_float32, str: out.add_string, list: out.add_array}[
        type(value)
    ](key, value)
