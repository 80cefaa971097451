"""Maps the metadata of a GGUF file to the fields of a Hugging Face config, which the families of models read."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from kvjax.checks import shown
from kvjax.models import UnsupportedModelError
from kvjax.models.rope import Llama3Scaling, Rope

ARCHITECTURES = ("gemma2", "gemma3", "internlm2", "llama", "phi3", "qwen2", "qwen3")  # of GGUF; `llama` is Mistral too
FAMILIES = {"gemma3": "gemma3_text"}  # the family of an architecture with another name

FIELDS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
ATTENTION = "rope.scaling.attn_factor"
OPTIONAL = {
    "vocab_size",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.sliding_window",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    ATTENTION,
    "rope.scaling.original_context_length",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
}
SOFTCAPS = {"attn_logit_softcapping", "final_logit_softcapping"}
OWN = {"gemma2": SOFTCAPS, "gemma3": {*SOFTCAPS, "rope.freq_base_swa"}}  # more optional keys of an architecture
DIVIDED = {"gemma2": 46, "gemma3": 62}  # layers of the 27B models, whose queries are divided by sqrt(width / heads)
# Keys of what is not computed, with the values that turn it off; and keys that change nothing.
OFF = {"expert_count": 0, "expert_used_count": 0, "tensor_data_layout": "Meta AI original pth"}
SAMPLING = {"temp": "temperature", "penalty_repeat": "repetition_penalty"}  # after general.sampling.
NOTES = {"rope.scaling.finetuned"}

FREQUENCIES, SHORT, LONG = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
ROPE_TENSORS = (FREQUENCIES, SHORT, LONG)
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3_CONTEXT = 8192  # tokens, before the context was extended


def hf_config(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], np.ndarray]
) -> dict[str, Any]:
    """Returns the fields of a Hugging Face `config.json`.

    Args:
        metadata: the metadata of the file.
        shapes: the shape of each tensor. The tensors tell which biases there are, and whether the embeddings are tied.
        read: returns a tensor in float32, for the scaling of RoPE, which some files hold as a tensor.

    Raises:
        UnsupportedModelError: the architecture is not supported, a key is missing, or one asks for a computation that
            is not implemented. It names the key.
    """
    named = metadata.get("general.architecture")
    if named not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"general.architecture={shown(named)} is not supported; accepted: {', '.join(ARCHITECTURES)}"
        )
    keys = {key.removeprefix(f"{named}."): value for key, value in metadata.items() if key.startswith(f"{named}.")}
    _check(named, keys)
    heads, hidden = keys["attention.head_count"], keys["embedding_length"]
    hf = {field: keys[key] for key, field in FIELDS.items()}
    hf |= {
        "model_type": FAMILIES.get(named, named),
        "vocab_size": keys.get("vocab_size", shapes.get("token_embd.weight", (None,))[0]),
        "num_key_value_heads": keys.get("attention.head_count_kv", heads),
        "head_dim": keys.get("attention.key_length", hidden // heads),
        "tie_word_embeddings": "output.weight" not in shapes,
    }
    window = keys.get("attention.sliding_window") or None
    if named == "llama" and window is not None:
        hf |= {"model_type": "mistral", "sliding_window": window}
    elif named == "phi3":
        hf["sliding_window"] = window
    elif named in DIVIDED:
        hf |= _gemma(named, keys, hf["head_dim"], window)
    elif window is not None:
        raise _refused(named, "attention.sliding_window", window, "0")
    bias = "blk.0.attn_q.bias" in shapes
    if named == "internlm2":
        hf["bias"] = bias
    elif named != "phi3":
        hf |= {"attention_bias": bias or named == "qwen2", "mlp_bias": "blk.0.ffn_gate.bias" in shapes}
    return hf | _rope(named, keys, hf["head_dim"], {name: read(name) for name in ROPE_TENSORS if name in shapes})


def generation(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what the metadata say about generation, as the fields of `generation_config.json`.

    An answer ends at the end of the text, of a turn, or of a message (`eos`, `eot`, `eom`), as in llama.cpp.
    """
    found = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom", "bos", "padding")}
    ends = list(dict.fromkeys(found[name] for name in ("eos", "eot", "eom") if found[name] is not None))
    said: dict[str, Any] = {
        "bos_token_id": found["bos"],
        "eos_token_id": ends or None,
        "pad_token_id": found["padding"],
    }
    prefix = "general.sampling."
    for key, value in metadata.items():
        if key.startswith(prefix):
            named = key.removeprefix(prefix)
            said |= {SAMPLING.get(named, named): value, "do_sample": True}
    return {name: value for name, value in said.items() if value is not None}


def _gemma(named: str, keys: Mapping[str, Any], size: int, window: Any) -> dict[str, Any]:
    """Returns the fields of the metadata that Gemma alone has. The family knows which layers have a window."""
    divided = keys["block_count"] == DIVIDED[named]
    caps = {key: keys[key] for key in SOFTCAPS if key in keys}
    return caps | {
        "sliding_window": window,
        "query_pre_attn_scalar": keys["embedding_length"] // keys["attention.head_count"] if divided else size,
    }


def _check(named: str, keys: Mapping[str, Any]) -> None:
    """Raises UnsupportedModelError for missing and unknown keys, and for values that ask for more than is computed."""
    missing = [f"{named}.{key}" for key in FIELDS if key not in keys]
    if missing:
        raise UnsupportedModelError(f"its metadata lacks {', '.join(missing)}")
    optional = OPTIONAL | OWN.get(named, set())
    unknown = sorted(keys.keys() - FIELDS.keys() - optional - OFF.keys() - NOTES)
    if unknown:
        listed = ", ".join(f"{named}.{key}={shown(keys[key])}" for key in unknown)
        accepted = ", ".join(sorted(FIELDS.keys() | optional | OFF.keys() | NOTES))
        raise UnsupportedModelError(f"{listed} is not supported; accepted keys after {named}.: {accepted}")
    for key, off in OFF.items():
        if keys.get(key, off) != off:
            raise _refused(named, key, keys[key], repr(off))
    for key in ("attention.head_count", "attention.key_length", "attention.value_length", "embedding_length"):
        if key in keys and (type(keys[key]) is not int or keys[key] < 1):
            raise _refused(named, key, keys[key], "an integer >= 1")
    size = keys.get("attention.key_length", keys["embedding_length"] // keys["attention.head_count"])
    if keys.get("attention.value_length", size) != size:
        raise _refused(named, "attention.value_length", keys["attention.value_length"], f"the head size, {size}")
    rotated = keys.get("rope.dimension_count", size)
    if rotated != size and (named != "phi3" or type(rotated) is not int or not 0 < rotated < size):
        raise _refused(named, "rope.dimension_count", rotated, f"the head size, {size}")


def _rope(named: str, keys: Mapping[str, Any], size: int, tensors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The fields of a config that describe RoPE."""
    theta = keys.get("rope.freq_base", 10_000.0)
    scaling: dict[str, Any] = {"rope_theta": theta, "rope_type": "default"}
    scaled = "rope.scale_linear" in keys or "rope.scaling.factor" in keys
    kind = keys.get("rope.scaling.type", "linear" if scaled else "none")  # as in llama.cpp
    original = keys.get("rope.scaling.original_context_length")
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise _refused(named, "rope.scaling.type", kind, "none, linear, yarn, longrope")
    llama3 = _llama3(theta, size, tensors[FREQUENCIES]) if FREQUENCIES in tensors else {}
    if llama3 and kind != "none":
        raise _refused(named, "rope.scaling.type", kind, f"none, beside the tensor {FREQUENCIES}")
    if llama3:
        scaling |= llama3
    elif SHORT in tensors and LONG in tensors:
        scaling |= {"rope_type": "longrope", "attention_factor": keys.get(ATTENTION)}
        scaling |= {"short_factor": tensors[SHORT].tolist(), "long_factor": tensors[LONG].tolist()}
    elif kind == "longrope":
        raise UnsupportedModelError(f"{named}.rope.scaling.type='longrope' needs the tensors {SHORT} and {LONG}")
    elif kind == "linear":
        scaling |= {"rope_type": kind, "factor": keys.get("rope.scaling.factor", keys.get("rope.scale_linear"))}
    elif kind == "yarn":
        fields = {"factor": "factor", "beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
        found = {field: keys.get(f"rope.scaling.{key}") for field, key in fields.items()}
        found["attention_factor"] = _times_yarns(named, keys)
        scaling |= {"rope_type": kind} | {field: value for field, value in found.items() if value is not None}
        if original is not None:
            scaling["original_max_position_embeddings"] = original
    if scaling["rope_type"] not in ("longrope", "yarn") and keys.get(ATTENTION, 1) != 1:
        raise _refused(named, ATTENTION, keys[ATTENTION], "1, unless RoPE is scaled by longrope or yarn")
    hf: dict[str, Any] = {"rope_parameters": scaling}
    if named == "gemma3":
        local = {"rope_theta": keys.get("rope.freq_base_swa", 10_000.0), "rope_type": "default"}
        hf = {"rope_parameters": {"full_attention": scaling, "sliding_attention": local}}
    if named == "phi3":
        hf["partial_rotary_factor"] = keys.get("rope.dimension_count", size) / size
        hf["original_max_position_embeddings"] = original or keys["context_length"]
    return hf


def _times_yarns(named: str, keys: Mapping[str, Any]) -> float | None:
    """Returns yarn's attention factor, which llama.cpp multiplies by a factor of the file; None for yarn's own."""
    factor: Any = keys.get("rope.scaling.factor")
    times: Any = keys.get(ATTENTION, 1)
    if times == 1:
        return None
    for key, value in {"rope.scaling.factor": factor, ATTENTION: times}.items():
        if type(value) not in (int, float) or value <= 0:
            raise _refused(named, key, value, "a positive number")
    return float(times * (0.1 * math.log(factor) + 1))


def _llama3(theta: float, size: int, divisors: np.ndarray) -> dict[str, Any]:
    """The fields of Llama 3's scaling, of which a file holds what each frequency is divided by."""
    rope = Rope(theta)
    factor = float(np.max(divisors))
    if factor == 1 and divisors.min() == 1:
        return {}
    scaling = Llama3Scaling(factor, **LLAMA3, original_max_position_embeddings=LLAMA3_CONTEXT)
    frequencies = rope.frequencies(size)
    if len(divisors) != len(frequencies) or not np.allclose(
        divisors, frequencies / scaling(frequencies, theta), rtol=1e-4
    ):
        raise UnsupportedModelError(f"the tensor {FREQUENCIES} holds other numbers than Llama 3's scaling of RoPE")
    return LLAMA3 | {
        "rope_type": "llama3",
        "factor": factor,
        "original_max_position_embeddings": LLAMA3_CONTEXT,
    }


def _refused(named: str, key: str, value: Any, accepted: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{named}.{key}={shown(value)} is not supported; accepted: {accepted}")
