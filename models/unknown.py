"""Knows which fields of a config a family reads. Any other may change what a model computes, and is refused."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from .config import NOT_COMPUTED
from .fields import UnsupportedModelError

# The fields that every family reads. A family names its own ones in FIELDS.
READ = """
    architectures model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads head_dim max_position_embeddings rms_norm_eps tie_word_embeddings rope_parameters rope_theta
    rope_scaling partial_rotary_factor original_max_position_embeddings attention_bias mlp_bias
"""
# The common attributes of transformers' configs: labels, outputs, training, and how the model is run or was written.
SILENT = """
    auto_map transformers_version torch_dtype dtype use_cache initializer_range initializer_factor pretraining_tp
    attention_dropout hidden_dropout resid_pdrop embd_pdrop attn_pdrop hidden_dropout_prob attention_probs_dropout_prob
    output_attentions output_hidden_states output_router_logits router_aux_loss_coef router_jitter_noise return_dict
    id2label label2id num_labels problem_type finetuning_task task_specific_params chunk_size_feed_forward torchscript
    use_bfloat16 tf_legacy_loss is_decoder tie_encoder_decoder keys_to_ignore_at_inference gradient_checkpointing
    name_or_path _name_or_path _commit_hash attn_implementation _attn_implementation _attn_implementation_internal
    _attn_implementation_autoset _experts_implementation _flash_attn_2_enabled cache_implementation tokenizer_class
    prefix license max_sequence_length neftune_noise_alpha unsloth_fixed unsloth_version is_llama_config
    transformers.js_config
"""
# What a config says about generation. `kvjax.checkpoint.card` reads it.
GENERATION = """
    bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id decoder_start_token_id max_length max_new_tokens
    min_length min_new_tokens do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k
    top_p min_p typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size
    bad_words_ids num_return_sequences output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id
    remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
"""
KNOWN = frozenset((READ + SILENT + GENERATION).split())
OFF: tuple[Any, ...] = (None, False, 0, "", [], {})
MOST = 60  # characters of a value in a message


def check_known(hf: Mapping[str, Any], own: Collection[str]) -> None:
    """Raises UnsupportedModelError for fields that are unknown and not null, false, zero or empty.

    Args:
        hf: the content of `config.json`.
        own: the fields that the family reads beyond those of all families.
    """
    unknown = [field for field in beyond_llama(hf, own) if field.partition("=")[0] not in NOT_COMPUTED]
    if unknown:
        raise UnsupportedModelError(
            f"config field(s) {', '.join(unknown)} are not known for model_type={hf.get('model_type')!r}, and may "
            "change what the model computes; accepted: the fields of the family, and null for any other field"
        )


def beyond_llama(hf: Mapping[str, Any], own: Collection[str] = ()) -> list[str]:
    """Returns `field=value` for each field that is not Llama's, sorted. Null, false and empty fields ask for nothing.

    A field of NOT_COMPUTED counts if it has another value than those that turn the computation off.
    """
    found = []
    for field, value in sorted(hf.items()):
        known = field in KNOWN or field in own
        off = value in NOT_COMPUTED[field] if field in NOT_COMPUTED else known or value in OFF
        if not off:
            text = repr(value)
            found.append(f"{field}={text if len(text) <= MOST else text[: MOST - 3] + '...'}")
    return found
