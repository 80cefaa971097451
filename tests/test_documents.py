"""One document and many questions, and how caches and answers print."""

from contextlib import suppress

import jax
import pytest
from transformers import PreTrainedTokenizerFast

import kvjax
from kvjax import policies
from kvjax.models import Decoder


@pytest.mark.long
@pytest.mark.parametrize(
    "policy",
    [
        "full",
        "h2o:budget=24",
        "adakv:base=h2o,base.budget=24,groups=2",
        "think:base=snapkv,base.budget=24,base.window=4,ratio=0.5,window=4,recent=3",
    ],
)
def test_questions_of_one_document(shallow: Decoder, policy: str) -> None:
    """A cache of one row stands for all rows of a prompt, and stays as it is."""
    document = kvjax.prefill(shallow, list(range(1, 61)), policy=policy)
    questions = [[3, 4], [5], [6, 7, 8]]
    together = kvjax.generate(shallow, questions, cache=document, max_new_tokens=5)
    alone = [kvjax.generate(shallow, question, cache=document, max_new_tokens=5) for question in questions]
    assert together.tokens.tolist() == [one.tokens[0].tolist() for one in alone]
    assert together.cache.length.tolist() == [int(one.cache.length[0]) for one in alone]
    assert document.batch_size == 1


@pytest.mark.long(first=1)
@pytest.mark.parametrize(
    ("policy", "brief"),
    [
        ("knorm:budget=16", "knorm:budget=16"),
        ("snapkv:budget=16,window=4", "WindowAttention, Fixed of 16"),
    ],
)
def test_caches_and_answers_print_as_one_line(
    shallow: Decoder, tokenizer: PreTrainedTokenizerFast, policy: str, brief: str
) -> None:
    document = kvjax.prefill(shallow, list(range(1, 61)), policy=policy)
    size = document.nbytes / 1000
    text = f"KVCache({brief}, 1 row, 1 x 2 heads, 16 of 60 tokens, {size:.3g} kB)"
    assert str(document) == repr(document) == text
    out = kvjax.generate(shallow, [[3], [5]], cache=document, max_new_tokens=2, tokenizer=tokenizer, eos=())
    assert repr(out).startswith(f"Generation({out.text!r}, 2 rows, 4 tokens, KVCache({brief}, 2 rows, ")
    assert "18 of 62 tokens in the longest" in repr(out)
    assert "tokens" not in repr(jax.eval_shape(lambda cache: cache, document))


@pytest.mark.parametrize("budget", [2048, 0.25])
def test_policies_have_short_names(budget: int | float) -> None:
    """A preset with a budget has its own name, or that of a preset that makes the same policy."""
    named = 0
    for make in policies.PRESETS.values():
        with suppress(TypeError, ValueError):  # it takes no budget, or none of this kind
            policy = make(budget=budget)
            assert policies.parse(policies.brief(policy)) == policy
            named += 1
    assert named > 30
    importance = policies.headkv(budget=budget, beta=2.0)
    assert policies.brief(importance) == f"WindowAttention, ImportanceShares of {budget}"
