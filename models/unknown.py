"""What a config of a family that is not here asks for beyond Llama."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .config import NOT_COMPUTED

# Fields that Llama reads, and fields that say nothing about what a model computes for a text.
READ = """
    architectures model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads head_dim max_position_embeddings rms_norm_eps tie_word_embeddings rope_parameters rope_theta
    rope_scaling attention_bias mlp_bias
"""
SILENT = """
    auto_map transformers_version torch_dtype dtype bos_token_id eos_token_id pad_token_id sep_token_id use_cache
    initializer_range pretraining_tp attention_dropout hidden_dropout resid_pdrop embd_pdrop output_attentions
    output_hidden_states output_router_logits router_aux_loss_coef return_dict id2label label2id problem_type
    chunk_size_feed_forward _name_or_path attn_implementation
"""
KNOWN = frozenset((READ + SILENT).split())
OFF: tuple[Any, ...] = (None, False, 0, "", [], {})
MOST = 60  # characters of a value in a message


def beyond_llama(hf: Mapping[str, Any]) -> list[str]:
    """Returns `field=value` for each field that is not Llama's, sorted. Null, false and empty fields ask for nothing.

    A field of NOT_COMPUTED counts if it has another value than those that turn the computation off.
    """
    found = []
    for field, value in sorted(hf.items()):
        off = value in NOT_COMPUTED[field] if field in NOT_COMPUTED else field in KNOWN or value in OFF
        if not off:
            text = repr(value)
            found.append(f"{field}={text if len(text) <= MOST else text[: MOST - 3] + '...'}")
    return found
