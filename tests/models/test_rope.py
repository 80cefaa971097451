"""RoPE frequencies against transformers, for several prompt lengths, and the rotation against complex numbers."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from transformers import LlamaConfig, modeling_rope_utils

from kvjax.models import Rope, config_from_hf, rotate
from kvjax.models.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    YarnScaling,
)

D = 16
LENGTHS = (1, 31, 32, 33, 100, 4000)
SHORT, LONG = [1 + 0.1 * i for i in range(8)], [2.0 + i for i in range(8)]
BASE = {"rope_theta": 5e4, "original_max_position_embeddings": 32}
SCALINGS = [
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
    {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    {"rope_type": "llama3", **BASE, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "yarn", **BASE, "factor": 4.0},
    {"rope_type": "yarn", **BASE, "factor": 4.0, "truncate": False, "beta_fast": 4.0, "beta_slow": 0.5},
    {"rope_type": "yarn", **BASE, "factor": 4.0, "mscale": 2.0, "mscale_all_dim": 0.5},
    {"rope_type": "yarn", **BASE, "factor": 0.5, "mscale": 2.0},
    {"rope_type": "yarn", **BASE, "factor": None, "attention_factor": 1.25},
    {"rope_type": "longrope", **BASE, "short_factor": SHORT, "long_factor": LONG},
    {"rope_type": "longrope", **BASE, "short_factor": SHORT, "long_factor": LONG, "factor": 2.0},
    {"rope_type": "longrope", **BASE, "short_factor": SHORT, "long_factor": LONG, "attention_factor": 1.5},
]


def config(fields, **others):
    return LlamaConfig(
        hidden_size=32,
        num_attention_heads=2,
        head_dim=D,
        max_position_embeddings=32 if fields["rope_type"] == "dynamic" else 128,
        rope_parameters=dict(fields),
        **others,
    )


def divisors(factor, shares):
    """What frequencies are divided by if a share of each is divided by a factor."""
    return [1 / (1 - share + share / factor) for share in shares]


LLAMA3 = [1 - (64 * frequency / (2 * np.pi) - 1) / 3 for frequency in (10**-0.5, 0.1)]  # of 3.2 and 1.02 turns
YARN = 2 * np.log10(64 / (2 * np.pi))  # the pair that turns once within 64 positions, between 2 and 3


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        (None, np.ones(8)),
        (LinearScaling(4.0), np.full(8, 4)),
        (ProportionalScaling(2.0, 0.5), [2] * 4 + [np.inf] * 4),
        (Llama3Scaling(8.0, 1.0, 4.0, 64), divisors(8, [0, *LLAMA3, 1, 1, 1, 1, 1])),
        (YarnScaling(4.0, 1.0, 32.0, 1.0, True, 64), divisors(4, [0, 1 / 3, 2 / 3, 1, 1, 1, 1, 1])),
        (YarnScaling(4.0, 1.0, 32.0, 1.0, False, 64), divisors(4, [0, 1 / YARN, 2 / YARN, 1, 1, 1, 1, 1])),
    ],
    ids=lambda x: type(x).__name__,
)
def test_frequencies_by_hand(scaling, expected):
    """Of eight pairs with the base 10,000: 10^(-i / 2), divided. YaRN's ramp begins at pair 0."""
    plain = np.array([10 ** (-i / 2) for i in range(8)])
    np.testing.assert_allclose(Rope(1e4, scaling).frequencies(D), plain / expected, rtol=1e-5)


def test_frequencies_of_each_row_by_hand():
    """Of prompts of 32 positions, the original number, and of 64."""
    plain, lengths = np.array([10 ** (-i / 2) for i in range(8)]), jnp.array([32, 64])
    dynamic = Rope(1e4, DynamicScaling(2.0, 32)).row_frequencies(D, lengths)
    np.testing.assert_allclose(dynamic, [plain, plain / 3 ** (np.arange(8) / 7)], rtol=1e-5)
    longrope = Rope(1e4, LongRopeScaling(tuple(SHORT), tuple(LONG), 1.5, 32))
    np.testing.assert_allclose(longrope.row_frequencies(D, lengths), [plain / SHORT, plain / LONG], rtol=1e-5)
    with pytest.raises(ValueError, match="need the lengths"):
        longrope.frequencies(D)


@pytest.mark.parity
@pytest.mark.parametrize("fields", SCALINGS, ids=lambda fields: fields["rope_type"])
def test_frequencies_are_those_of_transformers(fields):
    pytest.importorskip("torch")
    theirs = config(fields)
    rope = config_from_hf(theirs.to_dict()).rope
    compute = modeling_rope_utils.ROPE_INIT_FUNCTIONS[fields["rope_type"]]
    rows = rope.row_frequencies(D, jnp.array(LENGTHS))
    assert (rows is not None) == rope.depends_on_length == (fields["rope_type"] in ("dynamic", "longrope"))
    for i, length in enumerate(LENGTHS):
        expected, factor = compute(theirs, "cpu", seq_len=length)
        np.testing.assert_allclose(rope.frequencies(D) if rows is None else rows[i], expected, rtol=2e-6)
        assert rope.attention_factor == pytest.approx(factor)
    if rows is not None:
        assert np.abs(np.asarray(rows[-1]) / rows[0] - 1).max() > 0.5
        with pytest.raises(ValueError, match="need the lengths"):
            rope.frequencies(D)


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("fraction", [1.0, 0.75])
def test_the_first_channels_rotate_and_the_others_are_unchanged(fraction, rows):
    B, H, N = 2, 3, 5
    rng = np.random.default_rng(0)
    x = rng.normal(size=(B, H, N, D)).astype(np.float32)
    positions = rng.integers(0, 100, (B, 1, N))
    R = int(D * fraction)
    frequencies = Rope(100.0, partial_rotary_factor=fraction).frequencies(D)
    assert frequencies.shape == (R // 2,)
    if rows:
        frequencies = np.stack([frequencies, 0.5 * frequencies])
    rotated = np.asarray(rotate(x, positions, frequencies, 1.5))
    angles = positions[..., None] * (frequencies[:, None, None] if rows else frequencies)
    expected = (x[..., : R // 2] + 1j * x[..., R // 2 : R]) * 1.5 * np.exp(1j * angles)
    np.testing.assert_allclose(rotated[..., : R // 2], expected.real, atol=1e-4)
    np.testing.assert_allclose(rotated[..., R // 2 : R], expected.imag, atol=1e-4)
    np.testing.assert_array_equal(rotated[..., R:], x[..., R:])


def test_queries_grow_beyond_the_original_context():
    """By 1 + b ln(1 + floor(p / n)); without b they stay as they are."""
    grows = Rope(1e4, YarnScaling(4.0, 1.0, 32.0, 1.0, True, 64, llama_4_scaling_beta=0.5))
    positions, q = jnp.array([[-1, 0, 63, 64, 200]]), jnp.full((1, 2, 5, 4), 2.0)
    expected = 2 * (1 + 0.5 * np.log([1, 1, 1, 2, 4]))
    np.testing.assert_allclose(grows.grown(q, positions), np.broadcast_to(expected[:, None], q.shape), rtol=1e-6)
    still = replace(grows, scaling=replace(grows.scaling, llama_4_scaling_beta=0.0))
    assert still.grown(q, positions) is q
