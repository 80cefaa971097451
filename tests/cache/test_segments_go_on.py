"""Segments of a pool in later turns, in chunks of a prompt, and in single steps."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import policies
from kvjax.parts import Fixed, GlobalShares
from tests.cache.test_segments import (
    HEADS,
    LAYERS,
    MORPHKV,
    NEW,
    ONE_LAYER,
    ROWS,
    SNAPKV,
    WINDOWED,
    Even,
    on,
    params,
    segments,
)
from tests.products import part
from tests.tiny import full_logits, held, prefill, step


@pytest.mark.slow
@pytest.mark.parametrize(("text", "new"), part([(SNAPKV, 70), (MORPHKV, NEW)], [(MORPHKV, NEW)]))
def test_turns(text, new):
    """A question of several tokens gives what it gives in layers of slots, and the same entries are held."""
    answers, model = [], params(WINDOWED)
    for policy in (policies.parse(text), on(Even(Fixed(24), 2), text)):
        options = {"max_new_tokens": new, "log_probs": True}  # one loop for all
        first = kvjax.generate(model, ROWS, policy=policy, **options)
        second = kvjax.generate(model, [row[:5] for row in ROWS], cache=first.cache, **options)
        again = kvjax.generate(model, [row[:5] for row in ROWS], cache=first.cache, **options)
        np.testing.assert_array_equal(again.tokens, second.tokens)  # the first cache is as it was
        answers.append(second)
    np.testing.assert_array_equal(answers[0].tokens, answers[1].tokens)
    np.testing.assert_allclose(answers[0].log_probs, answers[1].log_probs, atol=1e-5, rtol=0)
    assert segments(answers[1].cache) == [held(answers[0].cache, row) for row in range(len(ROWS))]


@pytest.mark.slow
def test_a_prompt_in_chunks_is_the_same():
    policy, model = on(GlobalShares(Fixed(24)), SNAPKV), params(ONE_LAYER)
    whole = kvjax.generate(model, ROWS, policy=policy, max_new_tokens=NEW)
    chunked = kvjax.generate(model, ROWS, policy=policy, max_new_tokens=NEW, chunk=32)
    np.testing.assert_array_equal(chunked.tokens, whole.tokens)
    assert segments(chunked.cache) == segments(whole.cache)


def test_an_empty_layer_works():
    """One layer has the complete budget. The other sees generated tokens and nothing of the prompt."""

    @dataclass(frozen=True)
    class First(Even):
        def allocate(self, scores, means, least, heads):
            own = jnp.where(jnp.arange(LAYERS)[:, None] == 0, LAYERS * means, 0)
            return jnp.broadcast_to(own[..., None], scores.shape[:3])

    policy = on(First(Fixed(20)), "snapkv:budget=20,window=4")
    _, cache = prefill(params(), policy, ROWS, 64)
    assert cache.entries.used[0][1].tolist() == [40] * HEADS
    assert not cache.entries.used[1].any()
    logits, cache = step(params(), cache, np.array([1, 2, 3]), np.ones(3, bool))
    assert np.isfinite(logits).all()
    assert cache.entries.used[1].tolist() == [[1] * HEADS] * 3


def test_steps_from_outside():
    """`extend` and `with_room`, eagerly and under jit, give full attention while all entries fit the budget."""
    policy, model = on(GlobalShares(Fixed(99)), "snapkv:budget=99,window=4"), params(ONE_LAYER)
    text = ROWS[0] + ROWS[1]
    expected = full_logits(model, [np.array(text)], 128)[0]
    _, cache = prefill(model, policy, [ROWS[0]], 48, room=0)
    done = len(ROWS[0])
    for _ in range(np.min(np.asarray(cache.entries.size) - np.asarray(cache.entries.used))):
        _, cache = kvjax.extend(model, cache, np.array([[text[done]]]))
        done += 1
    with pytest.raises(ValueError, match=r"room for 0 tokens, not 1; call kvjax.with_room"):
        kvjax.extend(model, cache, np.array([[text[done]]]))
    cache = kvjax.with_room(cache, 30)
    logits, cache = jax.jit(lambda p, c, t: kvjax.extend(p, c, t))(model, cache, np.array([[text[done]]]))
    np.testing.assert_allclose(logits[0], expected[done], atol=1e-4)
    logits, cache = kvjax.extend(model, cache, np.array([text[done + 1 : done + 8]]))
    np.testing.assert_allclose(logits[0], expected[done + 7], atol=1e-4)
