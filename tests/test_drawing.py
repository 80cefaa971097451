"""`kvjax.inspection.draw`: its shades are those of the cache, and its labels those of the tokens."""

import re
import sys
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

import kvjax
from kvjax.inspection import draw
from kvjax.models import Decoder

PROMPT = (np.arange(60) * 7 % 99).tolist()
POLICY = "snapkv:budget=12,window=4"


def drawn(figure: Any) -> tuple[np.ndarray, np.ndarray]:
    """The edges of the columns, and the shades by layer and column."""
    (mesh,) = figure.axes[0].collections
    return mesh.get_coordinates()[0, :, 0], mesh.get_array()


@pytest.mark.long
def test_shades_are_shares_of_heads(tiny: Decoder) -> None:
    pytest.importorskip("matplotlib")
    cache = kvjax.prefill(tiny, [PROMPT, PROMPT[:30]], policy=POLICY)
    for row, seen in enumerate((60, 30)):
        edges, shades = drawn(draw(cache, row=row))
        np.testing.assert_array_equal(edges, np.arange(seen + 1) - 0.5)
        np.testing.assert_array_equal(shades, cache.retained_mask()[row, ..., :seen].mean(axis=1))
    edges, shades = drawn(draw(cache, positions=range(50, 60)))
    np.testing.assert_array_equal(edges, np.arange(50, 61) - 0.5)
    assert (shades[:, 6:] == 1).all()  # the window


@pytest.mark.long
def test_columns_of_a_long_text_are_means(shallow: Decoder) -> None:
    pytest.importorskip("matplotlib")
    cache = kvjax.prefill(shallow, np.arange(1401) % 99, policy=POLICY)
    edges, shades = drawn(draw(cache))
    assert edges.tolist() == [*np.arange(0, 1401, 3) - 0.5, 1400.5]
    mask = cache.retained_mask()[0].mean(axis=1)
    np.testing.assert_allclose(shades, mask.reshape(1, -1, 3).mean(axis=-1))


@pytest.mark.long
def test_a_notebook_shows_the_texts(tiny: Decoder, tokenizer: PreTrainedTokenizerFast) -> None:
    pytest.importorskip("matplotlib")
    out = kvjax.generate(tiny, [PROMPT], policy=POLICY, max_new_tokens=3, tokenizer=tokenizer, eos=())
    tokens = [*PROMPT, *out.tokens[0].tolist()]
    figure = draw(out.cache, tokens, tokenizer=tokenizer)
    labels = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert labels == tokenizer.convert_ids_to_tokens(tokens[:-1])  # the last one has no entry yet
    ids = draw(out.cache, tokens, positions=range(3)).axes[0].get_xticklabels()
    assert [label.get_text() for label in ids] == ["0", "7", "14"]
    assert figure._repr_png_().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"row": 1}, "row=1: expected an integer in 0 .. 0, or in -1 .. -1"),
        ({"positions": range(0, 91)}, "positions=range(0, 91): expected a range of step 1 within range(0, 90)"),
        ({"positions": range(5, 5)}, "positions=range(5, 5): expected a range of step 1 within range(0, 90)"),
        ({"positions": range(0, 9, 2)}, "positions=range(0, 9, 2): expected a range of step 1 within range(0, 90)"),
        ({"positions": 5}, "positions=5: expected a range of step 1 within range(0, 90)"),
        ({"tokens": range(90)}, "tokens at 90 positions: expected positions=range(...) of at most 80"),
        ({"tokens": [1, 2], "positions": range(5)}, "tokens has the shape (2,): expected at least (90,), what the row"),
        ({"tokens": "the king", "positions": range(5)}, "tokens"),
        ({"tokenizer": 3}, "tokenizer is of type int: expected a tokenizer of transformers or None"),
        ({"tokens": [0.5] * 90, "positions": range(5)}, "tokens"),
    ],
)
def test_what_cannot_be_drawn_is_refused(shallow: Decoder, options: dict[str, Any], message: str) -> None:
    cache = kvjax.prefill(shallow, list(range(90)))
    with pytest.raises(ValueError, match=re.escape(message)):
        draw(cache, **options)


def test_caches_without_entries_cannot_be_drawn(shallow: Decoder) -> None:
    """Neither an empty one, nor a planned one, of which nothing else can be asked either."""
    policy = kvjax.policies.full()
    with pytest.raises(ValueError, match="row 0 of the cache has seen no token: expected a cache that has read a pro"):
        draw(kvjax.empty_cache(shallow, policy, np.array([8])))
    plan = kvjax.plan_cache(shallow.config, policy, batch=1, length=8, new_tokens=1, dtype="float32")
    calls: list[Any] = [
        lambda: draw(plan),
        lambda: plan.retained(0, 0),
        lambda: kvjax.extend(shallow, plan, np.array([[1]])),
        lambda: kvjax.prefill(shallow, [1], cache=plan),
        lambda: kvjax.save_cache("nowhere", plan, shallow),
    ]
    for call in calls:
        with pytest.raises(
            ValueError, match="a planned cache has shapes and no values: expected a cache that has been"
        ):
            call()


def test_without_matplotlib_an_error_names_it(shallow: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("matplotlib", "kvjax.inspection.figure"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r"draw: .*matplotlib.*; pip install .*plot"):
        draw(kvjax.prefill(shallow, [1, 2, 3]))
    with pytest.raises(ValueError, match="cache is of type NoneType: expected a KVCache"):
        draw(None)
