"""Checkpoints of models that take images too: their text decoder is read, and written by itself."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import kvjax
from kvjax.checkpoint import load, read_headers, save_hf, source_of
from kvjax.models import Decoder, Mixture, UnsupportedModelError, config_from_hf
from tests.models.configs import FULL, GEMMA3, GEMMA4, MINISTRAL3, MISTRAL, SLIDING
from tests.models.plain import logits
from tests.tiny import hybrid, latents


@pytest.fixture
def multimodal(tmp_path: Path) -> Path:
    """The folder of a tiny Qwen3.5 as it is published: a nested config, and tensors that a text does not need."""
    folder = tmp_path / "published"
    save_hf(hybrid(), folder)
    text = json.loads((folder / "config.json").read_text())
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "image_token_id": 7,
        "model_type": "qwen3_5",
        "text_config": {name: value for name, value in text.items() if name != "architectures"} | {"eos_token_id": 5},
        "tie_word_embeddings": False,
        "video_token_id": 8,
        "vision_config": {"depth": 2, "model_type": "qwen3_5"},
        "vision_end_token_id": 9,
        "vision_start_token_id": 10,
    }
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    other = {name: np.ones((2, 2), np.float32) for name in ("model.visual.blocks.0.norm1.weight", "mtp.fc.weight")}
    save_file(tensors | other, folder / "model.safetensors")
    return folder


def changed(folder: Path, **fields: Any) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text()) | fields


@pytest.mark.long
def test_the_text_decoder_is_read_and_written(multimodal, tmp_path):
    params, _ = load(multimodal)
    assert params.config == hybrid().config
    assert params.card.end_tokens == (5,)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(params), jax.tree.leaves(hybrid()))
    save_hf(params, tmp_path / "text")
    written = json.loads((tmp_path / "text" / "config.json").read_text())
    assert (written["model_type"], written["architectures"]) == ("qwen3_5_text", ["Qwen3_5ForCausalLM"])
    assert not written.keys() & {"text_config", "vision_config", "image_token_id"}
    again, _ = load(tmp_path / "text")
    assert again.card.end_tokens == (5,)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(again), jax.tree.leaves(hybrid()))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"text_config": None}, "text_config=None"),
        ({"text_config": {"model_type": "qwen3"}}, "accepted: an object with model_type 'qwen3_5_text'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config={'quant_method': 'fp8'}"),
        ({"audio_config": {"depth": 1}}, "audio_config={'depth': 1}"),
    ],
)
def test_what_lies_beside_the_text_decoder_is_not_guessed(multimodal, fields, message):
    with pytest.raises(UnsupportedModelError) as caught:
        config_from_hf(changed(multimodal, **fields))
    assert message in str(caught.value)


def test_the_outer_config_ties_the_embeddings(multimodal):
    assert config_from_hf(changed(multimodal, tie_word_embeddings=True)).tie_embeddings


def test_the_outer_config_says_where_answers_end(multimodal):
    """As Gemma 4 is published: the token that ends turns is an end there, and that of texts alone is inside."""
    (multimodal / "config.json").write_text(json.dumps(changed(multimodal, eos_token_id=[5, 6], pad_token_id=None)))
    assert source_of(multimodal).card().end_tokens == (5, 6)


@pytest.fixture
def mixed(multimodal: Path) -> Path:
    """The folder with the dtypes of published ones: float32 for two vectors of each recurrent layer, else bfloat16."""
    tensors = load_file(multimodal / "model.safetensors")
    kept = ("linear_attn.A_log", "linear_attn.norm.weight")
    save_file(
        {name: x if name.endswith(kept) else x.astype(jnp.bfloat16) for name, x in tensors.items()},
        multimodal / "model.safetensors",
    )
    return multimodal


@pytest.mark.long
def test_vectors_in_float32_do_not_widen_the_model(mixed, tmp_path):
    """They stay as they are stored, and all other weights stay in bfloat16. A written checkpoint has the same bits."""
    assert read_headers(source_of(mixed)).dtype == jnp.bfloat16
    params, _ = load(mixed)
    net = params.layers[0].before[0].net
    assert params.embed.dtype == net.inputs.dtype == net.decay_bias.dtype == jnp.bfloat16
    assert net.log_decay.dtype == net.scale.dtype == jnp.float32
    assert logits(params, np.arange(6)[None]).dtype == logits(hybrid(), np.arange(6)[None]).dtype
    cache = kvjax.prefill(params, np.arange(6)[None])
    assert cache.dtype == jnp.bfloat16
    assert cache.recurrent[0][0].window.dtype == jnp.bfloat16
    save_hf(params, tmp_path / "text")
    written, given = (load_file(folder / "model.safetensors") for folder in (tmp_path / "text", mixed))
    for name, tensor in written.items():
        source = given[name.replace("model.", "model.language_model.", 1)]
        assert tensor.dtype == source.dtype
        np.testing.assert_array_equal(tensor, source, err_msg=name)
    assert {x.dtype for x in jax.tree.leaves(load(mixed, dtype="bfloat16")[0])} == {jnp.dtype("bfloat16")}


def test_a_matrix_in_float32_widens_the_model(mixed):
    tensors = load_file(mixed / "model.safetensors")
    name = next(name for name in tensors if name.endswith("in_proj_qkv.weight"))
    save_file(tensors | {name: tensors[name].astype(np.float32)}, mixed / "model.safetensors")
    assert {x.dtype for x in jax.tree.leaves(load(mixed)[0])} == {jnp.dtype("float32")}


@pytest.mark.long
def test_gemma4_as_it_is_published(tmp_path):
    shared = {"num_hidden_layers": 4, "num_kv_shared_layers": 2}
    config = config_from_hf(GEMMA4 | shared | {"attention_k_eq_v": True, "layer_types": [SLIDING, FULL] * 2})
    params = Decoder(config, nnx.Rngs(0))
    save_hf(params, tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())
    other = {"vision_config": {"depth": 2}, "audio_config": None, "boi_token_id": 7, "eoa_token_index": 8}
    nested = {"model_type": "gemma4", "architectures": ["Gemma4ForConditionalGeneration"], "text_config": text} | other
    (tmp_path / "config.json").write_text(json.dumps(nested))
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(tmp_path / "model.safetensors").items()
    }
    assert "model.language_model.layers.0.layer_scalar" in tensors
    assert "model.language_model.layers.1.self_attn.v_proj.weight" not in tensors
    keys = "language_model.layers.3.self_attn.k_proj", "language_model.layers.2.self_attn.v_norm"  # of readers
    assert f"model.{keys[0]}.weight" not in tensors
    others = "vision_tower.a", "embed_vision.b", *keys
    unread = {f"model.{name}.weight": np.ones((2, 2), np.float32) for name in others}
    save_file(tensors | unread, tmp_path / "model.safetensors")
    read, _ = load(tmp_path)
    assert read.config == config
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(read), jax.tree.leaves(params))


def test_gemma_3_4b():
    """The fields of google/gemma-3-4b-it that describe its text decoder, which rely on transformers' defaults."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10_240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = config_from_hf({"model_type": "gemma3", "text_config": text, "mm_tokens_per_image": 256})
    assert (config.vocab_size, config.num_heads, config.num_kv_heads, config.head_dim) == (262_208, 8, 4, 256)
    assert config.windows[:6] == (1024,) * 5 + (None,)
    assert config.tie_embeddings
    assert (config.rope.theta, config.window_rope.theta) == (1e6, 1e4)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_gemma3_as_it_is_published(tmp_path, prefix):
    """By Google, and under the names of the modules of transformers 5."""
    params = Decoder(config_from_hf(GEMMA3), nnx.Rngs(0))
    save_hf(params, tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())
    nested = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    nested |= {"vision_config": {"image_size": 896}, "mm_tokens_per_image": 256, "eos_token_id": [1, 6]}
    nested |= {"boi_token_index": 7, "eoi_token_index": 8, "image_token_index": 9}
    (tmp_path / "config.json").write_text(json.dumps(nested))
    tensors = load_file(tmp_path / "model.safetensors")
    named = {name.replace("model.", prefix, 1): tensor for name, tensor in tensors.items()}
    other = prefix.partition("language_model.")[0]
    unread = {f"{other}{name}": np.ones((2, 2), np.float32) for name in ("vision_tower.a", "multi_modal_projector.b")}
    save_file(named | unread, tmp_path / "model.safetensors")
    read, _ = load(tmp_path)
    assert (read.config, read.card.end_tokens) == (params.config, (1, 6))
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(read), jax.tree.leaves(params))


@pytest.mark.parametrize(
    ("text", "prefix"), [(MISTRAL, "language_model.model."), (MINISTRAL3, "model.language_model.")]
)
def test_mistral3_as_it_is_published(tmp_path, text, prefix):
    """By Mistral, and under the names of the modules of transformers 5."""
    params = Decoder(config_from_hf(text), nnx.Rngs(0))
    save_hf(params, tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())
    nested = {"model_type": "mistral3", "architectures": ["Mistral3ForConditionalGeneration"], "text_config": text}
    nested |= {"vision_config": {"model_type": "pixtral"}, "vision_feature_layer": -1, "image_token_index": 10}
    nested |= {"multimodal_projector_bias": False, "projector_hidden_act": "gelu", "spatial_merge_size": 2}
    (tmp_path / "config.json").write_text(json.dumps(nested))
    tensors = load_file(tmp_path / "model.safetensors")
    head = "language_model." if prefix.startswith("language_model.") else ""
    named = {n.replace("model.", prefix, 1) if n.startswith("model.") else f"{head}{n}": x for n, x in tensors.items()}
    other = prefix.partition("language_model.")[0]
    unread = {f"{other}{name}": np.ones((2, 2), np.float32) for name in ("vision_tower.a", "multi_modal_projector.b")}
    save_file(named | unread, tmp_path / "model.safetensors")
    read, _ = load(tmp_path)
    assert read.config == params.config
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(read), jax.tree.leaves(params))
    with pytest.raises(UnsupportedModelError, match="an object with model_type 'mistral' or 'ministral3'"):
        config_from_hf(nested | {"text_config": {"model_type": "qwen3"}})


@pytest.mark.long
def test_layers_that_foretell_several_tokens_are_left_unread(tmp_path):
    """DeepSeek-V3's file holds one more layer than its config counts, with experts and matrices of its own."""
    save_hf(latents(), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    more = {name.replace("layers.1.", "layers.2."): x for name, x in tensors.items() if "layers.1." in name}
    assert more
    other = {"model.layers.2.eh_proj.weight": np.ones((32, 64), np.float32)}
    save_file(tensors | more | other, tmp_path / "model.safetensors")
    params, _ = load(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(params), jax.tree.leaves(latents()))


def test_experts_of_a_layer_in_one_tensor_are_read(tmp_path):
    """As Qwen3.5 with experts is published: nested, and with gate and up of all experts in one tensor."""
    config = replace(hybrid().config, family="qwen3_5_moe_text", mlp_size=12, mixture=Mixture(4, 2, 20, shared=12))
    params = Decoder(config, nnx.Rngs(0))
    save_hf(params, tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())
    assert (text["model_type"], text["architectures"]) == ("qwen3_5_moe_text", ["Qwen3_5MoeForCausalLM"])
    assert "intermediate_size" not in text
    nested = {"model_type": "qwen3_5_moe", "architectures": ["Qwen3_5MoeForConditionalGeneration"], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(nested))
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.endswith(".mlp.experts.0.gate_proj.weight")]:
        block = name.removesuffix(".0.gate_proj.weight")
        gate, up, down = (
            np.stack([tensors.pop(f"{block}.{i}.{part}_proj.weight") for i in range(4)])
            for part in ("gate", "up", "down")
        )
        tensors |= {f"{block}.gate_up_proj": np.concatenate([gate, up], axis=1), f"{block}.down_proj": down}
    assert len([name for name in tensors if name.endswith(".gate_up_proj")]) == 6
    published = {name.replace("model.", "model.language_model.", 1): x for name, x in tensors.items()}
    save_file(
        published | {"mtp.layers.0.mlp.experts.down_proj": np.ones((2, 2), np.float32)}, tmp_path / "model.safetensors"
    )
    read, _ = load(tmp_path)
    assert read.config == config
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(read), jax.tree.leaves(params))
