"""Stored prefixes: the same answers as from a prefilled cache, and how many are held."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.engine.stored import CacheStore
from kvjax.models import Decoder
from kvjax.policies import parse
from tests.engine.test_tokens import KINDS
from tests.patience import PATIENCE
from tests.products import part

RNG = np.random.default_rng(3)
SIZES = {"rows": 2, "max_prompt": 28, "max_new_tokens": 24, "chunk": 16}
AGNOSTIC = [text for text in KINDS if not parse(text).asks_the_end]
CHOSEN = [text for text in AGNOSTIC if text.startswith("adakv")]


@pytest.mark.long
@pytest.mark.parametrize("policy", part([*AGNOSTIC, "keydiff:budget=12,every=1", "knorm:budget=0.5"], CHOSEN))
def test_answers_are_those_of_a_prefilled_cache(policy: str, tiny: Decoder) -> None:
    documents = [RNG.integers(0, 101, n).tolist() for n in (3, 13, 28)]
    questions = [RNG.integers(0, 101, n).tolist() for n in (1, 5, 12)]
    asked = [(document, question) for question in questions for document in documents]
    with kvjax.Engine(tiny, policy, **SIZES, prefix_memory="1MB") as engine:
        handles = [engine.submit(question, prefix=document, max_new_tokens=9) for document, question in asked]
        answers = [handle.result(timeout=PATIENCE) for handle in handles]
        found = engine.stats().prefixes
    assert (found.misses, found.hits) == (3, 6)
    caches = {tuple(document): kvjax.prefill(tiny, document, policy=policy) for document in documents}
    for (document, question), answer in zip(asked, answers, strict=True):
        alone = kvjax.generate(tiny, question, cache=caches[tuple(document)], max_new_tokens=9)
        assert answer.tokens.tolist() == alone.tokens[0].tolist()
        assert answer.prompt_tokens == len(document) + len(question)


@pytest.mark.parametrize(
    ("policy", "part"),
    [
        ("snapkv:budget=16,window=4", "WindowAttention"),
        ("morphkv:budget=16,window=4", "FoldedWindow"),
        ("tova:budget=16", "LastAttention"),
        ("finch:budget=24,window=4,chunk=8", "WindowAttention"),
        ("criticalkv:base=snapkv,base.budget=16,base.window=4", "ProjectedValues"),
        ("think:base=knorm,base.budget=16", "ThinKeys"),
        ("zipcache:base=knorm,base.budget=16", "SalientCodes"),
    ],
)
def test_policies_that_must_see_the_question_are_refused_by_name(policy: str, part: str, tiny: Decoder) -> None:
    with pytest.raises(ValueError, match=rf"^{part} looks at the last queries of a prompt"):
        kvjax.Engine(tiny, policy, **SIZES, prefix_memory="1MB")


@pytest.mark.long
def test_engines_of_two_policies_share_a_folder(tiny: Decoder, tmp_path: Path) -> None:
    document, question = RNG.integers(0, 101, 28).tolist(), [3, 4, 5]
    for policy in ("knorm:budget=12", "keydiff:budget=12"):  # caches of the same shapes
        with kvjax.Engine(tiny, policy, **SIZES, prefix_memory="1MB", prefix_folder=tmp_path) as engine:
            answer = engine.submit(question, prefix=document, max_new_tokens=9).result(timeout=PATIENCE)
            found = engine.stats().prefixes
        assert (found.misses, found.hits) == (1, 0), policy
        alone = kvjax.generate(tiny, question, cache=kvjax.prefill(tiny, document, policy=policy), max_new_tokens=9)
        assert answer.tokens.tolist() == alone.tokens[0].tolist(), policy


@pytest.mark.slow
def test_a_mesh_writes_prefixes_to_disk_and_reads_them(shallow: Decoder, tmp_path: Path) -> None:
    """The mesh reads what it wrote, and so does one device."""
    policy, document, question = "h2o:budget=12", [5] * 20, [3, 4, 5]
    params = kvjax.shard(shallow, kvjax.make_mesh(2, 2, devices=jax.devices()[:4]))
    read = kvjax.prefill(shallow, document, policy=policy)
    expected = kvjax.generate(shallow, question, cache=read, max_new_tokens=9).tokens[0].tolist()
    options = {**SIZES, "chunk": 32, "prefix_memory": "1MB", "prefix_folder": tmp_path}
    with kvjax.Engine(params, policy, **options) as engine:
        for _ in range(2):
            answer = engine.submit(question, prefix=document, max_new_tokens=9).result(timeout=PATIENCE)
            assert answer.tokens.tolist() == expected
            engine._reuse.prefixes._far.clear()  # as in a later engine
        stats = engine.stats().prefixes
        assert (stats.hits, stats.misses) == (1, 1)
    store = CacheStore(shallow, parse(policy), engine.sizes, memory=10**6, folder=tmp_path)
    found = store.get(np.array(document))
    assert found is not None
    stored = replace(jax.tree.map(jnp.asarray, found.cache), mesh=None)
    assert kvjax.generate(shallow, question, cache=stored, max_new_tokens=9).tokens[0].tolist() == expected


@pytest.mark.slow
def test_what_does_not_fit_after_a_prefix_is_refused(shallow: Decoder, tmp_path: Path) -> None:
    with kvjax.Engine(shallow, "full", **SIZES, prefix_memory=10**6) as engine:
        with pytest.raises(ValueError, match="the prefix has 29 tokens: expected at most max_prompt=28"):
            engine.submit([1], prefix=[1] * 29)
        with pytest.raises(ValueError, match="the prompt after a prefix has 17 tokens: expected at most chunk=16"):
            engine.submit([1] * 17, prefix=[1])
        assert engine.submit([1] * 16, prefix=[2] * 28, max_new_tokens=1).result(timeout=PATIENCE).prompt_tokens == 44
    sizes = {"rows": 1, "max_prompt": 16, "max_new_tokens": 60}
    with kvjax.Engine(shallow, "knorm:budget=6", **sizes, prefix_memory=10**6) as engine:
        with pytest.raises(ValueError, match=r"a question of 10 tokens and an answer of 60 do not fit after a prefix"):
            engine.submit([1] * 10, prefix=[1] * 12)
        assert len(engine.submit([1] * 10, prefix=[1] * 12, max_new_tokens=54).result(timeout=PATIENCE).tokens) == 54
    with pytest.raises(ValueError, match="without prefix_memory: expected both"):
        kvjax.Engine(shallow, "full", **SIZES, prefix_folder=tmp_path)
    with pytest.raises(ValueError, match="is a file: expected a folder"):
        kvjax.Engine(shallow, "full", **SIZES, prefix_memory="1MB", prefix_folder=__file__)
