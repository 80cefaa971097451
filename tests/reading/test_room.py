"""Room for tokens to come: who waits to know of it, and what happens where there is none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import policies
from kvjax.extend import extend
from kvjax.reading import room
from kvjax.reading.room import usage, with_room
from tests import tiny
from tests.test_extend import ROWS, SIZE, STEPS


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the arrays that the host has waited for. A CPU's arrays pass `jax.transfer_guard` unseen."""
    kind, sizes = type(jnp.zeros(1)), []

    def noted(take):
        return lambda x: (sizes.append(x.size), take(x))[1]

    monkeypatch.setattr(kind, "_value", property(noted(kind._value.fget)))  # of int(x), bool(x) and the like
    monkeypatch.setattr(room, "fetch", noted(room.fetch))
    return sizes


@pytest.mark.long(first=2)
@pytest.mark.slow(first=4)
@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("morphkv:budget=12,window=4", []),
        ("h2o:budget=12", []),
        ("adakv:base=h2o,base.budget=12", []),
        ("snapkv:budget=12,window=4", [4]),  # how full each of two layers is, and what is free
        (policies.duo_attention(((0.1, 0.9), (0.9, 0.1)), 0.5, 2, 6), [4]),
        ("kvcompose:budget=12", [4]),
    ],
)
def test_a_step_waits_only_where_slots_can_run_out(spec, expected, fetched):
    params = tiny.decoder(windows=(None, None))
    _, cache = tiny.prefill(params, spec, ROWS, SIZE)
    lengths = np.ones(3, np.int32)
    extend(params, cache, STEPS[0][:, None])
    for given in (None, lengths, jnp.asarray(lengths)):
        fetched.clear()
        extend(params, cache, STEPS[1][:, None], given)
        assert fetched == expected


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("spec", ["snapkv:budget=12,window=4", "kvcompose:budget=12", "full"])
def test_logits_are_nan_where_a_step_in_jit_finds_no_room(spec):
    """Row 1 takes no token. Without room it has nothing to lose."""
    params = tiny.decoder()
    _, cache = tiny.prefill(params, spec, ROWS, SIZE, room=0)
    cache, inside = with_room(cache, 3), jax.jit(extend)
    incoming, free = np.array([1, 0, 1]), usage(cache).free[0]
    assert 3 <= free < 64
    for _ in range(free):
        logits, cache = inside(params, cache, STEPS[0][:, None], incoming)
        assert np.isfinite(logits).all()
    logits, _ = inside(params, cache, STEPS[0][:, None], incoming)
    assert np.isnan(logits[0]).all()
    assert np.isfinite(logits[1]).all()
    with pytest.raises(ValueError, match=r"layer 0 has room for 0 tokens, not 1; call kvjax.with_room"):
        extend(params, cache, STEPS[0][:, None], incoming)


@pytest.mark.long
def test_logits_are_nan_where_lengths_of_a_device_are_wrong():
    params = tiny.decoder()
    _, cache = tiny.prefill(params, "h2o:budget=12", ROWS, SIZE)
    for call in (extend, jax.jit(extend)):
        logits, _ = call(params, cache, STEPS.T, jnp.array([4, 5, -1]))
        assert np.isnan(logits).all(axis=1).tolist() == [False, True, True]


@pytest.mark.parametrize("given", [-1, 2**31, 1.5, True, "8"])
def test_room_that_is_no_number_of_tokens_is_refused(given):
    cache = kvjax.empty_cache(tiny.decoder(), policies.full(), np.array([8]))
    with pytest.raises(ValueError, match=r"expected an integer in 0 \.\. 2147483647"):
        with_room(cache, given)
    with pytest.raises(ValueError, match="expected"):
        with_room("cache", 8)
