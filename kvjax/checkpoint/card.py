"""Reads what config.json and generation_config.json say about generation, and writes both back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kvjax.checkpoint.errors import CheckpointError
from kvjax.checkpoint.folder import GENERATION, read_json, read_text_config
from kvjax.checks import is_integer, shown
from kvjax.decoding import sampling
from kvjax.models import Card, Decoder, Suppressed, family
from kvjax.models.unknown import GENERATION as OF_CONFIG
from kvjax.models.unknown import OFF

ENDS, PENALTY, SUPPRESSED = "eos_token_id", "repetition_penalty", ("suppress_tokens", "begin_suppress_tokens")
SAMPLING = ("temperature", "top_k", "top_p", "min_p")  # of `kvjax.Sampler`
NEUTRAL: dict[str, tuple[Any, ...]] = {"temperature": (1.0,), "top_k": (0, -1), "top_p": (1.0,), "min_p": (0.0,)}
# Values that ask for nothing, of fields that are not applied. Of those that are not listed these are OFF.
NOT_APPLIED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences", "guidance_scale"), (1,)),
    **dict.fromkeys(("typical_p", "top_h", "encoder_repetition_penalty"), (1.0,)),
}
# Fields that say which tokens an answer has or lacks, and are not applied. Id 0 is an id.
REFUSED = """
    forced_bos_token_id forced_eos_token_id bad_words_ids force_words_ids constraints sequence_bias stop_strings
"""
# Fields that change no token: names of ids, lengths (the caller's), outputs, and how transformers runs.
SILENT = """
    bos_token_id pad_token_id decoder_start_token_id transformers_version _from_model_config _commit_hash use_cache
    max_length max_new_tokens max_time early_stopping length_penalty diversity_penalty output_attentions
    output_hidden_states output_scores output_logits return_dict_in_generate cache_implementation cache_config
    max_cache_len compile_config disable_compile continuous_batching_config low_memory prefill_chunk_size is_assistant
    num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold prompt_lookup_num_tokens
    max_matching_ngram_size assistant_early_exit assistant_lookbehind target_lookbehind assistant_ensemble_weight
    speculation_type use_mtp remove_invalid_values renormalize_logits sep_token_id unk_token_id
"""


def read_card(folder: Path, vocab_size: int) -> Card:
    """Reads the card of a folder. Raises CheckpointError for a file or a value that is not accepted."""
    said, generation = read_text_config(folder), folder / GENERATION
    given = read_json(generation) if generation.is_file() else {}
    return card_of(
        folder,
        {name: said[name] for name in (ENDS, "bos_token_id", "pad_token_id") if name in said}
        | ({} if given else {name: said[name] for name in OF_CONFIG.split() if name in said})
        | {name: value for name, value in given.items() if value is not None},
        vocab_size,
        config=json.dumps(said),
        generation=generation.read_text("utf-8-sig") if generation.is_file() else "",
    )


def card_of(source: Path, said: Mapping[str, Any], vocab_size: int, config: str = "", generation: str = "") -> Card:
    """Returns the card of what is said in the terms of generation_config.json.

    Ids beyond the vocabulary are left out, because no answer has them. `generation_config.json` precedes `config.json`
    for each field, as in transformers.

    Raises:
        CheckpointError: a value is not accepted, or a field asks for tokens in a way that is not applied. It names the
            field.
    """
    refused = [
        f"{field}={shown(said[field])}" for field in REFUSED.split() if said.get(field) not in (None, "", [], {})
    ]
    if refused:
        why = "which kvjax does not apply to answers; expected null, or a copy without these fields"
        raise CheckpointError(source, [f"{GENERATION} or config.json asks for {', '.join(refused)}, {why}"])

    def ids(field: str) -> tuple[int, ...]:
        value = said.get(field)
        listed = [] if value is None else value if isinstance(value, list) else [value]
        if not all(map(is_integer, listed)):
            raise CheckpointError(source, [f"{field}={shown(value)}: expected a token id or a list of ids"])
        return tuple(dict.fromkeys(token for token in listed if 0 <= token < vocab_size))

    suppressed = Suppressed(*map(ids, SUPPRESSED))
    if len({*suppressed.always, *suppressed.first}) == vocab_size:
        raise CheckpointError(source, [f"{' and '.join(SUPPRESSED)} have all ids: expected some that may be drawn"])
    first = {field: next(iter(ids(field)), None) for field in ("bos_token_id", "pad_token_id")}
    return Card(
        end_tokens=ids(ENDS),
        sampler=_sampler(source, said),
        suppressed=suppressed,
        ignored=tuple(f"{field}={shown(value)}" for field, value in sorted(said.items()) if _ignored(field, value)),
        bos_token=first["bos_token_id"],
        pad_token=first["pad_token_id"],
        config=config,
        generation=generation,
    )


def _ignored(field: str, value: Any) -> bool:
    """Returns whether a field would change answers and is not applied."""
    applied = field in (ENDS, PENALTY, "do_sample", *SAMPLING, *SUPPRESSED)
    nothing = REFUSED.split() + SILENT.split()
    return not (applied or field in nothing or value is None or value in NOT_APPLIED.get(field, OFF))


def _sampler(source: Path, said: Mapping[str, Any]) -> str | None:
    """The default sampler as text. As in transformers, nothing is drawn unless `do_sample` is true."""
    draws = said.get("do_sample")
    if not isinstance(draws, bool | None):
        raise CheckpointError(source, [f"do_sample={shown(draws)}: expected true or false"])
    draws = bool(draws) and said.get("temperature") != 0
    parts = [] if draws else ["greedy"]
    for field in (*(SAMPLING if draws else ()), PENALTY):
        value = said.get(field)
        if value is not None and (field == "temperature" or value not in NEUTRAL.get(field, (1.0,))):
            parts.append(f"{field}={value}")
    text = ",".join(parts) or "temperature=1.0"
    try:
        sampling.parse(text)
    except ValueError as error:
        raise CheckpointError(source, [f"{GENERATION} asks for another sampler than kvjax has: {error}"]) from None
    return None if text == "greedy" and said.get("do_sample") is None else text


def written_config(params: Decoder, tokenizer: Any) -> dict[str, Any]:
    """Returns the content of config.json for a decoder.

    Fields that were read from a config.json stay as they were, but for those of facts that have changed since. No field
    is added to them unless a fact has changed that it states.
    """
    config, card = params.config, params.card
    ours, named = family(config.family).config_to_hf(config), str(params.embed.dtype)
    if not card.config:
        said: dict[str, Any] = {
            "bos_token_id": card.bos_token,
            "eos_token_id": list(card.end_tokens) if len(card.end_tokens) > 1 else next(iter(card.end_tokens), None),
            "pad_token_id": card.pad_token,
        }
        if tokenizer is not None:
            said |= {name: getattr(tokenizer, name) for name in said if said[name] is None and hasattr(tokenizer, name)}
        # Without a version, transformers takes the tokenizer for an old one and warns of it.
        return ours | {"dtype": named, "transformers_version": version("transformers")} | said
    source = json.loads(card.config)
    module = family(source["model_type"])
    before = module.config_to_hf(module.config_from_hf(source))
    written = source | {name: value for name, value in ours.items() if name not in before or before[name] != value}
    written |= {name: named for name in ("dtype", "torch_dtype") if source.get(name) is not None}
    written.pop("quantization_config", None)  # weights are dequantised when they are read
    return written


def write_said(folder: Path, params: Decoder, tokenizer: Any) -> None:
    """Writes config.json, and generation_config.json if there is something to say."""
    config = written_config(params, tokenizer)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if params.card.generation:
        (folder / GENERATION).write_text(params.card.generation, "utf-8")
