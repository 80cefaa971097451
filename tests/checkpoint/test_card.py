"""What checkpoints say beside their weights: it is read, honoured, and written back as it was."""

from __future__ import annotations

import json
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from flax import nnx

import kvjax
from kvjax.checkpoint import CheckpointError, load, restore, save, save_hf
from kvjax.checkpoint.card import ENDS, PENALTY, REFUSED, SAMPLING, SILENT, SUPPRESSED, card_of
from kvjax.checkpoint.gguf.config import generation
from kvjax.decoding.sampling import Greedy, Sampler
from kvjax.models import Decoder, Suppressed, config_from_hf
from kvjax.request.ends import default_ends, turn_ends
from kvjax.request.request import AnswerOptions, Request
from kvjax.serve.schema import Completion
from tests import tiny
from tests.checkpoint.folders import decoder
from tests.checkpoint.published import CONFIGS
from tests.checkpoint.published_fields import GENERATION
from tests.tiny import VOCAB, full_logits

# The fields that differ after a round trip, and why.
DIFFERENCES = {"quantization_config": "weights are dequantised when they are read"}
WRITERS = {"hf": (save_hf, load), "orbax": (save, restore)}


def written(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / name).read_text())


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "form"),
    [
        *((name, "hf") for name in CONFIGS),
        ("Llama-3.2-1B", "orbax"),
        ("gpt-oss-20b", "orbax"),
        ("Qwen3.5-9B, text", "orbax"),
    ],
)
def test_published_configs_are_written_back_field_by_field(tmp_path, name, form):
    config, (write, read) = CONFIGS[name], WRITERS[form]
    dtype = config.get("torch_dtype") or config.get("dtype") or "float32"
    save_hf(Decoder(config_from_hf(config), nnx.Rngs(0), dtype), tmp_path / "first")
    for file, content in (("config.json", config), ("generation_config.json", GENERATION)):
        (tmp_path / "first" / file).write_text(json.dumps(content))
    params, _ = load(tmp_path / "first")
    write(params, tmp_path / "second")
    write(read(tmp_path / "second")[0], tmp_path / "third")
    expected = {field: value for field, value in config.items() if field not in DIFFERENCES}
    assert written(tmp_path / "third", "config.json") == expected
    assert written(tmp_path / "third", "generation_config.json") == GENERATION
    assert str(params.embed.dtype) == dtype


def test_a_config_of_our_own_names_the_transformers_of_its_form(tmp_path):
    save_hf(decoder(), tmp_path / "ours")
    assert written(tmp_path / "ours", "config.json")["transformers_version"] == transformers.__version__


def test_a_fact_that_has_changed_is_written(tmp_path):
    params = decoder()
    save_hf(params, tmp_path / "first")
    params, _ = load(tmp_path / "first", "bfloat16")
    save_hf(params, tmp_path / "second")
    changed = written(tmp_path / "second", "config.json")
    assert changed == written(tmp_path / "first", "config.json") | {"dtype": "bfloat16"}


def test_a_byte_order_mark_is_no_part_of_the_json(tmp_path):
    """Editors of Windows write one."""
    save_hf(decoder(), tmp_path / "first")
    config = (tmp_path / "first" / "config.json").read_text()
    for name, text in (("config.json", config), ("generation_config.json", json.dumps({"eos_token_id": 3}))):
        (tmp_path / "first" / name).write_text(text, "utf-8-sig")
    params, _ = load(tmp_path / "first")
    assert params.card.end_tokens == (3,)
    save_hf(params, tmp_path / "second")
    assert (tmp_path / "second" / "config.json").read_text() == config
    assert written(tmp_path / "second", "generation_config.json") == {"eos_token_id": 3}


SAID = [
    ({"eos_token_id": 3}, (3,), None),
    ({"eos_token_id": [3, 5, 3, 99]}, (3, 5), None),
    ({"temperature": 0.6, "top_p": 0.9}, (), None),  # transformers draws only with do_sample
    ({"do_sample": False, "temperature": 0.6}, (), "greedy"),
    ({"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 1.0}, (), "temperature=0.6,top_k=20"),
    ({"do_sample": True, "min_p": 0.1, "repetition_penalty": 1.1}, (), "min_p=0.1,repetition_penalty=1.1"),
    ({"do_sample": True}, (), "temperature=1.0"),
    ({"repetition_penalty": 1.2}, (), "greedy,repetition_penalty=1.2"),
]


@pytest.mark.parametrize(("said", "ends", "sampler"), SAID)
def test_end_tokens_and_samplers(said, ends, sampler):
    card = card_of(Path("x"), said, vocab_size=40)
    assert (card.end_tokens, card.sampler, card.ignored) == (ends, sampler, ())


def test_what_is_not_applied_is_named():
    said = {
        "no_repeat_ngram_size": 3,
        "encoder_no_repeat_ngram_size": 2,
        "guidance_scale": 0,
        "num_beams": 4,
        "new": "x",
    }
    neutral = {
        "num_beams": 1,
        "typical_p": 1.0,
        "no_repeat_ngram_size": 0,
        "max_length": 20,
        "begin_suppress_tokens": None,
        "bad_words_ids": [],
        "sequence_bias": {},
        "forced_eos_token_id": None,
    }
    assert [field.partition("=")[0] for field in card_of(Path("x"), said, 40).ignored] == sorted(said)
    assert card_of(Path("x"), neutral, 40).ignored == ()


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"eos_token_id": "</s>"}, "eos_token_id='</s>': expected a token id or a list of ids"),
        ({"do_sample": "yes"}, "do_sample='yes': expected true or false"),
        ({"do_sample": True, "top_p": 2}, "top_p=2"),
        ({"suppress_tokens": [[1]]}, r"suppress_tokens=\[\[1\]\]: expected a token id or a list of ids"),
        ({"suppress_tokens": list(range(39)), "begin_suppress_tokens": [39]}, "have all ids: expected some"),
        *(
            ({field: value}, f"asks for {field}=.*, which kvjax does not apply to answers; expected null")
            for field, value in {
                "forced_bos_token_id": 0,
                "forced_eos_token_id": [2],
                "bad_words_ids": [[1]],
                "force_words_ids": [[1]],
                "constraints": ["x"],
                "sequence_bias": [[[1], -10.0]],
                "stop_strings": "x",
            }.items()
        ),
    ],
)
def test_values_that_are_not_accepted(said, message):
    with pytest.raises(CheckpointError, match=message):
        card_of(Path("x"), said, 40)


@pytest.mark.long
@pytest.mark.parametrize("where", ["config.json", "generation_config.json"])
def test_answers_end_at_the_tokens_of_the_checkpoint(tmp_path, where):
    """Without a tokenizer, too."""
    save_hf(decoder(), tmp_path)
    prompt = [[3, 1, 2]]
    first = kvjax.generate(load(tmp_path)[0], prompt, max_new_tokens=4).tokens[0].tolist()
    content = written(tmp_path, where) if where == "config.json" else {}
    (tmp_path / where).write_text(json.dumps(content | {"eos_token_id": [39, first[1]], "no_repeat_ngram_size": 2}))
    with pytest.warns(UserWarning, match="asks for no_repeat_ngram_size=2 when text is generated") as told:
        params, _ = load(tmp_path)
    assert {warning.filename for warning in told} == {__file__}
    length = first.index(first[1]) + 1
    assert kvjax.generate(params, prompt, max_new_tokens=4).tokens[0].tolist() == first[:length]
    assert len(list(kvjax.stream(params, prompt, max_new_tokens=4))) == length
    with kvjax.Engine(params, rows=1, max_prompt=8, max_new_tokens=4) as engine:
        assert engine.submit(prompt[0]).result().finish == "end"


@pytest.mark.long
@pytest.mark.parametrize("where", ["config.json", "generation_config.json"])
def test_suppressed_tokens_are_never_drawn(tmp_path, where):
    """Of the first tokens without any, one is suppressed at the beginning, and the next ones everywhere."""
    params, prompt, steps = decoder(), [3, 1, 2], 6
    free = kvjax.generate(params, [prompt], max_new_tokens=steps).tokens[0].tolist()
    first, always = [free[0]], sorted({*free} - {free[0]})
    save_hf(params, tmp_path)
    content = written(tmp_path, where) if where == "config.json" else {}
    content |= {"suppress_tokens": [*always, 99], "begin_suppress_tokens": first, "eos_token_id": None}
    (tmp_path / where).write_text(json.dumps(content))
    params, _ = load(tmp_path)
    assert params.card.suppressed == (tuple(always), tuple(first))
    expected: list[int] = []
    for _ in range(steps):
        (logits,) = full_logits(params, [np.array([*prompt, *expected])], 16)
        never = [*always, *(first if not expected else [])]
        expected.append(int(np.ma.masked_where(np.isin(np.arange(40), never), logits[-1]).argmax()))
    assert expected != free
    assert kvjax.generate(params, [prompt], max_new_tokens=steps).tokens[0].tolist() == expected
    assert [int(piece.tokens[0]) for piece in kvjax.stream(params, [prompt], max_new_tokens=steps)] == expected
    with kvjax.Engine(params, rows=1, max_prompt=8, max_new_tokens=steps) as engine:
        assert engine.submit(prompt).result().tokens.tolist() == expected
        hot = engine.submit(prompt, sampler=Sampler(100.0), seed=2).result()
    drawn = kvjax.generate(params, [prompt] * 64, max_new_tokens=steps, sampler=Sampler(100.0, repetition_penalty=0.5))
    for tokens in (np.array([hot.tokens]), np.asarray(drawn.tokens)):
        assert not np.isin(tokens, always).any()
        assert not np.isin(tokens[:, 0], first).any()


def test_what_goes_on_begins_no_answer():
    """The tokens that no answer begins with may be the first ones of an answer that goes on."""
    params = decoder()
    params.card = replace(params.card, suppressed=Suppressed((5,), (7, 8)))
    cache = replace(tiny.empty(params, "full", np.array([4]), 4), pending=jnp.array([3]))

    def suppressed(prompt: list[int] | None) -> Suppressed:
        sampling = Request.of(params, prompt, cache=cache, answer=AnswerOptions(1)).sampling
        assert sampling is not None
        return sampling.suppressed

    assert suppressed([1, 2]) == ((5,), (7, 8))
    assert suppressed(None) == ((5,), ())


def test_no_field_of_transformers_is_lost():
    """Each field of its GenerationConfig is applied, refused, named by a warning, or known to change no token."""
    transformers = pytest.importorskip("transformers")
    warned = """
        num_beams num_beam_groups num_return_sequences guidance_scale typical_p top_h encoder_repetition_penalty
        min_length min_new_tokens no_repeat_ngram_size encoder_no_repeat_ngram_size penalty_alpha dola_layers
        exponential_decay_length_penalty epsilon_cutoff eta_cutoff token_healing watermarking_config
    """
    applied = {ENDS, PENALTY, "do_sample", *SAMPLING, *SUPPRESSED}
    known = [*applied, *REFUSED.split(), *SILENT.split(), *warned.split()]
    assert sorted(set(known)) == sorted(known)
    assert vars(transformers.GenerationConfig()).keys() <= {*known}
    for field in warned.split():
        assert card_of(Path("x"), {field: 7}, 40).ignored == (f"{field}=7",)


class Tokenizer:
    """One with the tokens of a template."""

    def __init__(self, template: Any, *tokens: str):
        self.chat_template, self.tokens = template, tokens

    def convert_tokens_to_ids(self, token: str) -> int:
        return self.tokens.index(token) if token in self.tokens else 0

    def convert_ids_to_tokens(self, index: int) -> str:
        return self.tokens[index]


def test_turns_end_where_chat_templates_end_them():
    assert turn_ends(Tokenizer("a<|im_end|>b", "<unk>", "<|im_end|>", "<|eot_id|>")) == [1]
    assert turn_ends(Tokenizer("<|turn>model a<turn|>", "<|turn>", "<turn|>")) == [1]  # Gemma 4
    assert turn_ends(Tokenizer({"default": "<end_of_turn>"}, "<unk>", "<end_of_turn>")) == [1]
    assert turn_ends(Tokenizer("<|im_end|>", "<unk>")) == []  # several tokens
    assert turn_ends(Tokenizer("<|end|> <|return|>", "<unk>", "<|end|>")) == []  # gpt-oss ends messages so
    assert turn_ends(Tokenizer(None, "<|im_end|>")) == []


def test_default_ends_beyond_the_vocabulary():
    """The model cannot generate them; the tokenizer of a larger model may state one."""
    params = tiny.decoder()
    params.card = replace(params.card, end_tokens=(3, VOCAB))
    tokenizer: Any = types.SimpleNamespace(eos_token_id=[VOCAB + 5, 4])
    assert default_ends(params, tokenizer) == (3, 4)


def test_gguf_states_ends_and_samplers():
    keys = {
        f"tokenizer.ggml.{name}_token_id": index for index, name in enumerate(("eos", "eot", "eom", "bos", "padding"))
    }
    said = generation(keys | {"general.sampling.temp": 0.6, "general.sampling.mirostat": 2})
    assert said == {
        "eos_token_id": [0, 1, 2],
        "bos_token_id": 3,
        "pad_token_id": 4,
        "do_sample": True,
        "temperature": 0.6,
        "mirostat": 2,
    }


REQUESTS = [
    ({}, Sampler(0.6, top_p=0.9), Sampler(0.6, top_p=0.9)),
    ({"temperature": 0.2}, Sampler(0.6, top_p=0.9), Sampler(0.2, top_p=0.9)),
    ({"top_p": 1.0}, Sampler(0.6, top_p=0.9), Sampler(0.6)),
    ({"temperature": 0}, Sampler(0.6, repetition_penalty=1.1), Greedy(repetition_penalty=1.1)),
    ({}, Greedy(repetition_penalty=1.2), Greedy(repetition_penalty=1.2)),
    ({"temperature": 1.0}, Greedy(repetition_penalty=1.2), Sampler(1.0, repetition_penalty=1.2)),
    ({}, Sampler(), Sampler()),
]


@pytest.mark.parametrize(("request_", "default", "expected"), REQUESTS)
def test_a_request_says_what_differs_from_the_checkpoint(request_, default, expected):
    assert Completion(model="m", prompt="p", **request_).sampler(default) == expected


def test_files_of_a_tokenizer_stay_as_they_are(tmp_path):
    words = {"<unk>": 0, "</s>": 1, "a": 2}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"}
    fields = ("truncation", "padding", "normalizer", "post_processor", "decoder")
    files = {
        "tokenizer.json": dict.fromkeys(fields)
        | {"version": "1.0", "added_tokens": [], "model": model}
        | {"pre_tokenizer": {"type": "Whitespace"}},
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "own": [1]},
        "special_tokens_map.json": {"eos_token": "</s>"},
    }
    save_hf(decoder(), tmp_path / "first")
    for name, content in files.items():
        (tmp_path / "first" / name).write_text(json.dumps(content))
    (tmp_path / "first" / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "first" / "additional_chat_templates").mkdir()
    (tmp_path / "first" / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    names = [*files, "chat_template.jinja", "additional_chat_templates/tools.jinja"]
    params, tokenizer = load(tmp_path / "first")
    save_hf(params, tmp_path / "second", tokenizer)
    kvjax.checkpoint.plan_conversion(tmp_path / "second", tmp_path / "third", "orbax").run()
    for folder, name in ((folder, name) for folder in ("second", "third") for name in names):
        assert (tmp_path / folder / name).read_bytes() == (tmp_path / "first" / name).read_bytes()
    tokenizer.chat_template = "{{ others }}"
    save_hf(params, tmp_path / "changed", tokenizer)
    assert load(tmp_path / "changed")[1].chat_template == "{{ others }}"
