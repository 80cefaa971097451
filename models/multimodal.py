"""Models that take images, films and sounds beside text: the config of their text decoder, which alone is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import gemma3_text, gemma4_text, ministral3, mistral, qwen3_5_moe_text, qwen3_5_text
from .fields import unsupported
from .unknown import GENERATION

TEXT = {  # the architecture of the text decoder by its model_type, of which the first is the default
    "gemma3": {"gemma3_text": gemma3_text.ARCHITECTURE},
    "gemma4": {"gemma4_text": gemma4_text.ARCHITECTURE},
    "mistral3": {"mistral": mistral.ARCHITECTURE, "ministral3": ministral3.ARCHITECTURE},
    "qwen3_5": {"qwen3_5_text": qwen3_5_text.ARCHITECTURE},
    "qwen3_5_moe": {"qwen3_5_moe_text": qwen3_5_moe_text.ARCHITECTURE},
}
UNREAD = """
    model_type architectures text_config vision_config image_token_id video_token_id vision_start_token_id
    vision_end_token_id
"""
OWN = {
    "gemma3": "mm_tokens_per_image boi_token_index eoi_token_index image_token_index",
    "gemma4": "audio_config audio_token_id boi_token_id eoi_token_id boa_token_id eoa_token_id eoa_token_index",
    "mistral3": "image_token_index multimodal_projector_bias projector_hidden_act spatial_merge_size "
    "vision_feature_layer",
}


def text_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config of the text decoder of `config.json`, which of most models is all of it.

    Fields beside `text_config` are kept where it does not have them. As in transformers, they decide whether embeddings
    are tied, and what is said about generation. Those of images, films and sounds are left out.

    Raises:
        UnsupportedModelError: `text_config` is not an object of the text decoder's `model_type`.
    """
    named = hf.get("model_type")
    if not isinstance(named, str) or named not in TEXT:
        return dict(hf)
    text, accepted = hf.get("text_config"), TEXT[named]
    model_type = text.get("model_type", next(iter(accepted))) if isinstance(text, Mapping) else None
    if not isinstance(text, Mapping) or model_type not in accepted:
        raise unsupported("text_config", text, f"an object with model_type {' or '.join(map(repr, accepted))}")
    unread = {*UNREAD.split(), *OWN.get(named, "").split()}
    beside = {field: value for field, value in hf.items() if field not in unread}
    first = [field for field in GENERATION.split() if beside.get(field) is not None]
    outer = {field: beside[field] for field in ("tie_word_embeddings", *first) if field in beside}
    return beside | dict(text) | outer | {"model_type": model_type, "architectures": [accepted[model_type]]}
