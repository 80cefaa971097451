"""A model that says what a script tells it: the token after each token is fixed, and prompts end with a script's name.

The layer adds nothing, so that the logits of a token are the products of its embedding with all others', and the column
of each token is the embedding of the token before it in its script. Prompts are bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise

import jax.numpy as jnp
import numpy as np
from flax import nnx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvjax.models import Decoder, DecoderConfig, Rope

TAIL = 40  # characters of a text that are one token: calls end alike
VOCAB = 512  # the same for all scripts, so that tests share what is compiled
WHOLE = (
    "{{ tools | tojson if tools }}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}\n{% endfor %}"
)
# Prompts of at most 16 bytes, so that an engine has the programs of one length: sizes stand for what WHOLE writes.
SIZES = (
    "{{ tools | tojson | length if tools }}{% for m in messages %}{{ m.role[0] }}"
    "{{ m.tool_calls | tojson | length if m.tool_calls }}{% endfor %}"
)
HERMES = SIZES + "{# <tool_call> #}"
ASKS = "{{ '<s' ~ messages | selectattr('role', 'equalto', 'tool') | list | length ~ '>' if add_generation_prompt }}"


def cut(text: str, special: Sequence[str], used: set[str]) -> Iterator[str]:
    """Divides a text into special tokens, and others of at least four characters that are not used yet."""
    for part in re.split("|".join(f"({re.escape(name)})" for name in special) or "$^", text):
        if part in special:
            assert part not in used, f"{part} comes twice, and one token has one successor"
            used.add(part)
            yield part
            continue
        while part:
            sizes = range(4, len(part) + 1) if len(part) > TAIL else [len(part)]
            size = next(n for n in sizes if part[:n] not in used)
            used.add(part[:size])
            yield part[:size]
            part = part[size:]


def scripted(
    scripts: Sequence[str], template: str = HERMES, special: Sequence[str] = ()
) -> tuple[Decoder, PreTrainedTokenizerFast]:
    """A model and its tokenizer. The answer to a dialogue with n messages of tools is script n."""
    used: set[str] = set()
    special = ["</s>", *special]
    lines = [[f"<s{i}>", *cut(text, [*special, *re.findall(r"<s\d+>", text)], used)] for i, text in enumerate(scripts)]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    names = [*special, *(line[0] for line in lines)]
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    pieces = [piece for line in lines for piece in line if piece not in names]
    backend.add_tokens([AddedToken(piece, special=False, normalized=False) for piece in pieces])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    tokenizer.chat_template = template + ASKS
    return _model(tokenizer, lines), tokenizer


def _model(tokenizer: PreTrainedTokenizerFast, lines: Sequence[Sequence[str]]) -> Decoder:
    vocab, width = VOCAB, 256
    assert len(tokenizer) <= vocab
    params = Decoder(DecoderConfig("llama", vocab, width, 16, 2, 1, 8, (None,), Rope(1e4), 1 << 16), nnx.Rngs(0))
    embed = np.random.default_rng(0).normal(size=(vocab, width)).astype(np.float32)
    embed /= np.linalg.norm(embed, axis=1, keepdims=True)
    columns = np.zeros_like(embed)
    known = [[tokenizer.convert_tokens_to_ids(token) for token in [*line, "</s>"]] for line in lines]
    for before, after in chain.from_iterable(map(pairwise, known)):
        columns[after] += embed[before]
    for ids in known:
        assert (columns @ embed[ids[:-1]].T).argmax(0).tolist() == ids[1:], "embeddings are too much alike"
    layer = params.layers[0]
    for weight in (layer.attention.output, layer.mlp.down):
        weight[...] = jnp.zeros_like(weight[...])
    params.embed[...] = jnp.asarray(embed)
    assert params.unembed is not None
    params.unembed[...] = jnp.asarray(columns.T)
    return params
